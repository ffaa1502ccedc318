"""`hf-longspec convert`: a checkpoint of another project as a draft of this package."""

import sys
from types import SimpleNamespace

from ..modeling.register_draft import convert


def run(args: SimpleNamespace) -> None:
    print(f"Reading {args.source}.", file=sys.stderr)
    draft = convert(args.source, args.target)
    draft.save_pretrained(args.output)
    parameters = sum(weight.numel() for weight in draft.parameters()) / 1e6
    print(f"{args.output}: {parameters:.1f}M parameters for {draft.config.target_name_or_path or args.target}.")
