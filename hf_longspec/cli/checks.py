"""What is wrong with the options of a command together, said before torch and transformers are imported.

A function has the name of its command. It refuses what cannot be run, and adds the texts to continue to the options.
"""

import json
import math
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..cli import CARD_FACTS, CommandError, one_line, options
from . import recipe, structure
from .acceptance import records_of_draft
from .outputs import claim
from .texts import prompts_of, read_source
from .work import folder_of

# Tokens that `audit` draws at least: the variance of a count is a quarter of them at most, and 50 are to be expected.
FEWEST_DRAWN = 200


def generate(args: SimpleNamespace) -> None:
    """Check `hf-longspec generate`; adds `name` and `text` of the prompt, or the `prompts` of `--data`."""
    _one_draft(args)
    if not args.temperature and (args.top_p, args.top_k) != (1.0, 0):
        raise CommandError("--top-p and --top-k need sampling. Pass a --temperature above 0, such as 1.")
    if args.json_schema is not None and args.regex is not None:
        raise CommandError("--json-schema and --regex cannot be combined. Drop one of them.")
    if args.regex == "":
        raise CommandError("--regex is empty. Pass an expression, or drop it.")
    args.structure = structure.given(args.json_schema, args.regex)
    if args.samples > 1 and not args.temperature:
        raise CommandError(f"--samples {args.samples} needs sampling. Pass a --temperature above 0.")
    if args.samples > 1 and (args.show_drafts or args.html is not None):
        raise CommandError(
            f"--samples {args.samples} cannot be combined with --show-drafts or --html. Drop one of them."
        )
    if args.data is not None:
        if args.file or args.prompt or args.samples > 1 or args.as_json or args.show_drafts or args.html:
            raise CommandError("--data cannot be combined with a text, --samples, --json, --show-drafts or --html.")
        if args.output is None:
            raise CommandError("--data needs --output FILE.jsonl for the texts.")
        options.require_sources("--data: ", [args.data])
        claim([args.output, folder_of(args.output)], [args.data], overwrite=args.overwrite, resume=args.resume)
        args.prompts = list(prompts_of(args.data, args.column))
        return
    if args.output is not None or args.resume or args.column is not None:
        raise CommandError("--output, --resume and --column are for --data. Pass --data, or drop them.")
    claim([args.html] if args.html is not None else [], [args.file], overwrite=args.overwrite)
    args.name, args.text = options.read_text(args.file, args.prompt)


def audit(args: SimpleNamespace) -> None:
    """Check `hf-longspec audit`; adds `texts`, the name and text of each prompt."""
    _one_draft(args)
    if 0 < args.samples * args.sample_tokens < FEWEST_DRAWN:
        raise CommandError(
            f"--samples {args.samples} with {args.sample_tokens} tokens each are too few for a test. Pass at least "
            f"{math.ceil(FEWEST_DRAWN / args.sample_tokens)}, better several hundred, or 0 to skip this check."
        )
    args.texts = [options.read_text(file, None) for file in args.files or []]
    args.texts += [options.read_text(None, args.prompt)] if args.prompt is not None or not args.files else []


def tune(args: SimpleNamespace) -> None:
    """Check `hf-longspec tune`; adds `name` and `text` of the sample."""
    if args.draft == options.AUTO:
        raise CommandError(
            f"--draft {options.AUTO} chooses a draft for a text, and tune measures the settings of one. Name the draft."
        )
    _one_draft(args)
    tuned = options.drafts_with("tune")
    if args.draft in options.training_free() and not any(args.draft in names for names in tuned):
        others = " or ".join(name for name, *_ in tuned)
        raise CommandError(f"{args.draft} drafts have nothing to tune. Pass one of {others}.")
    if not args.dry_run:
        _require_destination(args.draft, args.output)
        read = [args.file, args.draft, args.target]
        claim([args.output] if args.output is not None else [], read, overwrite=args.overwrite)
    args.name, args.text = options.read_text(args.file, args.prompt)


def serve(args: SimpleNamespace) -> None:
    """Check `hf-longspec serve`: also that nothing else listens there."""
    _one_draft(args)
    if args.max_length is not None and args.rows == 1:
        raise CommandError(f"--max-length {args.max_length} is for several --rows. Pass --rows, or drop it.")
    try:
        socket.create_server((args.host, args.port)).close()
    except OSError as error:
        remedy = "Pass another --host or --port."
        reason = str(error.strerror).partition(" (while")[0]
        raise CommandError(f"cannot listen on {args.host}:{args.port}: {reason}. {remedy}") from error


def bench(args: SimpleNamespace) -> None:
    """Check `hf-longspec bench`; reads the lengths of `--context`, and adds `documents`."""
    options.require_target(args.target)
    args.draft = args.draft or ["ngram"]
    _drafts_to_compare(args.draft)
    options.require_sources("--data: ", [args.data])
    args.context = options.lengths("--context", args.context)
    claim([args.output] if args.output is not None else [], [args.data], overwrite=args.overwrite)
    args.documents = read_source(args.data, args.column)


