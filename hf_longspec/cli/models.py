"""Loading of the target, its tokenizer and a draft for a command, with one-line errors.

Progress is shown on standard error, so that standard output holds results only.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from threading import Event, Thread
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any, Self

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, logging

from ..auto import AutoDraft, class_of, load_named
from ..cli import CommandError, one_line, options
from ..generation.sequences import busy_machine
from ..generation.target import TargetView
from ..modeling.configuration_base import DraftConfig, refuse_other_sizes, text_config
from ..modeling.loading import refuse_missing_weights
from ..modeling.register_draft import DRAFTS, preset_of, weightless_drafts
from ..modeling.saved_config import read_config
from ..modeling.shared.aux_hidden_states import AuxDraftModel
from ..structured_output import StructuredOutput

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The folder that holds the package, which in a checkout holds the tiny models too.
HOME = Path(__file__).resolve().parents[2]
TINY_TARGET, TINY_DRAFTS = "tiny-target", ("tiny-tokenswift", "tiny-longspec")
# Between two lines about progress where there is no terminal; a step that takes longer has no estimate of its time.
LINE_SECONDS, SLOWEST_STEP = 10, 600


def tiny_model(name: str) -> Path:
    """The folder of a tiny model in the checkout that the package lies in, or in the current folder."""
    folders = [folder / "hub_cards" / name for folder in (HOME, Path.cwd())]
    return next((folder for folder in folders if (folder / CONFIG_NAME).is_file()), folders[-1])


def find_target(name: str | None) -> str:
    """The folder or Hub id to load: `name`, or the tiny target that comes with the repository."""
    if name is not None:
        return name
    folder = tiny_model(TINY_TARGET)
    if not (folder / CONFIG_NAME).is_file():
        raise CommandError(
            f"the tiny target is not at {folder}. Run this in a checkout of the repository, or pass --target."
        )
    return str(folder)


@contextmanager
def loading(name: str, what: str) -> Iterator[None]:
    """Turn every error while loading into one line; each format and architecture raises its own."""
    options.require_existing(what, name)
    try:
        yield
    except CommandError:
        raise
    except Exception as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        remedy = (
            " Check its files." if Path(name).exists() else " Check the name; offline, the cache alone is searched."
        )
        if frame.f_globals["__name__"].startswith("hf_longspec."):
            remedy = ""  # our errors have their own
        raise CommandError(f"cannot load the {what} {name!r}: {one_line(error).rstrip('.')}.{remedy}") from error


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def find_device(name: str | None) -> torch.device:
    """The device of a name; `None`: the first GPU, or the CPU."""
    if name is None:
        return default_device()
    try:
        one = torch.ones(1, device=name)
        one.item()  # a meta device has no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # the first also of a name that is none
        raise CommandError(f"--device {name} is not available. Pass cpu, cuda:1 or so, or leave it out.") from error
    return one.device


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The type of a name; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    return TORCH_DTYPES.get(name, torch.float32 if device.type == "cpu" else torch.bfloat16)


def load_tokenizer(target: str) -> Any:
    with loading(target, "tokenizer of"):
        return AutoTokenizer.from_pretrained(target)


def load_config(target: str) -> Any:
    with loading(target, "configuration of"):
        return AutoConfig.from_pretrained(target)


def positions_of(config: Any) -> int:
    """Tokens that a model of this configuration has positions for; practically unlimited if it names no limit."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize


def load_target(target: str, dtype: torch.dtype, device: torch.device | None = None) -> PreTrainedModel:
    """The model in eval mode on `device`, by default the first GPU, or the CPU."""
    with loading(target, "model of"):
        model, info = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, output_loading_info=True)
        _refuse_other_weights(model, info)
    if reasons := TargetView(model).why_not():
        raise CommandError(f"{target} is not supported: {'; '.join(reasons)}. Pass another --target.")
    # Token ids only: penalties and temperatures of the repository's own settings would change the text of greedy
    # decoding.
    defaults = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=defaults.bos_token_id, eos_token_id=defaults.eos_token_id, pad_token_id=defaults.pad_token_id
    )
    return model.to(device or default_device()).eval()


