"""`hf-longspec demo`: questions about a document, or a text to continue, with and without drafts.

Each call is timed as in `hf-longspec bench`, with the gate that every call has. A prompt is read twice: by plain
`generate`, and by the first draft, whose keys and values the other drafts and the loop without a draft begin with.
"""

import inspect
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from rich.console import Console
from transformers.utils import CONFIG_NAME

from ..cli import BUILTIN, CommandError, options
from ..modeling.plain.modeling_plain import PlainDraftModel
from ..prefix_cache import PrefixCache
from ..streaming import FileStreamer
from .bench import name_of, record_of, rows_of, show
from .measuring import FAILED, HF, PLAIN, HfMethod, Measurement, judge, run_call
from .models import LoadedModels, describe_device, load_models, open_draft, positions_of
from .progress import PromptProgress, noticing_others, say
from .texts import as_message, encode, read_source

# The folder that holds the package, which in a checkout holds the models too.
HOME = Path(__file__).resolve().parents[2]
# Folders of targets in a checkout, and of their trained drafts in hub_cards/. `make smollm2` writes the first one.
SMOLLM2, TINY_TARGET = "runs/smollm2", "hub_cards/tiny-target"
DRAFTS = {
    SMOLLM2: ("smollm2-135m-tokenswift", "smollm2-135m-longspec"),
    TINY_TARGET: ("tiny-tokenswift", "tiny-longspec"),
}
WARM_UP_PROMPT, WARM_UP_TOKENS = 64, 8
TAIL_CHARACTERS = 300  # of the prompt, shown before its continuation
# What a chat model is asked about: functions of a module that every Python has, `statistics`. The first answer copies
# from the document, the second does not, so n-grams help the first one alone.
FUNCTIONS = "mean", "fmean", "geometric_mean", "harmonic_mean", "median", "median_low", "median_high", "mode"
QUESTIONS = (
    "Write this code again, with `data` renamed to `numbers`.",
    "Explain to a child, in your own words, what a median is good for.",
)
MESSAGE = "```python\n{}\n```\n{}"
# Bound on the keys and values of a prompt that drafts share; each reads a longer one itself.
SHARED_BYTES = 4 * 2**30


class DemoPrompt(NamedTuple):
    """A prompt, and what is shown of it before its text."""

    ids: torch.Tensor  # `(1, length)`
    shown: str


def run(args: SimpleNamespace) -> bool:
    """Measure and show; returns whether a text is wrong."""
    if args.draft == options.AUTO:
        raise CommandError(f"--draft {args.draft} chooses a draft, and here drafts are compared. Name one.")
    args.target = args.target or default_target()
    names = draft_names(args.target, args.draft)
    with load_models(args, names) as loaded:
        loaded.require_room("the shortest prompt", 1, args.max_new_tokens)
        most = min(args.context, positions_of(loaded.config) - args.max_new_tokens)
        is_asked = args.file is None and getattr(loaded.tokenizer, "chat_template", None) is not None
        what, prompts = questions(loaded, most) if is_asked else text_to_continue(loaded, args.file, most)
        say(f"Loading {args.target}.")
        model = loaded.model
        drafts = {name_of(draft): open_draft(draft, model) for draft in names}
        size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        say(
            f"{type(model).__name__}, {size:.1f}M parameters, {str(model.dtype).removeprefix('torch.')}, "
            f"{describe_device(model.device)}. Prompt: {prompts[0].ids.shape[1]} tokens of {what}.\n"
        )
        methods = {**drafts, HF: HfMethod(), PLAIN: PlainDraftModel.from_target(model)}
        for method in methods.values():  # the first call is slow, and not measured
            ids = prompts[0].ids[:, -WARM_UP_PROMPT:]
            run_call(model, method, (ids, torch.ones_like(ids)), tokens=WARM_UP_TOKENS, seed=0)
        prefixes = PrefixCache(model, SHARED_BYTES)
        with noticing_others(one_thread=True):
            wrong = [compare(loaded, prompt, methods, prefixes, args.max_new_tokens) for prompt in prompts]
    return any(wrong)


def compare(
    loaded: LoadedModels, prompt: DemoPrompt, methods: dict[str, Any], prefixes: PrefixCache, tokens: int
) -> bool:
    """Measure every method after one prompt, and show the text and a table; returns whether a text is wrong."""
    drafts = [name for name in methods if name not in (HF, PLAIN)]
    calls: dict[str, Measurement] = {}
    # the last draft first, because its text is the one to show
    for name in (*reversed(drafts), HF, PLAIN):
        calls[name] = measure(loaded, name, methods[name], prompt, prefixes, tokens, shown=not calls)
    texts = {name: judge(loaded.model, prompt.ids, calls[name], calls[HF]) for name in methods}
    rows = rows_of(record_of(calls[name], prompt.ids.shape[1], name, 0, texts[name]) for name in methods)
    show(rows)
    if runs_in_one_thread(loaded):
        say("One thread: speeds count the time of the processor, without that of other programs.")
    if wrong := [name for name in methods if texts[name] in FAILED]:
        say(f"Wrong text: {', '.join(wrong)}. Please report this.")
    else:
        best = max((row for row in rows if row["method"] in drafts), key=lambda row: row["ratio_to_generate"]["median"])
        say(f"{best['method']}: {best['ratio_to_generate']['median']:.1f}x generate, text {best['text']}.\n")
    return bool(wrong)