def train(args: SimpleNamespace) -> None:
    """Check `hf-longspec train`; adds `recipe`."""
    options.require_sources("", args.data or [])
    args.recipe = recipe.of_command(args)
    options.require_target(args.recipe.target)
    if isinstance(args.recipe.draft, str):
        options.require_model("draft", args.recipe.draft, "Pass the folder of a saved draft, or a Hub id.")
    recipe.claim_folder(args.recipe, [args.config, *(args.data or [])], args.resume, args.overwrite)


def convert(args: SimpleNamespace) -> None:
    options.require_existing("checkpoint", args.source)
    if args.target is not None and not Path(args.target).is_file():
        options.require_target(args.target)
    if args.target is None and Path(args.source).exists() and not re.fullmatch(options.REPOSITORY, args.source):
        raise CommandError(
            f"the target of {args.source!r} is unknown. Pass --target: its Hub id, folder or config.json."
        )
    claim([args.output], [args.source, args.target], overwrite=args.overwrite)


def publish(args: SimpleNamespace) -> None:
    """Check `hf-longspec publish`; adds `output`, `facts` beside the draft, and what is `measured` of it."""
    if args.results is not None and not args.results.is_file():
        raise CommandError(f"--results: the file {str(args.results)!r} does not exist. Check the path.")
    if not args.dry_run and args.repo is None:
        raise CommandError("no repository to upload to. Pass --repo, or --dry-run.")
    if args.engine is not None and args.self_contained:
        raise CommandError(f"--engine {args.engine} and --self-contained are opposites. Pass one of the two.")
    if not args.dry_run and args.output is not None:
        raise CommandError(f"--output {args.output} needs --dry-run. Without it, the draft is uploaded.")
    if args.name is not None and args.results is None:
        raise CommandError(f"--name {args.name} names a draft in --results. Pass --results, or drop it.")
    args.output = args.output or args.source.resolve().with_name(f"{args.source.resolve().name}-hub")
    if args.dry_run:
        options.require_writable_folder(args.output)
        claim([args.output], overwrite=args.overwrite)
    if not (args.source / "config.json").is_file():
        raise CommandError(f"{args.source} has no config.json. Pass the folder of a saved draft.")
    args.facts = _read_object(args.source / CARD_FACTS)
    named = args.base_model or args.facts.get("base_model")
    base_model = str(named or _read_object(args.source / "config.json").get("target_name_or_path") or "")
    if not re.fullmatch(options.HUB_ID, base_model, re.ASCII) or (not named and Path(base_model).is_dir()):
        raise CommandError(
            f"the target {base_model!r} is not a Hub id, by which others can load it. Pass --base-model, such as "
            "Qwen/Qwen3-8B."
        )
    name = args.name or args.source.resolve().name
    args.measured = [] if args.results is None else records_of_draft(args.results, name)


def demo(args: SimpleNamespace) -> None:
    """Check `hf-longspec demo`; adds `text`, that of `--file`."""
    if args.target is not None:
        options.require_target(args.target)
    _drafts_to_compare([] if args.draft is None else [args.draft])
    if args.whole and args.context is not None:
        raise CommandError(f"--whole and --context {args.context} are two lengths. Pass one of them.")
    args.text = None if args.file is None else options.read_text(args.file, None)[1]


def _one_draft(args: SimpleNamespace) -> None:
    """Check the names of target and draft, and the form of the settings."""
    options.require_target(args.target)
    options.require_draft(args.draft)
    options.read_settings(args.setting)


def _drafts_to_compare(names: list[str]) -> None:
    for name in names:
        if name == options.AUTO:
            raise CommandError(f"--draft {name} chooses a draft, and here drafts are compared. Name them.")
        options.require_draft(name)
    short = [options.name_of(name) for name in names]
    if twice := sorted({name for name in short if short.count(name) > 1}):
        raise CommandError(f"--draft: two drafts have the name {twice[0]!r} in the results. Rename a folder.")


def _read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object; nothing if there is no such file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise CommandError(f"{file} is not JSON: {one_line(error)}. Correct it, or save the draft again.") from error
    if not isinstance(content, dict):
        raise CommandError(f"{file} holds a {type(content).__name__}, expected a JSON object. Correct it.")
    return content


def _require_destination(draft: str, output: Path | None) -> None:
    """Refuse, before anything is measured, a draft that could not be written."""
    if output is not None:
        return  # checked with the options
    if draft in options.training_free() or not Path(draft).is_dir():
        raise CommandError(
            f"the draft {draft} is not a local folder. Pass --output FOLDER for the tuned draft, or --dry-run."
        )
    options.require_writable_folder(Path(draft))
