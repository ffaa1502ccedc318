"""Write the Hub folder of the tiny target's LongSpec draft: weights, settings, numbers and a generated card.

    python examples/publish_tiny_longspec.py --run runs/tiny-longspec --draft tiny-longspec \
        --results benchmarks/results/longspec.jsonl

`--run` is the folder that `train_tiny_longspec.py` wrote, `--results` what `benchmarks/acceptance.py --draft` measured
of it under the name `--draft`. A card states nothing that is not in one of them.
"""

from tiny_draft_folder import measured, parse_arguments, training_facts, write_folder

import hf_longspec
from hf_longspec.bench.reports import acceptance_headline

# What pays on two CPU cores: checking 16 nodes takes four times as long as checking one (benchmarks/results/engine.md).
CPU_TREE = [1, 1, 1]

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
    args = parse_arguments(__doc__, "tiny-longspec", "longspec.jsonl")
    draft = write_folder(args.run / "final", args.output, "train_tiny_longspec.py", {"tree_widths": CPU_TREE})
    assert isinstance(draft, hf_longspec.LongSpecDraftModel)
    low, high = draft.config.noise_range
    card = CARD.format(
        parameters=sum(weight.numel() for weight in draft.parameters()) / 1e6,
        window=draft.config.window,
        layer=draft.config.kv_layer,
        depth=len(CPU_TREE),
        positions=draft.config.trained_max_length,
        low=low,
        high=high,
        **measured(args.results, args.draft, acceptance_headline),
        **training_facts(args.run),
    )
    (args.output / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
