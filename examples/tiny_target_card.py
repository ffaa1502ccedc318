"""The card of the tiny target, written from the evaluation and from the record of the training run."""

from pathlib import Path

from train_tiny_target import FINAL_LR, PEAK_LR, TOKENS_PER_STEP, WARMUP_STEPS
from transformers import PreTrainedModel

FRONT_MATTER = """\
---
library_name: transformers
pipeline_tag: text-generation
license: apache-2.0
language: en
tags:
- llama
- long-context
- speculative-decoding
- tiny
---
"""

INTRODUCTION = """\
# Tiny target

A Llama of {parameters:.1f}M parameters that reads {context:,} tokens: {layers} layers, hidden size {hidden}, {heads}
query and {kv_heads} key/value heads, tied embeddings, a byte-level BPE vocabulary of {vocabulary:,}, bfloat16 weights.
`make demo`, tests on real text and the benchmarks of `hf_longspec` run on it. It is small enough to come with the
repository, and was trained on windows of up to {longest:,} tokens.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("hub_cards/tiny-target")
tokenizer = AutoTokenizer.from_pretrained("hub_cards/tiny-target")
```

## Limits

Use it only for demonstrations and tests of software. A model of this size learns spelling, phrases and layout, but no
facts: its text is not to be relied on. Nothing was done to keep it from repeating the views of old novels.
"""

LOSS = """\
## Loss by context

The table shows the cross-entropy in nats per token by the number of tokens before the predicted one, with the half
width of a 95 % interval over the windows: {documents}. It was measured in float32 with torch
{torch} and transformers {transformers}, on the modules of Python {python}. All numbers are in `evaluation.json`.

"""

TRAINING = """\
## Training

The data are 81 public-domain English novels, and the sources and documentation topics of the Python standard library
({corpora}). The novels and modules of the evaluation above were left out.

```
{command}
```

The run took {steps:,} steps of {tokens_per_step:,} tokens or one window: {tokens:.1f}M tokens in {minutes:.0f} minutes
on a CPU. The optimizer is AdamW (betas 0.9 and 0.95, weight decay 0.05, gradients clipped to norm 1). The learning rate
rises to {peak:g} in {warmup} steps and falls along a cosine of the elapsed time to {final:g}. The seed is {seed}.

"""


def write_card(model: PreTrainedModel, evaluation: dict, training: dict) -> str:
    config, last = model.config, training["history"][-1]
    sources = evaluation["sources"]
    described = [f"{found['windows']} of {len(found['documents'])} {name}" for name, found in sources.items()]
    parts = [
        INTRODUCTION.format(
            parameters=sum(p.numel() for p in model.parameters()) / 1e6,
            context=evaluation["context"],
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            vocabulary=config.vocab_size,
            longest=max(entry["length"] for entry in training["history"]),
        ),
        LOSS.format(documents=" and ".join(described), **evaluation["environment"]) + loss_table(sources),
        TRAINING.format(
            corpora=", ".join(f"{short(name)}: {count:,} tokens" for name, count in training["corpora"].items()),
            command=training_command(training),
            steps=last["steps"],
            tokens=last["tokens"] / 1e6,
            tokens_per_step=TOKENS_PER_STEP,
            minutes=last["elapsed"] / 60,
            peak=PEAK_LR,
            final=FINAL_LR,
            warmup=WARMUP_STEPS,
            seed=training["seed"],
        )
        + history_table(training["history"]),
    ]
    return FRONT_MATTER + "\n" + "\n".join(parts)


def loss_table(sources: dict) -> str:
    lines = [f"| context | {' | '.join(sources)} |", "|---|" + "---|" * len(sources)]
    for row in zip(*(found["buckets"] for found in sources.values()), strict=True):
        cells = [f"{b['loss']:.3f}" + ("" if b["half_width"] is None else f" ± {b['half_width']:.3f}") for b in row]
        lines.append(f"| {row[0]['from']:,} to {row[0]['to']:,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def short(folder: str) -> str:
    """Return the last two names of a path; the rest is specific to the machine that trained."""
    return "/".join(Path(folder).parts[-2:])


def training_command(training: dict) -> str:
    """Return the command of the training run."""
    corpora = " ".join(f"--corpus {short(name)}" for name in training["corpora"])
    numbers = {name: ",".join(f"{value:g}" for value in training[name] or ()) for name in ("weights", "minutes")}
    options = " ".join(f"--{name} {text}" for name, text in numbers.items() if text)
    return f"python examples/train_tiny_target.py {corpora} \\\n    {options} --output runs/tiny-target"


def history_table(history: list[dict]) -> str:
    """Return a table of the last step of each window length."""
    ends = {entry["length"]: entry for entry in history}
    lines = ["| window | until minute | steps | tokens | training loss at the end |", "|---|---|---|---|---|"]
    for length, end in ends.items():
        tail = [entry["loss"] for entry in history if entry["length"] == length][-5:]
        cells = f"{length:,}", f"{end['elapsed'] / 60:.0f}", f"{end['steps']:,}", f"{end['tokens'] / 1e6:.1f}M"
        lines.append(f"| {' | '.join(cells)} | {sum(tail) / len(tail):.3f} |")
    return "\n".join(lines) + "\n"