def runs_in_one_thread(loaded: LoadedModels) -> bool:
    return loaded.device.type == "cpu" and torch.get_num_threads() == 1


def questions(loaded: LoadedModels, most: int) -> tuple[str, list[DemoPrompt]]:
    """What is asked about, and a message with the document for each question.

    The document is cut where a message would have more than `most` tokens.
    """
    try:
        text = "\n\n".join(inspect.getsource(getattr(statistics, name)) for name in FUNCTIONS)
    except OSError as error:
        raise CommandError("this Python has no sources of its library. Pass a --file.") from error
    tokenizer = loaded.tokenizer
    around = max(len(encode(tokenizer, as_message(tokenizer, MESSAGE.format("", question)))) for question in QUESTIONS)
    document = tokenizer.decode(encode(tokenizer, text)[: max(most - around, 0)])
    prompts = []
    for question in QUESTIONS:
        message = as_message(tokenizer, MESSAGE.format(document, question))
        prompts.append(DemoPrompt(loaded.encode("a question", message, special=False), f"{question}\n"))
    return "functions of the module statistics, and a question about them", prompts


def text_to_continue(loaded: LoadedModels, file: Path | None, most: int) -> tuple[str, list[DemoPrompt]]:
    """What is continued, and its first `most` tokens."""
    if file is None:
        name, text = "a module of the standard library", read_source(BUILTIN)[0]
    else:
        name, text = options.read_text(file, None)
    ids = loaded.encode(name, text)[:, :most]
    tail = loaded.tokenizer.decode(ids[0], skip_special_tokens=True)[-TAIL_CHARACTERS:]
    return name, [DemoPrompt(ids, tail)]


def folder_of(model: str) -> Path:
    """The folder of a model in the checkout that the package lies in, or in the current folder."""
    folders = [folder / model for folder in (HOME, Path.cwd())]
    return next((folder for folder in folders if (folder / CONFIG_NAME).is_file()), folders[-1])


def default_target() -> str:
    """The folder of SmolLM2, or of the tiny target that comes with the repository."""
    for name in (SMOLLM2, TINY_TARGET):
        if ((folder := folder_of(name)) / CONFIG_NAME).is_file():
            if name == TINY_TARGET:
                say(f"SmolLM2 is not in {SMOLLM2}, where `make smollm2` puts it: this is the byte model instead.")
            return str(folder)
    raise CommandError(f"no model is in {SMOLLM2} or {TINY_TARGET}. Run this in a checkout, or pass --target.")


def draft_names(target: str, draft: str | None) -> list[str]:
    """The draft that the user named; otherwise those without training, and the trained ones of the repository."""
    if draft is not None:
        return [draft]
    names = next((drafts for name, drafts in DRAFTS.items() if Path(target).resolve() == folder_of(name).resolve()), ())
    trained = [folder_of(f"hub_cards/{name}") for name in names]
    return ["ngram", "specattn", *(str(folder) for folder in trained if folder.is_dir())]


def measure(
    loaded: LoadedModels,
    name: str,
    method: Any,
    prompt: DemoPrompt,
    prefixes: PrefixCache,
    tokens: int,
    *,
    shown: bool,
) -> Measurement:
    """Measure one way to continue a prompt, under a bar; with `shown` the text is printed as it comes.

    Plain `generate` reads the prompt into the cache of its own. The other calls begin with what `prefixes` has. One
    thread of a processor is timed without other programs, which slow some calls more than others.
    """
    ids = prompt.ids
    cache = None if isinstance(method, HfMethod) else prefixes.take(ids)
    is_read = prefixes.find(ids) == ids.shape[1] - 1
    console = Console(highlight=False, soft_wrap=True)
    with PromptProgress(loaded.model, ids.shape[1], name, 0 if shown else tokens) as bar:

        def arrived(count: int) -> None:
            bar.arrived(count)
            if count == 1 and shown:  # the prompt has been read
                console.print(prompt.shown, style="dim", end="", markup=False)

        measured = run_call(
            loaded.model,
            method,
            (ids, torch.ones_like(ids)),
            tokens=tokens,
            seed=0,
            cache=cache,
            now=time.thread_time if runs_in_one_thread(loaded) else time.perf_counter,
            on_arrival=arrived,
            text=FileStreamer(loaded.tokenizer, sys.stdout) if shown else None,
        )
    if cache is not None and not is_read:
        prefixes.put(torch.cat([ids.cpu(), measured.text], dim=1), cache)
    if shown:
        print("\n")
    return measured
