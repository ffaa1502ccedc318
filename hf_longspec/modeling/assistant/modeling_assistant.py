"""AssistantDraftModel: another causal language model as a draft."""

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ...generation.drafter import Binding, Drafter
from ...generation.target import TargetView
from ..base import DraftModel, refuse_masked
from ..configuration_base import DraftConfig, check_sizes, text_config
from ..loading import HUB_KWARGS, of_hub, readable_errors, refuse_missing_weights
from ..saved_config import read_config, readable
from ..settings import ACCEPTANCE, WIDTHS, Setting
from .generation_assistant import AssistantDrafter, Shape, Translation, size_of


class AssistantConfig(DraftConfig):
    """Configuration of [`AssistantDraftModel`]."""

    model_type = "longspec_assistant"

    # Hub id or folder of the model that drafts; "./assistant" if it is part of the saved draft. By default the target
    # drafts for itself.
    assistant_name_or_path: str | None = None
    # Mask token of a model that was trained with PARD, which then proposes all tokens in one forward.
    pard_token: int | None = None
    translates: bool = False  # whether the model has another tokenizer than the target

    @classmethod
    def describe(cls, target: PreTrainedModel | PreTrainedConfig) -> dict[str, Any]:
        """Return the vocabulary size of a target, which is all that the draft depends on."""
        return {"vocab_size": text_config(target).vocab_size}


# Folder of the model's weights inside of a saved draft, and the name by which the config refers to it.
WEIGHTS = "assistant"
BESIDE = f"./{WEIGHTS}"
# Window of a target that drafts for itself.
OWN_WINDOW = 512


