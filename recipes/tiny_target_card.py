"""The card of the tiny target, written from the evaluation and from the record of the training run."""

import itertools
import operator
from typing import Any

from train_tiny_target import COOLDOWN, MATRIX_LR, OTHER_LR
from transformers import PreTrainedModel

from benchmarks.acceptance_card import markdown_table

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
query and {kv_heads} key/value heads, tied embeddings, bfloat16 weights. A token is a byte of UTF-8. `make demo`, tests
on real text and the benchmarks of `hf_longspec` run on it. It is small enough to come with the repository, and what
stands thousands of tokens back changes what it predicts.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("hub_cards/tiny-target")
tokenizer = AutoTokenizer.from_pretrained("hub_cards/tiny-target")
```

## Limits

Use it only for demonstrations and tests of software. A model of this size learns spelling, phrases and layout, but no
facts: its text is not to be relied on. Nothing was done to keep it from repeating the views of old novels.
"""

DEEPENED = """\
Before the stages of {layers} layers, each layer became two copies of itself that add half as much, which the training
then changed. (Copies that began with output projections of zero were tried first and stayed idle.) In these stages a
part of the rows jumps over positions, so that short rows train long distances."""
PARENT = " The run began there, with the weights of a model of {layers} layers that the earlier stages had trained."

LOSS = """\
## Use of the context

All numbers are in `evaluation.json`. They were measured in {dtype} with torch {torch}, transformers {transformers} and
Python {python}, on windows of {context:,} bytes of texts that were not trained on: {documents}. The packages are
{packages}. ± is half the width of Student's 95 % interval over windows.

Cross-entropy in nats per byte, by the number of bytes before the predicted one:

{buckets}
The bytes after the {long:,}th again, read with all that stands before them, and with the last {short} to {most} bytes
only:

{gains}
Passages of {passage} bytes that are quoted again, of which the first {cue} bytes are given: nats per byte of the rest,
and the share of it that is named right:

{recall}"""

SKIPPED = """
If each pair of layers that came from one becomes one again (the first of the two, adding twice as much), the loss is
{nats:.3f}{interval} nats per byte higher ({rows} texts)."""

TRAINING = """\
## Training

The data are the sources of the Python standard library and of the pure-Python packages of one environment, package by
package ({source} streams, {source_size:.0f} MB), and {novels} public-domain English novels ({novels_size:.0f} MB). A
share of the rows contains passages that return, and tasks whose answer stands far back. Rows grow from {first} to
{last:,} bytes; a stage with a recall to reach ends when it is reached. {deepened}

```
python recipes/train_tiny_target.py --novels novels/train --output runs/tiny-target{parent}
```

Matrices are trained with Muon (learning rate {matrix:g}, weight decay 0.01), embeddings and norms with AdamW
({other:g}); gradients are clipped to norm 1. Rates are halved from rows of 2,048 bytes on, and fall to zero over the
last {cooldown:.1f}M bytes. The run took {steps:,} steps, {bytes:.1f}M bytes and {hours:.1f} hours of {threads}. The
seed is {seed}.

{stages}"""


def write_card(model: PreTrainedModel, evaluation: dict[str, Any], training: dict[str, Any]) -> str:
    config, last, sources = model.config, training["history"][-1], evaluation["sources"]
    described = [f"{found['windows']} of {len(found['documents'])} {name}" for name, found in sources.items()]
    introduction = INTRODUCTION.format(
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        context=evaluation["context"],
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
    )
    loss = LOSS.format(
        context=evaluation["context"],
        documents=", ".join(described),
        packages=", ".join(sources["packages"]["documents"]),
        buckets=loss_table(sources),
        gains=gain_table(sources),
        recall=recall_table(sources),
        most=2 * evaluation["measured"]["short"] - 1,
        **evaluation["measured"],
        **evaluation["environment"],
    )
    if skipped := evaluation.get("half_depth"):
        half = skipped["half_width"]
        interval = "" if half is None else f" ± {half:.3f}"
        loss += SKIPPED.format(**skipped, interval=interval) + "\n"
    stages = training["stages"]
    layers, threads = [stage.get("layers") for stage in stages], training.get("threads", 2)
    deepened = DEEPENED.format(layers=layers[-1]) if layers[-1] != layers[0] else ""
    parent = training.get("parent_layers")
    if parent is not None:
        deepened += PARENT.format(layers=parent)
    trained = TRAINING.format(
        **training["streams"],
        **{f"{name}_size": size / 1e6 for name, size in training["bytes"].items()},
        deepened=deepened,
        parent=" --parent FOLDER" if parent else "",
        cooldown=COOLDOWN / 1e6,
        threads=f"{threads} CPU core" + "s" * (threads != 1),
        first=stages[0]["length"],
        last=stages[-1]["length"],
        matrix=MATRIX_LR,
        other=OTHER_LR,
        steps=last["steps"],
        bytes=last["tokens"] / 1e6,
        hours=last["seconds"] / 3600,
        seed=training["seed"],
        stages=stage_table(training["history"]),
    )
    return "\n".join((FRONT_MATTER, introduction, loss, trained))


def loss_table(sources: dict[str, Any]) -> str:
    rows = zip(*(found["buckets"] for found in sources.values()), strict=True)
    named = {f"{row[0]['from']:,} to {row[0]['to']:,}": [with_interval(b["loss"], b) for b in row] for row in rows}
    return table(["bytes before", *sources], named)


def gain_table(sources: dict[str, Any]) -> str:
    gains = {name: found["gain"] for name, found in sources.items()}
    cells = {name: [f"{g['short']:.3f}", f"{g['long']:.3f}", with_interval(g["gain"], g)] for name, g in gains.items()}
    return table(["texts", "short context", "whole context", "lower by"], cells)


def recall_table(sources: dict[str, Any]) -> str:
    rows = zip(*(found["recall"] for found in sources.values()), strict=True)
    named = {f"{row[0]['distance']:,}": [f"{r['nats']:.2f}, {r['right']:.0%}" for r in row] for row in rows}
    return table(["bytes to the quotation", *sources], named)


def stage_table(history: list[dict[str, Any]]) -> str:
    cells = []
    for _, found in itertools.groupby(history, key=operator.itemgetter("stage")):
        stage = list(found)
        end, tail = stage[-1], stage[-5:]
        loss, right = (sum(entry[name] for entry in tail) / len(tail) for name in ("loss", "recalled"))
        size, minutes = f"{end['tokens'] / 1e6:.1f}M", f"{end['seconds'] / 60:.0f}"
        recall = f"{right:.0%} at {end['distance']:,}"
        cells.append([f"{end['length']:,}", minutes, f"{end['steps']:,}", size, f"{loss:.2f}", recall])
    return markdown_table(["bytes per row", "until minute", "steps", "bytes", "loss", "recall"], cells) + "\n"


def with_interval(value: float, found: dict[str, Any]) -> str:
    return f"{value:.3f}" + ("" if found["half_width"] is None else f" ± {found['half_width']:.3f}")


def table(head: list[str], rows: dict[str, list[str]]) -> str:
    """Return a table of rows by their first cell, and the end of its last line."""
    return markdown_table(head, [[name, *cells] for name, cells in rows.items()]) + "\n"