def check_draft(name: str, target: Any, settings: Mapping[str, Any] | None = None) -> None:
    """Refuse a draft of another target, and settings that it does not have, before any weights are loaded.

    Args:
        name (`str`): Name of a draft without weights, folder or Hub id.
        target (`PreTrainedConfig`): Configuration of the target.
        settings (`Mapping[str, Any]`, *optional*): Values of `--set`, by name.
    """
    options.require_draft(name)
    kind: Any = AutoDraft if name == options.AUTO else weightless_drafts().get(name)
    if kind is None:
        with loading(name, "draft"):
            fields = read_config(name)
            kind = class_of(fields)
            if kind is None:
                raise ValueError(f"{name} has model_type={fields.get('model_type')!r} and is not a draft")
            if fields.get("model_type") in DRAFTS:
                config: DraftConfig = kind.config_class.from_dict(fields)
                config.refuse_other_target(target)
            elif issubclass(kind, AuxDraftModel):  # EAGLE-3 or DFlash, as other projects publish them
                layer = fields.get("transformer_layer_config") or fields
                size = text_config(target).vocab_size
                refuse_other_sizes({"vocab_size": (layer.get("vocab_size") or size, size)})
    options.check_names(f"--set for the draft {name}", settings or {}, kind.declared)
    for key, value in (settings or {}).items():
        kind.declared[key].check(key, value)


def load_draft(name: str, model: PreTrainedModel) -> Any:
    """A published draft for `model`: one of this package, of another project, or an ordinary language model."""
    with loading(name, "draft"):
        return load_named(name, model)[1]


