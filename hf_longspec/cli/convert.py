"""`hf-longspec convert`: a checkpoint of another project as a draft of this package."""

from pathlib import Path
from types import SimpleNamespace

from ..cli import options
from ..modeling.register_draft import convert
from .files import claim


def run(args: SimpleNamespace) -> None:
    options.require_existing("checkpoint", args.source)
    if args.target is not None and not Path(args.target).is_file():
        options.require_model("model of", args.target)
    claim(args.output, [args.source, args.target], overwrite=args.overwrite)
    draft = convert(args.source, args.target)
    draft.save_pretrained(args.output)
    parameters = sum(weight.numel() for weight in draft.parameters()) / 1e6
    print(f"{args.output}: {parameters:.1f}M parameters for {draft.config.target_name_or_path or args.target}.")
