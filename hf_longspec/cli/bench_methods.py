"""What `hf-longspec bench` compares: transformers' own ways to decode, and drafts at every point of their grid."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from ..bench.decoding import HfMethod, endless
from ..bench.engine import HF, PLAIN
from ..bench.matrix import Method
from ..bench.sweep import draft_points, written
from ..generation.target import TargetView
from ..modeling.modeling_ngram import NgramDraftModel
from ..modeling.modeling_plain import PlainDraftModel
from ..modeling.modeling_specattn import SpecAttnDraftModel
from . import CommandError, models
from .bench_request import Request

# SpecAttn was renamed Vegas by its authors.
TRAINING_FREE: dict[str, Any] = {
    "specattn": SpecAttnDraftModel,
    "vegas": SpecAttnDraftModel,
    "ngram": NgramDraftModel,
}
LOOKUP, ASSISTED = "hf prompt lookup", "hf assisted"


def baselines(request: Request, model: PreTrainedModel) -> list[Method]:
    """Plain `generate`, our loop without drafting, prompt lookup, and an assistant if there is one."""
    methods = [Method(HF, HfMethod()), Method(PLAIN, PlainDraftModel.from_target(model))]
    methods.append(Method(LOOKUP, HfMethod({"prompt_lookup_num_tokens": request.lookup_tokens}, max_batch=1)))
    if request.assistant is not None:
        assistant = _load_assistant(request.assistant, model)
        methods.append(Method(ASSISTED, HfMethod({"assistant_model": assistant}, max_batch=1)))
    return methods


def points_of(drafts: dict[str, Any], axes: Mapping[str, Sequence[str]], model: PreTrainedModel) -> list[Method]:
    """Every draft with every combination of the settings on `axes` that it has.

    Raises:
        CommandError: If a draft refuses its settings.
    """
    return [
        _checked(Method(", ".join(filter(None, [name, written(point)])), draft, point), model)
        for name, draft in drafts.items()
        for point in draft_points(axes, draft.settings)
    ]


def load_drafts(names: Sequence[str], model: PreTrainedModel) -> dict[str, Any]:
    """Drafts under their names in the results.

    Raises:
        CommandError: If two have one name, or one cannot be used.
    """
    short = [name_of(name) for name in names]
    if twice := sorted({name for name in short if short.count(name) > 1}):
        raise CommandError(
            f"--draft: two are called {twice[0]!r}, which is their name in the results. Rename a folder."
        )
    return {name: load_draft(given, model) for name, given in zip(short, names, strict=True)}


def load_draft(name: str, model: PreTrainedModel) -> Any:
    """A draft by name, folder or Hub id, which drafts in every iteration.

    Raises:
        CommandError: If it cannot be loaded or was made for another target.
    """
    known = None if Path(name).is_dir() else TRAINING_FREE.get(name)
    draft = models.load_draft(name, model) if known is None else known.from_target(model)
    draft = draft.to(model.device)
    if "gate" in draft.settings:  # it would stop drafting where that does not pay, and hide what is to be measured
        draft.generation_config.gate = False
    draft.check(TargetView(model))
    return draft


def name_of(model: str) -> str:
    """Name in the results: of a folder the last part, as others mean nothing elsewhere."""
    return Path(model).name if Path(model).is_dir() else model


def _load_assistant(name: str, model: PreTrainedModel) -> PreTrainedModel:
    with models.loading(name, "assistant"):
        assistant = AutoModelForCausalLM.from_pretrained(name, dtype=model.dtype).eval().to(model.device)
        sizes = [m.config.get_text_config(decoder=True).vocab_size for m in (assistant, model)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"its vocabulary has {sizes[0]} tokens and that of the target {sizes[1]}")
    return endless(assistant)


def _checked(method: Method, model: PreTrainedModel) -> Method:
    """Refuse settings that the draft refuses, before anything is measured."""
    try:
        with method.with_settings():
            method.how.check(TargetView(model))
    except ValueError as error:
        raise CommandError(f"--sweep: {method.name}: {error}") from error
    return method