class AssistantDraftModel(DraftModel):
    """Draft with another causal language model, in chains or trees and for any batch size.

    The model runs through the same attention as a target and is checked by the same rules. With `window`, its cache
    keeps the first and last tokens of the text only, so that its cost does not grow with the context. Without a model,
    the target drafts for itself with such a window. A model with another tokenizer proposes the tokens that both have.

    ```python
    draft = AssistantDraftModel.from_pretrained("Qwen/Qwen3-0.6B", target=target)
    target.generate(**inputs, assistant_model=draft)
    ```

    Sources: https://huggingface.co/papers/2211.17192; with a window, https://huggingface.co/papers/2408.11049.
    """

    config_class = AssistantConfig
    # The model is loaded by its own name, or saved in a folder of its own.
    weightless: ClassVar[bool] = True
    settings: ClassVar[dict[str, Any]] = {
        "num_assistant_tokens": Setting(5, "Number of tokens of a chain.", int),
        "tree_widths": replace(
            WIDTHS,
            default=None,
            on_cpu=None,
            meaning="Number of nodes of each level of a tree, such as `[4, 4, 3]`. `None` drafts a chain.",
        ),
        "window": Setting(None, "Number of last tokens that the draft keeps in its cache. `None` keeps all.", int),
        "sinks": Setting(4, "Number of first tokens that are kept in addition to a window.", int, least=0),
        "acceptance": replace(ACCEPTANCE, default="coupled"),
        "prefill_chunk_size": Setting(2048, "Number of tokens per forward of the draft's prefill.", int),
    }

    def __init__(self, config: AssistantConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.assistant: PreTrainedModel | None = None
        self.translation: Translation | None = None  # of a model with another tokenizer
        self._assistant_tokenizer: Any = None
        self._is_loaded = False  # whether the draft loaded the model, and may move it

    @classmethod
    def from_model(cls, assistant: PreTrainedModel, target: PreTrainedModel, **overrides: Any) -> Self:
        """Return a draft by a model that is loaded already. It stays on its device and is not changed.

        Args:
            assistant (`PreTrainedModel`): The model that drafts, a causal language model smaller than the target.
            target (`PreTrainedModel`): The model that decides the text.
            overrides (`Any`): Settings of the draft by name, such as `window` and `sinks`, and the tokenizers of both
                models, `tokenizer` and `assistant_tokenizer`, which are loaded by the models' names otherwise.

        Raises:
            ValueError: If the tokenizers share no token or are not found, if either model is not supported, or an
                override is unknown.
        """
        return cls.from_target(target, assistant=assistant, **overrides)

    @classmethod
    def from_target(cls, target: PreTrainedModel, assistant: PreTrainedModel | None = None, **overrides: Any) -> Self:
        """Return a draft for `target`, as `from_model` does; without a model, the target drafts for itself."""
        if assistant is None:
            return super().from_target(target, **({"window": OWN_WINDOW} | overrides))
        TargetView(assistant)  # refuses a name
        tokenizers = overrides.pop("tokenizer", None), overrides.pop("assistant_tokenizer", None)
        draft = super().from_target(target, **overrides)
        draft.assistant = assistant
        draft._translate(target, *tokenizers)
        draft.config.assistant_name_or_path = assistant.config._name_or_path or BESIDE
        if draft.config.pard_token is None:
            draft.config.pard_token = getattr(text_config(assistant), "pard_token", None)
        draft.check(TargetView(target))
        return draft

    @classmethod
    def _load(
        cls, path: Any, target: PreTrainedModel | None, fields: dict[str, Any] | None, *args: Any, **kwargs: Any
    ) -> tuple[Self, dict[str, Any]]:
        """Load a causal language model as a draft for `target`, or a saved draft with its model.

        The model gets the target's device and dtype.
        """
        name = str(path)
        tokenizers = {key: kwargs.pop(key, None) for key in ("tokenizer", "assistant_tokenizer")}
        kind = getattr(kwargs.get("config"), "model_type", None) if fields is None else fields.get("model_type")
        if kind != cls.config_class.model_type:
            if target is None:
                raise ValueError(
                    f"{name} has model_type={kind!r} and is not a saved draft: pass target=, the model that it shall "
                    "draft for."
                )
            return cls.from_model(_loaded(name, target, *args, **kwargs), target, **tokenizers), {}
        draft, info = super()._load(name, target, fields, *args, **kwargs)
        draft._load_assistant(name, target, {key: kwargs[key] for key in kwargs if key in LOADING})
        if target is not None and draft.assistant is not None:
            draft._translate(target, **tokenizers)
        return draft, info

    def _translate(self, target: PreTrainedModel, tokenizer: Any = None, assistant_tokenizer: Any = None) -> None:
        """Compare the tokenizers of the model and the target, and translate between them if they differ.

        Vocabularies of one tokenizer may differ by padding. The tokenizers are loaded by the names of both models. If
        one cannot be loaded, the sizes must be equal.
        """
        assert self.assistant is not None
        models = (self.assistant, target)
        names = [model.config._name_or_path for model in models]
        sizes = [text_config(model).vocab_size for model in models]
        found = [assistant_tokenizer or _tokenizer(names[0]), tokenizer or _tokenizer(names[1])]
        if None in found:
            if sizes[0] == sizes[1] and not self.config.translates:
                return
            labels = [
                f"{name or type(model).__name__} ({size:,} tokens)"
                for name, model, size in zip(names, models, sizes, strict=True)
            ]
            missing = " and ".join(label for label, one in zip(labels, found, strict=True) if one is None)
            raise ValueError(
                f"the vocabularies of assistant={labels[0]} and target={labels[1]} differ, and the tokenizer of "
                f"{missing} was not found to translate between them. Pass tokenizer= and assistant_tokenizer=, or load "
                "both models by names that have a tokenizer."
            )
        first, second = ({number: token for token, number in one.get_vocab().items()} for one in found)
        self.config.translates = any(first[number] != second[number] for number in first.keys() & second.keys())
        if self.config.translates:
            readable = self.assistant.get_input_embeddings().weight.shape[0]
            self.translation = Translation.between(found[1], found[0], sizes[1], readable)
            self._assistant_tokenizer = found[0]

    def _load_assistant(self, source: str, target: PreTrainedModel | None, kwargs: dict[str, Any]) -> None:
        """Load the model that the config names, if it names one."""
        name = self.config.assistant_name_or_path
        if name is None:
            return
        kwargs.pop("revision", None) if name != BESIDE else None  # that of the draft
        if name == BESIDE:
            name, inner = source, "/".join(filter(None, [kwargs.get("subfolder"), WEIGHTS]))
            if Path(source).is_dir():  # with a subfolder transformers reads the generation config of the folder above
                name = str(Path(source) / inner)
                kwargs.pop("subfolder", None)
            else:
                kwargs |= {"subfolder": inner}
        self.assistant = _loaded(name, target, **kwargs)
        self._is_loaded = True

    def save_pretrained(
        self, save_directory: str | os.PathLike, assistant_weights: bool | None = None, **kwargs: Any
    ) -> None:
        """Write the settings, and the name of the model or its weights.

        Args:
            assistant_weights (`bool`, *optional*): Whether to write the model's weights, in the folder `assistant`. By
                default they are written if the model has no Hub id by which others could load it.
            kwargs (`Any`): Arguments of `PreTrainedModel.save_pretrained` for the weights.

        Raises:
            ValueError: If the weights are to be left out and the model has no name, if the model has an adapter, or
                `push_to_hub=True`.
        """
        name = self.config.assistant_name_or_path
        if getattr(self.assistant, "peft_config", None):
            raise ValueError(
                "the draft model has an adapter, which would be saved without its base: merge it first, as "
                "merge_and_unload() does for a PeftModel."
            )
        if assistant_weights is None:
            assistant_weights = name is not None and (name == BESIDE or Path(name).exists())
        if not assistant_weights and name == BESIDE:
            raise ValueError(
                "assistant_weights=False, but the draft model has no name to load it by: save its weights, or set "
                "draft.config.assistant_name_or_path to its Hub id."
            )
        written = self.config.assistant_name_or_path = BESIDE if assistant_weights and name is not None else name
        try:
            super().save_pretrained(save_directory, **({} if written == BESIDE else kwargs))
        finally:
            self.config.assistant_name_or_path = name
        if written == BESIDE:
            assert self.assistant is not None
            self.assistant.save_pretrained(Path(save_directory) / WEIGHTS, **kwargs)
            if self._assistant_tokenizer is not None:
                self._assistant_tokenizer.save_pretrained(Path(save_directory) / WEIGHTS)

    def make_drafter(self, binding: Binding) -> Drafter:
        assistant = binding.target.model if self.assistant is None else self.assistant
        if self._is_loaded and getattr(assistant, "hf_device_map", None) is None:
            assistant = assistant.to(binding.target.model.device)
        if self.config.translates and self.translation is None:  # loaded without its target
            self._translate(binding.target.model)
        if self.translation is not None and self.translation.tokens.device != assistant.device:
            self.translation = self.translation.to(assistant.device)
        if self.assistant is not None and assistant.training:  # a copy, as the user may be training the model
            assistant = copy.deepcopy(assistant).eval()
        return AssistantDrafter(binding, TargetView(assistant, binding.target.steps.runner), self)

    def max_nodes(self, target: TargetView) -> int:
        return size_of(self.shape())[0]

    def shape(self) -> Shape:
        """Return the length of a chain, or the widths of a tree. A tree without branches is a chain."""
        widths = self.setting("tree_widths")
        if widths is None:
            return int(self.setting("num_assistant_tokens"))
        return len(widths) if set(widths) == {1} else list(widths)

    def check_settings(self, target: TargetView) -> None:
        """Refuse a model that is missing or not supported, and trees of a model that proposes chains."""
        name = self.config.assistant_name_or_path
        if self.assistant is None and name is not None:
            raise ValueError(
                f"assistant_name_or_path={name!r} was not loaded: load the draft with from_pretrained, or create one "
                "with from_model(assistant, target)."
            )
        view = None if self.assistant is None else TargetView(self.assistant)
        if view is not None and (reasons := view.why_not()):
            raise ValueError(
                f"assistant={type(self.assistant).__name__} cannot draft: {'; '.join(reasons)}. Use another model."
            )
        refuse_masked(view or target, type(self).__name__)
        if (token := self.config.pard_token) is None:
            return
        if self.config.translates:
            raise ValueError(f"pard_token={token}: a PARD model needs the tokenizer of the target.")
        model = target.model if self.assistant is None else self.assistant
        if token >= (size := model.get_input_embeddings().weight.shape[0]):
            raise ValueError(f"pard_token={token}: the draft model has the tokens 0 to {size - 1}.")
        if not isinstance(shape := self.shape(), int):
            raise ValueError(
                f"tree_widths={shape} with pard_token={token}: a PARD model proposes chains. Set tree_widths=None."
            )

    def check_sampling(self) -> None:
        """Refuse trees and n-grams together with drawn tokens, as rejection sampling supports chains only."""
        super().check_sampling()
        if self.draws_tokens and not isinstance(self.shape(), int):
            raise ValueError(
                f"acceptance='rejection' with tree_widths={self.setting('tree_widths')}: rejection sampling supports "
                "chains only. Use acceptance='coupled' or tree_widths=None."
            )


# Arguments of `from_pretrained` that are passed on to the model of a saved draft.
LOADING = HUB_KWARGS | {"dtype", "device_map", "attn_implementation", "trust_remote_code", "quantization_config"}


def _tokenizer(name: str) -> Any:
    """Return the tokenizer of a model; `None` if it cannot be loaded."""
    if not name:
        return None
    from transformers import AutoTokenizer  # loads another library, which only this needs

    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception:  # each kind of tokenizer raises its own
        return None


def _loaded(name: str, target: PreTrainedModel | None, *args: Any, **kwargs: Any) -> PreTrainedModel:
    """Load a model in eval mode, on the device of the target unless its weights were distributed."""
    fields = read_config(name, **of_hub(kwargs))
    check_sizes(f"config.json of {name}", fields)
    if fields.get("model_type") in CONFIG_MAPPING:
        read = CONFIG_MAPPING[fields["model_type"]].from_dict
        with readable(f"config.json of {name}", fields, read):
            read(fields)
    with readable_errors(name):
        assistant, info = AutoModelForCausalLM.from_pretrained(name, *args, output_loading_info=True, **kwargs)
    refuse_missing_weights(assistant, info)
    if target is not None and getattr(assistant, "hf_device_map", None) is None:
        assistant = assistant.to(target.device)
    return assistant.eval()