def _refuse_other_weights(model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Refuse weights of another architecture, and name those that are not used."""
    refuse_missing_weights(model, info)
    if names := sorted(info.get("unexpected_keys") or ()):
        label = f"config.json says model_type={model.config.model_type!r}"
        print(f"note: {label}; {len(names)} unused weights, for example {names[0]}.", file=sys.stderr)


@contextmanager
def quiet(progress_bars: bool) -> Iterator[None]:
    """Silence the warnings of transformers, and its progress bars unless something may be downloaded."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not progress_bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def say(text: str, stderr: bool = False) -> None:
    """Print sentences, which break between words in a terminal and not at all in a pipe."""
    console = Console(stderr=stderr, highlight=False)
    console.print(text, markup=False, soft_wrap=not console.is_terminal)


@contextmanager
def noticing_others(one_thread: bool = False) -> Iterator[None]:
    """Say in a line that other programs use the machine while something is measured.

    With `one_thread`, a machine that is busy before the measurement is used with one thread.
    """
    started, processor, threads = time.perf_counter(), time.process_time(), torch.get_num_threads()
    if before := busy_machine():
        fewer = " One thread is used." if one_thread and threads > 1 else ""
        say(f"This machine is busy ({before}): speeds are lower, and ratios less certain.{fewer}", stderr=True)
    if before and one_thread:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before and one_thread:
            torch.set_num_threads(threads)
    during = busy_machine(time.perf_counter() - started, time.process_time() - processor)
    if during and not before:
        remedy = "; OMP_NUM_THREADS=1 is faster then" if threads > 1 else ""
        say(f"The machine was busy ({during}): speeds are lower, and ratios less certain{remedy}.", stderr=True)


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU ({torch.backends.cpu.get_cpu_capability()}, {threads} thread{'s' if threads > 1 else ''})"


@dataclass
class LoadedModels:
    """A target with its tokenizer and a draft for it, ready to generate.

    Their weights are loaded when `model` and `draft` are first used, so that a prompt can be refused before.
    """

    target: str  # Hub id or folder, as it was given
    draft_name: str  # likewise, or one of [`weightless_drafts`]
    config: Any  # of the target
    tokenizer: Any
    device: torch.device
    wanted_dtype: torch.dtype  # of the weights
    settings: dict[str, Any] = field(default_factory=dict)  # those of its settings that were given with `--set`

    @cached_property
    def model(self) -> PreTrainedModel:
        with loading_spinner(self.target):
            return load_target(self.target, self.wanted_dtype, self.device)

    @cached_property
    def draft(self) -> Any:
        model = self.model
        with loading_spinner(f"the draft {self.draft_name}"):
            return open_draft(self.draft_name, model, self.settings)

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @cached_property
    def end_tokens(self) -> list[int]:
        """Tokens that end a text of the target."""
        try:
            ends = GenerationConfig.from_pretrained(self.target).eos_token_id
        except OSError:  # the target has no such file
            ends = GenerationConfig.from_model_config(self.config).eos_token_id
        return ends if isinstance(ends, list) else [] if ends is None else [ends]

    def processors(self, structure: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `generate` that make a text follow a structure; none without one."""
        if not structure:
            return {}
        return {
            "logits_processor": [StructuredOutput(self.tokenizer, **structure, eos_token_id=self.end_tokens or None)]
        }

    def record(self) -> dict[str, str]:
        device = str(self.model.device)
        return {"target": self.target, "draft": self.draft_name, "dtype": self.dtype, "device": device}

    def encode(self, name: str, text: str, last: int = 0, room: int = 0) -> torch.Tensor:
        """Token ids `(1, length)` of a prompt, on the device of the target."""
        # verbose=False: what is too long is refused here, or cut
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])[-last:]
        if not ids:
            raise CommandError(f"{name} has no tokens under the tokenizer of {self.target}. Pass another text.")
        self.require_room(name, len(ids), room)
        return torch.tensor([ids], device=self.device)

    def require_room(self, name: str, prompt_tokens: int, new_tokens: int) -> None:
        """Refuse a prompt that does not fit into the positions of the target."""
        limit = positions_of(self.config)
        if new_tokens and prompt_tokens + new_tokens > limit:
            raise CommandError(
                f"{name} has {prompt_tokens} tokens; with {new_tokens} new ones they exceed the {limit} positions of "
                "the model. Pass a shorter text, or fewer --max-new-tokens."
            )


def loading_spinner(what: str) -> Any:
    """A spinner on standard error, on a terminal alone."""
    return Console(stderr=True).status(escape(f"Loading {what}"))


@contextmanager
def load_models(args: SimpleNamespace) -> Iterator[LoadedModels]:
    """Load what the options --target, --draft, --set, --dtype and --device name, without warnings.

    Names, settings and configurations are checked at once.
    """
    settings, device = options.read_settings(args.setting), find_device(args.device)
    options.require_target(args.target)
    with quiet(progress_bars=not Path(args.target).is_dir()):
        config = load_config(args.target)
        check_draft(args.draft, config, settings)
        tokenizer = load_tokenizer(args.target)
        yield LoadedModels(args.target, args.draft, config, tokenizer, device, dtype_of(args.dtype, device), settings)


def open_draft(name: str, model: PreTrainedModel, settings: dict[str, Any] | None = None) -> Any:
    """The draft called `name` for `model`, with `settings` in place of those it comes with."""
    known = weightless_drafts().get(name)
    if name == options.AUTO:
        draft = AutoDraft.from_target(model, report=partial(say, stderr=True))
    else:
        draft = load_draft(name, model) if known is None else known.from_target(model, **preset_of(name))
    for key, value in (settings or {}).items():
        setattr(draft.generation_config, key, value)
    draft.check(TargetView(model))
    return draft


class Progress:
    """A bar on a terminal that is removed in the end; elsewhere a line on standard error every ten seconds.

    Args:
        total (`int`): Number of steps; 0 if it is unknown.
        text (`str`, *optional*): What is done.
        console (`Console`, *optional*): Where the bar is shown; by default on standard error.
        tokens (`bool`, *optional*): Whether steps are tokens, whose speed is shown.
    """

    def __init__(self, total: int, text: str = "", console: Console | None = None, tokens: bool = False):
        console = console or Console(stderr=True, highlight=False)
        columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), SpeedColumn()]
        columns += [TimeElapsedColumn(), TimeRemainingColumn()]
        self._bar = RichProgress(
            *columns,
            console=console,
            transient=True,
            disable=not console.is_terminal,
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file must not go to the console
            speed_estimate_period=SLOWEST_STEP,
        )
        self._ended = Event()
        self.next(text, total, tokens)

    def say(self, text: str) -> None:
        self._text = text
        self._bar.update(self._task, description=escape(text))

    def step(self, count: float = 1) -> None:
        self._bar.advance(self._task, count)

    def next(self, text: str, total: int, tokens: bool = False) -> None:
        """Begin a task, in place of the present one."""
        before = self._bar.task_ids
        self._text = text
        self._task = self._bar.add_task(escape(text), total=total or None, tokens=tokens)
        for task in before:
            self._bar.remove_task(task)

    def line(self) -> str:
        """The present task: steps of all, tokens per second and the time left, as far as they are known."""
        task = self._bar.tasks[-1]
        unit = " tokens" if task.fields["tokens"] else ""
        parts = [f"{int(task.completed):,}{'' if task.total is None else f' of {int(task.total):,}'}{unit}"]
        parts += [text] if (text := SpeedColumn.text(task)) else []
        if task.total is not None and task.completed and task.elapsed:
            left = round(task.elapsed * (task.total - task.completed) / task.completed)
            parts.append(f"{duration(left)} left")
        return ": ".join(filter(None, [self._text, ", ".join(parts)]))

    def _tell(self) -> None:
        while not self._ended.wait(LINE_SECONDS):
            print(self.line(), file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Remove the bar, and end the lines."""
        self._ended.set()
        self._bar.stop()

    def __enter__(self) -> Self:
        self._bar.start()
        if self._bar.disable:
            Thread(target=self._tell, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class SpeedColumn(ProgressColumn):
    """Tokens per second, if the steps of a task are tokens."""

    def render(self, task: Task) -> Text:
        return Text(self.text(task))

    @staticmethod
    def text(task: Task) -> str:
        speed = task.completed / task.elapsed if task.fields["tokens"] and task.elapsed else 0
        return f"{speed:,.{1 if speed < 100 else 0}f} tokens/s" if speed else ""


def duration(seconds: float) -> str:
    """Seconds as people say them.

    >>> [duration(seconds) for seconds in (9, 80, 7260)]
    ['9 s', '1 min 20 s', '2 h 1 min']
    """
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class PromptProgress(Progress):
    """A bar that counts the tokens that the decoder layers have read, until it is stopped or another task begins."""

    def __init__(self, model: PreTrainedModel, num_tokens: int, text: str, console: Console | None = None):
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        self._layers: list[Any] = next((list(layers) for layers in lists if len(layers) == count), [])
        self._hooks: list[Any] = []
        super().__init__(num_tokens if self._layers else 0, text, console, tokens=True)
        self._hooks = [layer.register_forward_hook(self._has_run, with_kwargs=True) for layer in self._layers]

    def _has_run(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        states = args[0] if args else kwargs.get("hidden_states")
        if torch.is_tensor(states):
            left = (self._bar.tasks[0].total or 0) - self._bar.tasks[0].completed  # the last tokens may run again
            self.step(min(states.shape[1] / len(self._layers), left))

    def next(self, text: str, total: int, tokens: bool = False) -> None:
        self._unhook()
        super().next(text, total, tokens)

    def stop(self) -> None:
        self._unhook()
        super().stop()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
