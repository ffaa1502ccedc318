"""AutoDraft: the draft of a target that is fastest on the text of the first call."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub.repocard import metadata_load
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import cached_file, logging
from yaml import YAMLError

from .generation.drafter import Binding, Drafter
from .generation.sequences import SpeculationStats
from .generation.target import TargetView
from .modeling.base import DraftModel
from .modeling.configuration_base import DraftConfig, text_config
from .modeling.register_draft import DRAFTS, draft_class_of, preset_of, weightless_drafts
from .modeling.saved_config import read_config, shortened

logger = logging.get_logger(__name__)

# Key of a target's card or configuration that names its draft.
CARD_KEY = "draft_model"
MTP, NGRAMS, PLAIN, ASSISTANT = "longspec_mtp", "longspec_ngram", "longspec_plain", "longspec_assistant"
# The target with weights of 4 bits, by its name on the command line.
CHEAP = "self-int4"
# Tokens of a trial, and the last ones of the prompt that it reads.
TRIAL_TOKENS, TRIAL_PROMPT = 32, 1024
# The first call of a kind may compile, capture graphs and check the target.
TRIAL_CALLS = 2
# What a trial takes from the call that it is made for.
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id", "pad_token_id")


class AutoDraftConfig(DraftConfig):
    """Configuration of [`AutoDraft`], which is never saved."""

    model_type = "longspec_auto"


class AutoDraft(DraftModel):
    """Decode with the fastest of the drafts that exist for a target.

    These are the draft that the target's card or config.json names as `draft_model`, the MTP layers of its checkpoint,
    on a GPU the target with weights of 4 bits, and n-grams, unless they join one of these. If there are several, the
    first call of `generate` continues the end of its longest prompt with each of them and without a draft, by a few
    tokens and sampled as the call is. This and all later calls use the fastest, `chosen`, whose gate goes on to
    measure. `choice` says what was chosen and why.

    ```python
    draft = AutoDraft.from_target(target)
    target.generate(**inputs, assistant_model=draft)
    ```

    Its settings are those that all drafts have.
    """

    config_class = AutoDraftConfig
    weightless: ClassVar[bool] = True
    takes_ngrams: ClassVar[bool] = False

    _candidates: dict[str, DraftModel]  # after the choice, the chosen one alone
    _report: Callable[[str], None]
    choice: str | None = None  # a line, after the first call

    def __init__(self, config: DraftConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self._candidates = {}

    @classmethod
    def from_target(
        cls, target: PreTrainedModel, report: Callable[[str], None] = logger.info, **overrides: Any
    ) -> Self:
        """Return a draft that chooses in its first call.

        Args:
            target (`PreTrainedModel`): The target. A draft that its card names is loaded, without code of a repository.
            report (`Callable`, *optional*): Gets the line that says what was chosen. By default it is logged.
            overrides (`Any`): Settings by name.
        """
        draft = super().from_target(target, **overrides)
        draft._report = report
        found, short = draft._candidates, DRAFTS[MTP].config.short_name()
        if (named := draft_named_by(target)) is not None:
            with skipping(f"{CARD_KEY}={shortened(named)} of the target", logger.warning):
                found.update([load_named(named, target)])
        with skipping(short, logger.debug):  # most checkpoints have no such layers
            found[short] = DRAFTS[MTP].model.from_target(target)
        if target.device.type == "cuda":  # where a step takes as long as reading the weights
            with skipping(CHEAP, logger.debug):
                found[CHEAP] = weightless_drafts()[CHEAP].from_target(target, **preset_of(CHEAP))
        if not any(draft.num_ngram_nodes for draft in found.values()):  # else the gate verifies them alone, too
            found[DRAFTS[NGRAMS].config.short_name()] = DRAFTS[NGRAMS].model.from_target(target)
        return draft

    @property
    def chosen(self) -> DraftModel:
        """The chosen draft.

        Raises:
            ValueError: If no call has chosen yet.
        """
        if self.choice is None:
            raise ValueError("no draft is chosen before the first call. Call choose(target, input_ids).")
        (draft,) = self._candidates.values()
        return draft

    def choose(self, target: PreTrainedModel, input_ids: torch.Tensor, **options: Any) -> DraftModel:
        """Return the chosen draft; the first time, choose the one that continues a text fastest.

        Args:
            target (`PreTrainedModel`): The target.
            input_ids (`torch.LongTensor` of shape `(1, length)`): The text. Without tokens nothing is tried, and the
                first candidate is chosen.
            options (`Any`): Arguments of `generate` for the trial, such as `do_sample`.
        """
        if self.choice is None:
            limit = getattr(text_config(target), "max_position_embeddings", None) or TRIAL_PROMPT + TRIAL_TOKENS
            ids = input_ids[:, -max(1, min(TRIAL_PROMPT, limit - TRIAL_TOKENS)) :]
            devices = [target.device] if target.device.type == "cuda" else []
            drafts = {"": DRAFTS[PLAIN].model.from_target(target), **self._candidates}
            speeds = dict.fromkeys(drafts, 0.0)
            with torch.random.fork_rng(devices):
                for name, draft in drafts.items() if ids.numel() and len(self._candidates) > 1 else ():
                    self._pass_settings(draft)
                    speeds[name] = trial_speed(target, draft, ids, options)
            plain = speeds.pop("")
            best = max(speeds, key=lambda name: speeds[name])
            self._candidates = {best: drafts[best]}
            with_ngrams = drafts[best].num_ngram_nodes > 0
            self.choice = line(best, speeds, plain, bool(options.get("do_sample")), with_ngrams)
            self._report(self.choice)
        self._pass_settings(self.chosen)
        return self.chosen

    def _pass_settings(self, draft: DraftModel) -> None:
        for name, default in self.settings.items():
            if (value := self.setting(name)) != default:
                setattr(draft.generation_config, name, value)

    def _draft_of(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> DraftModel:
        """Return the draft of a call, chosen by its longest prompt and its sampling if it is the first one."""
        if self.choice is None and input_ids.numel() and attention_mask is not None and attention_mask.dim() == 2:
            row = int(attention_mask.sum(1).argmax())
            input_ids = input_ids[row : row + 1, attention_mask[row, -input_ids.shape[1] :].bool()]
        options = {name: value for name in SAMPLING if (value := getattr(generation_config, name, None)) is not None}
        return self.choose(model, input_ids[:1], **options)

    def longspec_decoding(self, model: PreTrainedModel, input_ids: torch.LongTensor, **kwargs: Any) -> Any:
        return self._draft_of(model, input_ids, **kwargs).longspec_decoding(model, input_ids, **kwargs)

    @property
    def last_speculation(self) -> SpeculationStats | None:
        return None if self.choice is None else self.chosen.last_speculation

    @last_speculation.setter
    def last_speculation(self, value: SpeculationStats | None) -> None:
        if self.choice is not None:
            self.chosen.last_speculation = value

    def make_drafter(self, binding: Binding) -> Drafter:
        return self.chosen.drafter(binding)

    def max_nodes(self, target: TargetView) -> int:
        return max((draft.num_tree_nodes(target) for draft in self._candidates.values()), default=1)

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save the chosen draft."""
        self.chosen.save_pretrained(save_directory, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Publish the chosen draft."""
        return self.chosen.push_to_hub(repo_id, **kwargs)


def trial_speed(target: PreTrainedModel, draft: DraftModel, ids: torch.Tensor, options: dict[str, Any]) -> float:
    """Return the tokens per second after a text with a draft in every step, without the time to read the text."""
    gate, speeds = draft.setting("gate"), []
    draft.generation_config.gate = False
    try:
        for _ in range(TRIAL_CALLS):
            torch.manual_seed(0)
            mask, how = torch.ones_like(ids), {**options, "max_new_tokens": TRIAL_TOKENS}
            target.generate(ids, attention_mask=mask, custom_generate=draft.custom_generate, **how)
            speeds.append(draft.last_speculation.tokens_per_second if draft.last_speculation else 0.0)
    finally:
        draft.generation_config.gate = gate
    return max(speeds)


def line(best: str, speeds: dict[str, float], plain: float, is_sampled: bool, with_ngrams: bool) -> str:
    """Return the line that says what was chosen and why."""
    if len(speeds) == 1 and with_ngrams:
        return f"draft: {best}, with n-grams, as no other exists for this model"
    if len(speeds) == 1:
        seldom = "; sampled text repeats little, so the gate may pause it" if is_sampled else ""
        return f"draft: {best}, as no other exists for this model{seldom}"
    if not speeds[best]:
        return f"draft: {best}, without a comparison, as there is no text or the target does not take drafts"
    others = ", ".join(f"{speed:.3g} with {name}" for name, speed in speeds.items() if name != best)
    pause = "" if speeds[best] > plain else "; the gate pauses it while it is slower"
    return f"draft: {best}, {speeds[best]:.3g} tokens/s on this text ({others}, {plain:.3g} without a draft){pause}"


@contextmanager
def skipping(candidate: str, log: Callable[..., None]) -> Iterator[None]:
    """Go on after an error of a draft that cannot be loaded, and log it in one line."""
    try:
        yield
    except (OSError, ValueError) as error:  # among others of another kind of target, or too little memory
        log("%s is not used: %s", candidate, " ".join(str(error).split()))


def draft_named_by(target: PreTrainedModel) -> Any:
    """Return what the config or the card of a target names as its draft, which may be anything; `None` without one."""
    place, name = target.config._name_or_path, getattr(target.config, CARD_KEY, None)
    if name is None and place:
        try:
            name = (metadata_load(Path(str(cached_file(place, "README.md")))) or {}).get(CARD_KEY)
        except (OSError, ValueError, RecursionError, YAMLError):
            return None  # no card, or one without readable metadata
    return name


def class_of(config: dict[str, Any]) -> Any:
    """Return the class of the draft that reads a config.json: a saved one, of another project, or a small model's."""
    draft = draft_class_of(config)
    is_model = draft is None and config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return DRAFTS[ASSISTANT].model if is_model else draft


def load_named(name: Any, target: PreTrainedModel) -> tuple[str, DraftModel]:
    """Return the draft of a folder or Hub id: a saved one, a checkpoint of another project, or a small model.

    The name that is returned with it is the folder, if there is one in that of the target.
    """
    if not isinstance(name, str):
        raise ValueError("expected the name of a folder or a Hub id")
    place = target.config._name_or_path
    inner = os.path.normpath(Path(place) / name)
    name = inner if place and Path(inner).exists() else name
    config = read_config(name)
    if (draft := class_of(config)) is None:
        raise ValueError(f"{name} has model_type={config.get('model_type')!r} and is not a draft")
    return name, draft.from_pretrained(name, target=target)
