"""The bases of all drafts. Importing this module routes `generate(assistant_model=draft)` to the decoding loop."""

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Self

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from ..attention_backends.interface import register
from ..generation.cache import SpeculativeCache
from ..generation.call import refuse_target
from ..generation.compiled.cuda_graphs import release_workspaces
from ..generation.decoding import decode
from ..generation.drafter import Binding, Drafter
from ..generation.route import install
from ..generation.sequences import SpeculationStats
from ..generation.special_cases import register_special_cases
from ..generation.target import TargetView
from ..generation.target_modules import device_of, final_norm_of
from .configuration_base import DraftConfig
from .loading import of_hub, read_settings, readable_errors, refuse_missing_weights
from .saved_config import read_config
from .settings import COMMON, NGRAMS, Setting
from .shared.ngrams import JoinedDrafter, NgramDrafter

register()
register_special_cases()
install()

# Maximum number of nodes of a tree. Its mask has an entry for each pair of nodes.
MOST_NODES = 4096


class DraftModel(PreTrainedModel):
    """Base of all drafts. `config` holds the architecture, and `generation_config` the settings of drafting.

    Subclasses define `config_class`, `drafter_class`, the class of a drafter of one call, which gets the
    [`Binding`] and the draft (or `make_drafter`), and `settings`, the keys of `generation_config` that they add: for
    each a [`Setting`], or its default alone. The class then has all defaults in `settings`, and the whole table in
    `declared`. Subclasses without parameters set `weightless`. Unless a subclass clears `takes_ngrams`, it also gets
    the settings of n-grams, which are added to its trees. Callers therefore use `drafter` and `num_tree_nodes`, which
    include n-grams.
    """

    config_class = DraftConfig
    base_model_prefix = "draft"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    weightless: ClassVar[bool] = False
    takes_ngrams: ClassVar[bool] = True
    drafter_class: ClassVar[Any]
    settings: ClassVar[dict[str, Any]] = {}
    declared: ClassVar[dict[str, Setting]] = COMMON
    method: ClassVar[str]  # name of the draft in statistics and messages, that of its configuration
    # A marker for the route, which does not import this class.
    _is_longspec_draft = True

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.declared = (cls.declared | NGRAMS if cls.takes_ngrams else cls.declared).copy()
        for name, value in vars(cls).get("settings", {}).items():
            inherited = cls.declared.get(name, Setting(value))
            cls.declared[name] = value if isinstance(value, Setting) else replace(inherited, default=value)
        cls.settings = {name: declared.default for name, declared in cls.declared.items()}
        cls.method = cls.config_class.short_name()

    def __init__(self, config: DraftConfig, *args: Any, **kwargs: Any):
        config.check_types()
        super().__init__(config, *args, **kwargs)
        self.generation_config = GenerationConfig(**self.initial_settings())
        self.last_speculation: SpeculationStats | None = None

    def get_input_embeddings(self) -> None:
        """Return `None`, as a draft uses the embeddings of the target. Accelerate calls this for sharding (FSDP)."""

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        if getattr(kwargs.get("gradient_checkpointing_func"), "keywords", {}).get("use_reentrant"):
            raise ValueError(
                "use_reentrant=True: the layers of a draft also read states that are not among their arguments, and "
                "these would get no gradient. Leave it out."
            )
        super()._set_gradient_checkpointing(*args, **kwargs)

    @classmethod
    def from_target(cls, target: PreTrainedModel, **overrides: Any) -> Self:
        """Return a draft for `target`. If it has weights, they are untrained, and it is in eval mode at its `place`.

        Overrides are fields of the draft's config, or of its `generation_config`, by name.
        """
        view = TargetView(target)
        settings = cls._settings_of(overrides)
        cls.check_structure(target)
        if not cls.weightless:  # drafts with weights depend on the target's structure; generate() checks it again
            refuse_target(view, cls)
        return cls(cls.config_class.from_target(target, **overrides))._beginning(view, settings)

    @classmethod
    def _settings_of(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        """Take the settings out of `overrides`, and refuse what is left and no field of the config."""
        settings = {name: overrides.pop(name) for name in list(overrides) if name in cls.settings}
        if unknown := sorted(set(overrides) - set(vars(cls.config_class()))):
            raise ValueError(f"unknown settings {unknown} for {cls.__name__}, which has {sorted(cls.settings)}.")
        return settings

    def _beginning(self, target: TargetView, settings: dict[str, Any]) -> Self:
        """Return this new draft with its settings, checked, in eval mode at its `place`."""
        self.generation_config.update(**settings)
        self.check(target)
        return self if self.weightless else self.to(*self.place(target.model)).eval()

    @classmethod
    def check_structure(cls, target: PreTrainedModel) -> None:
        """Refuse a target without the modules that drafts of this kind read."""

    def place(self, target: PreTrainedModel) -> tuple[torch.device, torch.dtype]:
        """Return the device and dtype that a draft with weights runs with: those of the target's final norm."""
        weight = target.get_input_embeddings().weight
        return device_of(final_norm_of(target), weight.device), weight.dtype

    def placed_at(self, place: tuple[torch.device, torch.dtype]) -> Self:
        """Return this draft in eval mode at its `place`, or a copy, as the user may be training it in another dtype."""
        is_there = not self.training and (self.device, self.dtype) == place
        return self if is_there else copy.deepcopy(self).to(*place).eval()

    def longspec_decoding(self, model: PreTrainedModel, input_ids: torch.LongTensor, **kwargs: Any) -> Any:
        """Generate with `model` and this draft. `model.generate(assistant_model=draft)` calls this method.

        Use `model.generate(..., custom_generate=draft.custom_generate)` if the route is not installed.
        """
        for name in ("assistant_tokenizer", "tokenizer", "inputs_tensor"):
            kwargs.pop(name, None)
        return decode(model, self, input_ids, **kwargs)

    def custom_generate(self, model: PreTrainedModel, input_ids: torch.LongTensor, **kwargs: Any) -> Any:
        """Generate without the installed route. Transformers passes no streamer to a `custom_generate` function."""
        return self.longspec_decoding(model, input_ids, **kwargs)

    def release_buffers(self) -> None:
        """Drop the buffers and CUDA graphs that calls of `generate` left for the next call."""
        release_workspaces(self)

    def drafter(self, binding: Binding) -> Any:
        """Return the [`Drafter`] of one call, with n-grams if the settings enable them."""
        drafter = self.make_drafter(binding)
        return JoinedDrafter(drafter, NgramDrafter(binding, self.setting)) if self.num_ngram_nodes else drafter

    def candidate_generator(self, target: PreTrainedModel, max_length: int) -> Drafter:
        """Return a `CandidateGenerator` of transformers that proposes the chains of this draft for one text.

        It is for decoding loops other than this package's, such as transformers' assisted decoding. It follows the
        text with a cache of its own, so that the prompt is computed twice, and proposes chains only, from the target's
        plain logits: logits processors and sampling are left to the loop. The loop verifies every token. The gate and
        the check of the first verification are parts of this package's loop and do not apply. Use a new one for every
        text, which begins without padding.

        Raises:
            ValueError: If the target cannot be drafted for, or its rotary frequencies change before the longest draft
                ends. A batch of more than one row, and a text that is too long, are refused by `get_candidates`.
        """
        view = TargetView(target)
        refuse_target(view, type(self), max_length)
        self.check(view)
        refuse_masked(view, "candidate_generator()")
        if view.has_states:
            raise ValueError(
                f"candidate_generator() cannot follow {type(target).__name__}, whose recurrent states do not go back "
                "with the text of another loop. Call generate(assistant_model=draft)."
            )
        num_nodes = self.num_tree_nodes(view)
        if max_length + num_nodes > (limit := view.rotary_limit):
            raise ValueError(
                f"max_length={max_length} with drafts of up to {num_nodes} tokens: the target's rotary frequencies "
                f"change at position {limit} (rope_parameters), and drafting beyond it would change those of "
                f"the verification. Keep max_length at {limit - num_nodes} or below, or call "
                "generate(assistant_model=draft)."
            )
        cache = SpeculativeCache(target.config, 1, max_length, tree_slots=num_nodes)
        return self.drafter(Binding(view, cache, None, max_length))

    def num_tree_nodes(self, target: TargetView) -> int:
        """Return the maximum number of nodes of a verified tree: root, drafted tokens and n-grams."""
        return self.max_nodes(target) + self.num_ngram_nodes

    def make_drafter(self, binding: Binding) -> Drafter:
        """Return the drafter of one call with the present settings, without n-grams; see `drafter`."""
        return self.drafter_class(binding, self)

    def max_nodes(self, target: TargetView) -> int:
        """Return the number of nodes of a tree without n-grams, root included; see `num_tree_nodes`.

        By default it is that of a tree of the setting `tree_widths`, or of a chain of `num_assistant_tokens`.
        """
        is_tree = "tree_widths" in self.settings
        return 1 + (sum(self.setting("tree_widths")) if is_tree else self.setting("num_assistant_tokens"))

    @property
    def prompt_tokens(self) -> int:
        """Number of last tokens of a prompt that should run in a call, as the draft reads the target's states there."""
        return 0

    def num_out_of_vocabulary(self, rows: Sequence[Sequence[int]]) -> int:
        """Return how many tokens of some rows this draft cannot propose; none if its vocabulary is the target's."""
        return 0

    def check(self, target: TargetView) -> None:
        """Refuse a target that this draft was not made for, and settings that do not exist or contradict each other."""
        self.config.refuse_other_target(target.model)
        names = set(vars(GenerationConfig())) | set(self.settings)
        present = {name for name in vars(self.generation_config) if not name.startswith("_")}
        if unknown := sorted(present - names):
            raise ValueError(
                f"draft.generation_config has unknown settings {unknown}; {type(self).__name__} has "
                f"{sorted(self.settings)}."
            )
        for name, declared in self.declared.items():
            declared.check(name, self.setting(name))
        self.check_settings(target)
        if (nodes := self.num_tree_nodes(target)) > MOST_NODES:
            raise ValueError(
                f"this draft's settings give a tree of {nodes:,} nodes: at most {MOST_NODES:,} are allowed, and 5 to "
                "100 are usual. Lower the length, width or number of its paths in draft.generation_config."
            )

    def check_settings(self, target: TargetView) -> None:
        """Refuse what `declared` cannot say: settings that contradict each other, the config or the target."""

    def check_sampling(self) -> None:
        """Refuse settings that need greedy decoding. Called if the target samples.

        Rejection sampling supports chains of drawn tokens only.
        """
        if self.num_ngram_nodes and self.draws_tokens:
            raise ValueError(
                f"acceptance='rejection' with ngram_candidates={self.setting('ngram_candidates')}: rejection sampling "
                "does not support n-grams in the tree. Use acceptance='coupled' or ngram_candidates=0."
            )

    @property
    def draws_tokens(self) -> bool:
        """Whether the draft draws tokens from its own distribution when the target samples."""
        return "acceptance" in self.declared and bool(self.setting("acceptance") == "rejection")

    @property
    def num_ngram_nodes(self) -> int:
        """Number of nodes of n-grams that join the tree."""
        return self.setting("ngram_candidates") * self.setting("ngram_num_tokens") if self.takes_ngrams else 0

    def setting(self, name: str) -> Any:
        """Return the value of a setting of this draft, or its default."""
        if (value := getattr(self.generation_config, name, None)) is not None:
            return value
        declared = self.declared[name]
        return declared.default if declared.on_cpu is None or self.device.type != "cpu" else declared.on_cpu

    @classmethod
    def initial_settings(cls) -> dict[str, Any]:
        """Return the settings of a new draft: the defaults, or `None` where they depend on the device."""
        declared = cls.declared.items()
        return {name: None if one.on_cpu is not None else copy.deepcopy(one.default) for name, one in declared}

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse transformers' own assisted decoding, which calls this method and does not support these drafts."""
        raise ValueError(
            f"{type(self).__name__} was passed to transformers' own assisted decoding: the route to the loop of "
            "hf_longspec is not installed. Call hf_longspec.generation.route.install(), or pass "
            "custom_generate=draft.custom_generate instead of assistant_model."
        )

    _supports_logits_to_keep = generate  # assisted decoding calls this before generate() with most targets

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error: drafts run inside `generate`, and those that are trained replace this."""
        raise NotImplementedError(
            f"{type(self).__name__} has no forward over whole texts: call model.generate(..., assistant_model=draft)."
        )

    @property
    def device(self) -> torch.device:
        """Device of the parameters; the CPU for a draft without any, which runs on the device of its target."""
        return torch.device("cpu") if self.weightless else super().device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the parameters; float32 for a draft without any."""
        return torch.float32 if self.weightless else super().dtype

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Write config.json, generation_config.json and, if there are any, the weights.

        A copy of the package, which a published draft brought, also writes the code by which it was loaded. For the
        installed package, `push_to_hub` adds it; `push_to_hub=True` is refused, as it would upload a draft without it.
        """
        if kwargs.pop("push_to_hub", False):
            raise ValueError(
                "save_pretrained(push_to_hub=True) would upload a draft without its code. Use "
                'draft.push_to_hub("owner/name").'
            )
        code = resolve_name("hf_longspec.hub.repository")  # by name, as publishing imports drafts
        if (engine := code.running_engine()) is not None:
            code.write_code(Path(save_directory), engine)
            self.config.auto_map = dict(code.AUTO_MAP)
        elif self._auto_class is None and hasattr(self.config, "auto_map"):
            del self.config.auto_map  # it names files that are not saved
        if self.weightless:
            os.makedirs(save_directory, exist_ok=True)
            self.config.architectures = [type(self).__name__]
            if self._auto_class is not None:
                custom_object_save(self, save_directory, config=self.config)
            self.config.save_pretrained(save_directory)
        else:
            super().save_pretrained(save_directory, **kwargs)
        self.generation_config.save_pretrained(save_directory)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Publish this draft as `"owner/name"`, a repository that transformers loads without this package.

        Further arguments are those of `hf_longspec.hub.push`: `private`, `token`, and facts for the card, such as
        `license`.
        """
        return resolve_name("hf_longspec.hub:push")(self, repo_id, **kwargs)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, target: PreTrainedModel | None = None, **kwargs: Any
    ) -> Any:
        """Load a draft and its saved settings from a folder or a Hub repository.

        With `output_loading_info=True`, return also transformers' loading info, as for any model.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): Folder or Hub id.
            target (`PreTrainedModel`, *optional*): The target. With it, the draft is checked at once, and gets the
                target's device and dtype.
            kwargs (`Any`): Settings of the draft by name, and arguments of `PreTrainedModel.from_pretrained`.

        Raises:
            OSError: If a file is missing or cannot be read.
            ValueError: If weights are missing or have other shapes, a configuration value has the wrong type, or the
                draft was made for another target.
        """
        settings = {name: kwargs.pop(name) for name in list(kwargs) if name in cls.settings}
        wants_info = kwargs.pop("output_loading_info", False)
        view = None if target is None else TargetView(target)
        if target is not None:
            kwargs.setdefault("dtype", target.get_input_embeddings().weight.dtype)
        path = pretrained_model_name_or_path
        # it refuses what transformers cannot read
        fields = read_config(path, **of_hub(kwargs)) if kwargs.get("config") is None else None
        draft, info = cls._load(path, target, fields, *args, **kwargs)
        draft.generation_config.update(**settings)
        if view is not None:
            draft.check(view)
            draft = draft if cls.weightless else draft.to(draft.place(target)[0])
        return (draft, info) if wants_info else draft

    @classmethod
    def _load(
        cls, path: Any, target: PreTrainedModel | None, fields: dict[str, Any] | None, *args: Any, **kwargs: Any
    ) -> tuple[Self, dict[str, Any]]:
        """Return a saved draft and transformers' loading info, or a checkpoint as other projects publish it.

        Some of these need the target. The code that a repository may contain is never run. `fields` are the contents of
        its config.json, unless a config was passed.
        """
        hub, info = of_hub(kwargs), {}
        if fields is not None and fields.get("model_type") != cls.config_class.model_type:
            read = resolve_name("hf_longspec.modeling.register_draft:read_published")  # which imports this module
            if draft := read(cls.config_class.model_type, path, target, kwargs.get("dtype"), **hub):
                return draft, {}
        if cls.weightless:
            config = kwargs.get("config")
            draft = cls(
                config if isinstance(config, cls.config_class) else cls.config_class.from_pretrained(path, **hub)
            )
        else:
            with readable_errors(path):
                draft, info = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        refuse_missing_weights(draft, info)
        if (size := draft.config.vocab_size) < 1:
            raise ValueError(f"config.json in {path} has vocab_size={size}: expected the target's, at least 1.")
        read_settings(draft, path, **hub)
        return draft, info


def refuse_masked(target: TargetView, name: str) -> None:
    """Refuse a target that is verified by masks for a draft that runs it by itself."""
    if not target.mode.takes_contexts:
        raise ValueError(
            f"{name} does not draft with {type(target.model).__name__}, whose nodes are verified by masks. Use another "
            "draft, such as NgramDraftModel."
        )
