"""What is wrong with the options of `bench` and `tune` together, said before anything is loaded."""

from pathlib import Path
from types import SimpleNamespace

from ..bench.results import PLOTS, check_resume, plot_beside
from ..bench.sources import BUILTIN, read_sources
from ..cli import CommandError, options
from .outputs import claim

USUAL_CONTEXT, ALL_CONTEXTS = "2k", "1k,2k,4k,8k,16k"  # of `bench`, and of its `--preset all`


def tune(args: SimpleNamespace) -> None:
    """Check `hf-longspec tune`; adds `name` and `text` of the sample."""
    from ..modeling.register_draft import DRAFTS, weightless_drafts

    if args.draft == options.AUTO:
        raise CommandError(
            f"--draft {options.AUTO} chooses a draft for a text, and tune measures the settings of one. Name the draft."
        )
    tuned = [list(one.names) for one in DRAFTS.values() if one.tune is not None]
    if args.draft in weightless_drafts() and not any(args.draft in names for names in tuned):
        others = " or ".join(name for name, *_ in tuned)
        raise CommandError(f"{args.draft} drafts have nothing to tune. Pass one of {others}.")
    read = [args.file, args.draft, args.target]
    claim([args.results], read, overwrite=args.overwrite, resume=args.resume)
    if args.resume:
        check_resume(args.results, args.resume)
    if not args.dry_run:
        _require_destination(args.draft, args.output)
        claim([args.output] if args.output is not None else [], read, overwrite=args.overwrite)
    args.name, args.text = options.read_text(args.file, args.prompt)


def bench(args: SimpleNamespace) -> None:
    """Check `hf-longspec bench`; reads the lengths of `--context` and `--batch`, and adds `documents`."""
    options.require_target(args.target)
    _drafts_to_compare(args.draft or [])
    if args.assistant is not None:
        options.require_model("assistant", args.assistant)
    args.data = args.data or [BUILTIN]
    options.require_sources("--data: ", args.data)
    contexts = (USUAL_CONTEXT if args.preset is None else ALL_CONTEXTS) if args.context is None else args.context
    args.context = options.lengths("--context", contexts)
    args.batch = options.lengths("--batch", args.batch, options.MOST_ROWS)
    args.dtype = list(dict.fromkeys(part.strip() for part in args.dtype.split(",")))
    if unknown := [name for name in args.dtype if name not in list(options.DtypeName)]:
        known = ", ".join(options.DtypeName)
        raise CommandError(f"--dtype {','.join(unknown)}: expected one or more of {known}.")
    if contexts := options.parse_sweeps(args.sweep or []).get("context"):
        options.lengths("--sweep context", ",".join(contexts))
    written = [args.output, args.output.with_suffix(".md"), *(plot_beside(args.output, kind) for kind in PLOTS)]
    claim(written, args.data, overwrite=args.overwrite, resume=args.resume)
    if args.resume:
        check_resume(args.output, args.resume)
    args.documents = read_sources(args.data, args.column)


def _drafts_to_compare(names: list[str]) -> None:
    for name in names:
        if name == options.AUTO:
            raise CommandError(f"--draft {name} chooses a draft, and here drafts are compared. Name them.")
        options.require_draft(name)
    short = [options.name_of(name) for name in names]
    if twice := sorted({name for name in short if short.count(name) > 1}):
        raise CommandError(f"--draft: two drafts have the name {twice[0]!r} in the results. Rename a folder.")


def _require_destination(draft: str, output: Path | None) -> None:
    """Refuse, before anything is measured, a draft that could not be written."""
    if output is not None:
        return  # checked with the options
    if not Path(draft).is_dir():
        raise CommandError(
            f"the draft {draft} is not a local folder. Pass --output FOLDER for the tuned draft, or --dry-run."
        )
    options.require_writable_folder(Path(draft))
