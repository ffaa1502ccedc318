"""Write the Hub folder of the tiny target's TokenSwift heads: weights, settings, numbers and a generated card.

    python examples/publish_tiny_tokenswift.py --run runs/tiny-tokenswift --draft tiny-tokenswift \
        --results benchmarks/results/tokenswift.jsonl

`--run` is the folder that `train_tiny_tokenswift.py` wrote, `--results` what `benchmarks/acceptance.py --draft`
measured of it under the name `--draft`. A card states nothing that is not in one of them.
"""

from tiny_draft_folder import measured, parse_arguments, training_facts, write_folder

import hf_longspec
from hf_longspec.bench.reports import acceptance_headline

# What costs least on a CPU without native bfloat16, where every further node is paid for: docs/tokenswift.md.
CPU_SETTINGS = {"self_draft": "verify_hidden", "tree_branching": [1, 1]}

CARD = """\
---
library_name: transformers
base_model: tiny-target
license: apache-2.0
language: en
tags:
- speculative-decoding
- tokenswift
- draft-model
- long-context
---

# TokenSwift heads of the tiny target

{num_heads} chained heads of {parameters:.2f}M parameters together that draft for [tiny-target](../tiny-target)
([TokenSwift](https://huggingface.co/papers/2502.18890)): head i reads what the target's final norm is given and
predicts the token i places behind the next one, through the target's own language-model head.

```python
import hf_longspec
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("hub_cards/tiny-target")
draft = AutoModel.from_pretrained("hub_cards/tiny-tokenswift")
tokenizer = AutoTokenizer.from_pretrained("hub_cards/tiny-target")

inputs = tokenizer("It was a dark and stormy night", return_tensors="pt")
out = target.generate(**inputs, assistant_model=draft, max_new_tokens=32)
```

Its `generation_config` asks for `self_draft="{self_draft}"` and `tree_branching={tree_branching}`, the cheapest tree:
one head and one candidate. Where checking nodes is cheap, try `[1, 3, 3, 3]`, the paper's.

## Acceptance by context length

{table}

{note}

{environment}

## Training

{steps:,} steps of {batch} rows, {tokens:.1f}M tokens, on the texts of the target's training: the sum over the heads
of their divergence from the distribution that the target has there, the target itself frozen. Loss {first:.3f} in the
first {every} steps and {last:.3f} in the last.

{heads}

```
{command}
```

## Limits

The heads draft for this one target and are refused by every other. What they propose never changes the text, only the
speed. They do not know which of its likely tokens the target took, so they guess less well the flatter its predictions
are; those of a target of this size are flat.
"""


def main() -> None:
    args = parse_arguments(__doc__, "tiny-tokenswift", "tokenswift.jsonl")
    draft = write_folder(args.run / "final", args.output, "train_tiny_tokenswift.py", CPU_SETTINGS)
    assert isinstance(draft, hf_longspec.TokenSwiftDraftModel)
    facts = training_facts(args.run)
    card = CARD.format(
        num_heads=draft.config.num_heads,
        parameters=sum(weight.numel() for weight in draft.parameters()) / 1e6,
        heads=accuracies(facts["last_log"], draft.config.num_heads),
        **CPU_SETTINGS,
        **measured(args.results, args.draft, acceptance_headline),
        **facts,
    )
    (args.output / "README.md").write_text(card, encoding="utf-8")


def accuracies(log: dict[str, float], num_heads: int) -> str:
    """How often each head had the target's most likely token first, and among its first three, in the last steps."""
    shares = [(log[f"head_{head}_top1"], log[f"head_{head}_top3"]) for head in range(1, num_heads + 1)]
    rows = [f"| {head} | {first:.3f} | {three:.3f} |" for head, (first, three) in enumerate(shares, 1)]
    return "\n".join(["| head | first | among three |", "|---|---|---|", *rows])


if __name__ == "__main__":
    main()
