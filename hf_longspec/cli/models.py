"""Loading of the target, its tokenizer and drafts for a command, with one-line errors."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig, PreTrainedModel
from transformers.utils import logging

from ..auto import AutoDraft, class_of, load_named
from ..cli import CommandError, one_line, options
from ..generation.target import TargetView
from ..modeling.configuration_base import DraftConfig, refuse_other_sizes, text_config
from ..modeling.loading import refuse_missing_weights
from ..modeling.register_draft import DRAFTS, preset_of, weightless_drafts
from ..modeling.saved_config import read_config
from ..modeling.shared.aux_hidden_states import AuxDraftModel
from ..structured_output import StructuredOutput
from .progress import say


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


def find_device(name: str | None) -> torch.device:
    """The device of a name; `None`: the first GPU, or the CPU."""
    try:
        one = torch.ones(1, device=name or ("cuda" if torch.cuda.is_available() else "cpu"))
        one.item()  # a meta device has no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # the first also of a name that is none
        raise CommandError(f"--device {name} is not available. Pass cpu, cuda:1 or so, or leave it out.") from error
    return one.device


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU ({torch.backends.cpu.get_cpu_capability()}, {threads} thread{'s' if threads > 1 else ''})"


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The type of a name; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    automatic = torch.float32 if device.type == "cpu" else torch.bfloat16
    return automatic if name == "auto" else getattr(torch, name)


def source_of(target: str) -> dict[str, str]:
    """Arguments of `from_pretrained` that name a target: its Hub id or folder, and its GGUF file if it has one."""
    name, file = options.split_gguf(target)
    return {"pretrained_model_name_or_path": name} | ({} if file is None else {"gguf_file": file})


def load_tokenizer(target: str) -> Any:
    with loading(target, "tokenizer of"):
        return AutoTokenizer.from_pretrained(**source_of(target))


def load_config(target: str) -> Any:
    """The configuration of a target, which is neither a file nor a name that the Hub does not have."""
    options.require_model("model of", target)
    with loading(target, "configuration of"):
        return AutoConfig.from_pretrained(**source_of(target))


def positions_of(config: Any) -> int:
    """Tokens that a model of this configuration has positions for; practically unlimited if it names no limit."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or sys.maxsize


def load_weights(target: str, **how: Any) -> Any:
    """The result of `AutoModelForCausalLM.from_pretrained`. The blocks of a GGUF file are unpacked, which is said."""
    source = source_of(target)
    if "gguf_file" in source:
        dtype = str(how["dtype"]).removeprefix("torch.")
        say(
            f"Unpacking the weights of {source['gguf_file']} to {'float32' if dtype == 'auto' else dtype}.", stderr=True
        )
        how |= {"quantization_config": GgufConfig(dequantize=True)}
    return AutoModelForCausalLM.from_pretrained(**source, **how)


def load_target(target: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model in eval mode."""
    with loading(target, "model of"):
        model, info = load_weights(target, dtype=dtype, output_loading_info=True)
        refuse_missing_weights(model, info)
    if names := sorted(info.get("unexpected_keys") or ()):
        label = f"config.json says model_type={model.config.model_type!r}"
        print(f"note: {label}; {len(names)} unused weights, for example {names[0]}.", file=sys.stderr)
    if reasons := TargetView(model).why_not():
        raise CommandError(f"{target} is not supported: {'; '.join(reasons)}. Pass another --target.")
    # Token ids only: penalties and temperatures of the repository's own settings would change the text of greedy
    # decoding.
    defaults = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=defaults.bos_token_id, eos_token_id=defaults.eos_token_id, pad_token_id=defaults.pad_token_id
    )
    return model.to(device).eval()


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


def open_draft(name: str, model: PreTrainedModel, settings: Mapping[str, Any] | None = None) -> Any:
    """The draft called `name` for `model`, with `settings` in place of those it comes with."""
    if name == options.AUTO:
        draft = AutoDraft.from_target(model, report=partial(say, stderr=True))
    elif (known := weightless_drafts().get(name)) is not None:
        draft = known.from_target(model, **preset_of(name))
    else:  # of this package, of another project, or an ordinary language model
        with loading(name, "draft"):
            draft = load_named(name, model)[1]
    for key, value in (settings or {}).items():
        setattr(draft.generation_config, key, value)
    draft.check(TargetView(model))
    return draft


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of transformers, and outside of a terminal its progress bars."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


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
        return load_target(self.target, self.wanted_dtype, self.device)

    @cached_property
    def draft(self) -> Any:
        return open_draft(self.draft_name, self.model, self.settings)

    @cached_property
    def end_tokens(self) -> list[int]:
        """Tokens that end a text of the target."""
        defaults = GenerationConfig.from_model_config(self.config)
        if options.split_gguf(self.target)[1] is None:  # transformers does not read one beside a GGUF file
            with suppress(OSError):  # the target has no such file
                defaults = GenerationConfig.from_pretrained(self.target)
        ends = defaults.eos_token_id
        return ends if isinstance(ends, list) else [] if ends is None else [ends]

    def processors(self, structure: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `generate` that make a text follow a structure; none without one."""
        if not structure:
            return {}
        return {
            "logits_processor": [StructuredOutput(self.tokenizer, **structure, eos_token_id=self.end_tokens or None)]
        }

    def record(self) -> dict[str, str]:
        dtype, device = str(self.model.dtype).removeprefix("torch."), str(self.model.device)
        return {"target": self.target, "draft": self.draft_name, "dtype": dtype, "device": device}

    def encode(self, name: str, text: str, last: int = 0, room: int = 0, special: bool = True) -> torch.Tensor:
        """Token ids `(1, length)` of a prompt, on the device of the target.

        Args:
            name (`str`): What the prompt is called in an error.
            text (`str`): The prompt.
            last (`int`, *optional*): Keep at most so many tokens of the end; 0 keeps all.
            room (`int`, *optional*): New tokens that have to fit into the positions after it.
            special (`bool`, *optional*): Whether special tokens are added; a chat template writes its own.
        """
        # verbose=False: what is too long is refused here, or cut
        ids = list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])[-last:]
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


@contextmanager
def load_models(args: SimpleNamespace, drafts: Sequence[str] | None = None) -> Iterator[LoadedModels]:
    """Load what the options --target, --draft, --set, --dtype and --device name, without warnings.

    Names, settings and configurations are checked at once: of `drafts`, where a command compares several.
    """
    settings, device = options.read_settings(vars(args).get("setting")), find_device(vars(args).get("device"))
    with quiet():
        config = load_config(args.target)
        for name in drafts or [args.draft]:
            check_draft(name, config, settings)
        tokenizer, dtype = load_tokenizer(args.target), dtype_of(args.dtype, device)
        yield LoadedModels(args.target, args.draft, config, tokenizer, device, dtype, settings)
