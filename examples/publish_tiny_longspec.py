"""Write the Hub folder of the tiny target's LongSpec draft: weights, settings, numbers and a generated card.

    python examples/publish_tiny_longspec.py --run runs/tiny-longspec --draft tiny-longspec \
        --results benchmarks/results/longspec.jsonl

`--run` is the folder that `train_tiny_longspec.py` wrote, `--results` what `benchmarks/acceptance.py --draft` measured
of it under the name `--draft`. A card states nothing that is not in one of them.
"""

import argparse
import json
import shutil
from pathlib import Path

from transformers import AutoModel

import hf_longspec
from hf_longspec.bench.report_parts import environment_line, note
from hf_longspec.bench.reports import acceptance_headline
from hf_longspec.bench.results import read_records

ROOT = Path(__file__).resolve().parents[1]
MAX_BYTES = 4_000_000  # what a clone of the repository is asked to carry
# What pays on two CPU cores: checking 16 nodes takes four times as long as checking one (benchmarks/results/engine.md).
CPU_TREE = [1, 1, 1]
FILES = ("config.json", "generation_config.json", "model.safetensors")

CARD = """\
---
library_name: transformers
base_model: tiny-target
license: apache-2.0
language: en
tags:
- speculative-decoding
- longspec
- draft-model
- long-context
---

# LongSpec draft of the tiny target

One block of {parameters:.2f}M parameters that drafts for [tiny-target](../tiny-target): self-attention over the last
{window} tokens and cross-attention to the keys and values of the target's layer {layer}
([LongSpec](https://huggingface.co/papers/2502.17421)). Its own state takes the same memory at every context length.

```python
import hf_longspec
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("hub_cards/tiny-target")
draft = AutoModel.from_pretrained("hub_cards/tiny-longspec")
tokenizer = AutoTokenizer.from_pretrained("hub_cards/tiny-target")

inputs = tokenizer("It was a dark and stormy night", return_tensors="pt")
out = target.generate(**inputs, assistant_model=draft, max_new_tokens=32)
```

Its `generation_config` asks for a chain of {depth} tokens, which pays most on a CPU. Wider trees accept more; where
checking them is cheap, try `draft.generation_config.tree_widths = [4, 4, 4, 3]`.

## Acceptance by context length

{table}

{note}

{environment}

## Training

{steps:,} steps of {batch} rows, {tokens:.1f}M tokens, on the texts of the target's training: KL divergence to the
target's distribution, Anchor-Offset Indices over {positions:,} positions, and for every row a gap of {low} to {high}
places between a query and the newest target key it sees. Loss {first:.3f} in the first {every} steps and {last:.3f} in
the last.

```
{command}
```

## Limits

It drafts for this one target and is refused by every other. What it proposes never changes the text, only the speed; a
small model's text repeats itself under greedy decoding, which flatters greedy numbers.
"""


def main() -> None:
    args = parse_arguments()
    source = args.run / "final"
    if missing := [name for name in FILES if not (source / name).is_file()]:
        raise SystemExit(f"{source} has no {', '.join(missing)}: train with examples/train_tiny_longspec.py first")
    if (size := sum((source / name).stat().st_size for name in FILES)) >= MAX_BYTES:
        raise SystemExit(f"{source} takes {size:,} bytes, expected less than {MAX_BYTES:,}: train a smaller draft")
    draft = AutoModel.from_pretrained(source)
    assert isinstance(draft, hf_longspec.LongSpecDraftModel)
    args.output.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(source / name, args.output / name)
    # trained on the same weights under another folder
    draft.config.target_name_or_path = "tiny-target"
    draft.config.save_pretrained(args.output)
    draft.generation_config.tree_widths = CPU_TREE
    draft.generation_config.save_pretrained(args.output)
    (args.output / "README.md").write_text(card(draft, args), encoding="utf-8")
    print(f"{args.output}: {size / 1e6:.1f} MB")


def card(draft: hf_longspec.LongSpecDraftModel, args: argparse.Namespace) -> str:
    """The card, from the results file and the record of the training run."""
    state = json.loads((args.run / "trainer_state.json").read_text(encoding="utf-8"))
    command = (args.run / "command.txt").read_text(encoding="utf-8").strip()
    losses = [entry for entry in state["log_history"] if "loss" in entry]
    records = read_records(args.results) if args.results.is_file() else []
    own = [record for record in records if record.get("options", {}).get("draft", args.draft) == args.draft]
    if not any(record["kind"] == "acceptance" for record in own):
        own = []
    low, high = draft.config.noise_range
    return CARD.format(
        parameters=sum(weight.numel() for weight in draft.parameters()) / 1e6,
        window=draft.config.window,
        layer=draft.config.kv_layer,
        depth=len(CPU_TREE),
        table=acceptance_headline(own) if own else "Not measured.",
        note=note(own) if own else "",
        environment=environment_line(own) if own else "",
        steps=state["global_step"],
        batch=state["train_batch_size"],
        tokens=state["num_input_tokens_seen"] / 1e6,
        positions=draft.config.trained_max_length,
        low=low,
        high=high,
        every=losses[0]["step"],
        first=losses[0]["loss"],
        last=losses[-1]["loss"],
        command=command,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder that train_tiny_longspec.py wrote")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "longspec.jsonl")
    parser.add_argument("--draft", default="tiny-longspec", help="name of the draft in the results file")
    parser.add_argument("--output", type=Path, default=ROOT / "hub_cards" / "tiny-longspec")
    return parser.parse_args()


if __name__ == "__main__":
    main()
