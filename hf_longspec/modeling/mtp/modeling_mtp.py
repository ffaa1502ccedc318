"""MtpDraftModel: the layers for multi-token prediction in the target's checkpoint, run once per drafted token."""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...attention_backends.interface import AUTOMATIC, differentiable_attention
from ...attention_backends.registry import merge_attention_states
from ...generation.cache import CACHE_NAME
from ...generation.call import refuse_target
from ...generation.special_cases.masked import INDEXED_LAYERS
from ...generation.special_cases.recurrent_states import HYBRID_LAYERS, STATE_LAYERS
from ...generation.target import TargetView
from ...generation.target_modules import (
    TargetParts,
    attention_of,
    decoder_of,
    final_norm_of,
    last_full_layer,
    layer_at,
    refuse_compiled_forward,
)
from ..base import DraftModel
from ..configuration_base import DraftConfig, check_sizes, text_config
from ..saved_config import readable
from ..settings import WIDTHS, Setting
from ..shared.aux_hidden_states import Rotary, up_to
from .generation_mtp import MtpDrafter


class MtpConfig(DraftConfig):
    """Configuration of [`MtpDraftModel`]."""

    model_type = "longspec_mtp"

    layer_config: dict[str, Any] | None = None  # the target's text config, by which its decoder layers are built
    layer_idx: int = 0  # the layer of the target that the MTP layer is of the kind of
    hidden_states_first: bool = False  # whether the state comes before the embedding in the input of the projection
    zero_first_embedding: bool = False  # whether the embedding at position 0 is zero
    final_norm: bool = True  # whether a norm follows the layer
    training_steps: int = 3  # number of chained steps in training

    @classmethod
    def from_target(cls, target: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> Self:
        """Return the configuration of one layer like the target's last one with full attention."""
        text = text_config(target)
        # the config class of a model with code of its own may extend one of transformers, whose layers it then has
        names = (getattr(kind, "model_type", "") for kind in type(text).__mro__)
        kinds = [name for name in names if name in CONFIG_MAPPING]
        layer_config = text.to_dict() | {"model_type": (kinds or [text.model_type])[0]}
        for name in ("quantization_config", "auto_map", "dtype", "architectures", "_name_or_path"):
            layer_config.pop(name, None)
        values = {"layer_config": layer_config, "layer_idx": last_full_layer(text)}
        return super().from_target(target, **(values | overrides))

    @property
    def layer(self) -> PreTrainedConfig:
        fields = dict(self.layer_config or {})
        return CONFIG_MAPPING[fields.pop("model_type")].from_dict(fields)

    @property
    def head_dim(self) -> int:
        config: Any = self.layer
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def check_types(self) -> None:
        super().check_types()
        fields, where = self.layer_config or {}, "layer_config in the draft's config.json"
        if not isinstance(kind := fields.get("model_type"), str) or kind not in CONFIG_MAPPING:
            raise ValueError(
                f"{where} has model_type={kind!r}, which this version of transformers does not know. Make the draft "
                "with from_target(target), or install the version that wrote it."
            )
        check_sizes(where, fields)
        with readable(where, fields, CONFIG_MAPPING[kind].from_dict):
            self.layer  # noqa: B018
        if not 0 <= self.layer_idx < (layers := fields.get("num_hidden_layers", 0)):
            raise ValueError(
                f"layer_idx={self.layer_idx} in the draft's config.json: expected a layer from 0 to {layers - 1}. "
                "Correct the file."
            )


# From new keys and values `(B, K, n, D)` to all that are attended to, `(B, K, M, D)`, under a mask `(B, n, M)`. Without
# a mask nothing is attended to: the new keys and values are stored alone.
Store = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]

# What a decoder layer is made of, and what its forward gets from an MTP layer or can do without.
MADE_OF = {"config", "layer_idx"}
GIVEN = {"hidden_states", "position_embeddings", "position_ids", "attention_mask", CACHE_NAME, "use_cache"}
GIVEN |= {"output_attentions"}


def decoder_like(config: MtpConfig) -> PreTrainedModel:
    """Return a decoder of the target's class without memory. Its parts have the classes that a draft is built of.

    Raises:
        ValueError: If a layer of this class cannot be an MTP layer.
    """
    layer_config, reason = config.layer, None
    kind = MODEL_MAPPING.get(type(layer_config), None)
    if kind is None:
        reason = "transformers has no class for its language model alone"
    elif not kind._can_set_attn_implementation():
        reason = "its attention does not go through transformers' AttentionInterface"
    else:
        try:
            with torch.device("meta"):
                decoder: PreTrainedModel = AutoModel.from_config(layer_config, attn_implementation=AUTOMATIC)
        except Exception as error:  # whatever a class of another project raises
            reason = (
                f"its class cannot be built of config alone ({type(error).__name__}: {' '.join(str(error).split())})"
            )
        else:
            reason = _why_not(decoder, config.layer_idx)
    if reason is not None:
        raise ValueError(
            f"a layer of model_type={layer_config.model_type!r} cannot be used as an MTP layer: "
            f"{reason}. Use another draft, such as NgramDraftModel."
        )
    return decoder


def _why_not(decoder: PreTrainedModel, index: int) -> str | None:
    """Return why a layer of a decoder cannot be an MTP layer; `None` if it can."""
    layers, kinds = decoder_of(decoder).layers, getattr(decoder.config, "layer_types", None) or ()
    if len(layers) != decoder.config.num_hidden_layers:
        return f"the model has {len(layers)} layers, and its config counts {decoder.config.num_hidden_layers}"
    kind, layer = kinds[index] if index < len(kinds) else "", type(layer_at(decoder, index))
    if kind in HYBRID_LAYERS | STATE_LAYERS:
        return f"it is a layer of type {kind}, which keeps recurrent states"
    if kind in INDEXED_LAYERS:
        return f"it is a layer of type {kind}, whose indexer keeps keys of its own"
    if others := sorted(set(inspect.signature(layer).parameters) - MADE_OF):
        return f"it is made with {', '.join(others)} in addition to its config and index"
    parameters = inspect.signature(layer.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    if others := [name for name in names[1:] if name not in GIVEN]:  # after self
        return f"its forward also takes {', '.join(others)}"
    try:
        attention_of(decoder_of(decoder), index)
    except ValueError:
        return "its attention has no function of its own to rotate queries and keys"
    return None


class LayerForward:
    """The cache and the attention context of one forward of one layer.

    Args:
        store (`Callable`): Keeps keys and values, see `Store`. A layer may cache latents in their place (MLA).
    """

    def __init__(self, store: Store):
        self._store = store
        self._mask: torch.Tensor | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values, as a cache of transformers does, and return those that are attended to."""
        keys, values, self._mask = self._store(keys, values)
        return keys, values

    def attend(
        self,
        backend: Any,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention output `(B, H, n, Dv)` under the mask of the last `update`; zeros without one."""
        if self._mask is None:
            return query.new_zeros(*query.shape[:3], value.shape[3])
        options: dict[str, Any] = {"scaling": scaling, "softcap": softcap}
        if torch.is_grad_enabled() and query.requires_grad:
            mask = self._mask[:, None]
            return differentiable_attention(query, key, value, mask, causal=False, sinks=sinks, **options)
        state = backend.tree_attention(query, key, value, self._mask, **options)
        return state[0] if sinks is None else merge_attention_states([state], sinks)[0]


class MtpLayer(GradientCheckpointingLayer):
    """Joins a state with the embedding of the token after it, and runs a decoder layer on the projection.

    The names are those of transformers' own class.
    """

    def __init__(self, config: MtpConfig, decoder: PreTrainedModel):
        super().__init__()
        self.hidden_states_first = config.hidden_states_first
        self.zero_first_embedding = config.zero_first_embedding
        norm, layer, size = final_norm_of(decoder), layer_at(decoder, config.layer_idx), decoder.config.hidden_size
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        device = self.eh_proj.weight.device
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(norm).to_empty(device=device) for _ in range(3))
        if not config.final_norm:
            self.norm = None  # type: ignore[assignment]
        self.block = type(layer)(decoder.config, config.layer_idx)

    def forward(
        self, states: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, angles: Rotary, store: Store
    ) -> torch.Tensor:
        """Return outputs `(B, n, hidden)`, which are the states of the next step and the input of the target's head.

        Args:
            states (`torch.Tensor` of shape `(B, n, hidden)`): Output of the target's final norm at the tokens before,
                or outputs of the step before.
            embedded (`torch.Tensor` of shape `(B, n, hidden)`): Embeddings of the tokens.
            positions (`torch.LongTensor` of shape `(B, n)`): Positions of the states.
            angles (`tuple[torch.Tensor, torch.Tensor]`): Cosines and sines of these positions.
            store (`Callable`): See `Store`.
        """
        if self.zero_first_embedding:
            embedded = embedded * (positions > 0)[..., None]
        parts = self.enorm(embedded), self.hnorm(states)
        step = LayerForward(store)
        outputs = self.block(
            self.eh_proj(torch.cat(parts[::-1] if self.hidden_states_first else parts, -1)),
            position_embeddings=angles,
            position_ids=positions,
            attention_mask=None,
            **{CACHE_NAME: step},
            use_cache=True,
            tree=step,
        )
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        return outputs if self.norm is None else self.norm(outputs)


class MtpDraftModel(DraftModel):
    """A draft of the layer that was trained with the target and lies in its checkpoint, where transformers skips it.

    An entry joins the output of the target's final norm at one token with the embedding of the next. Embedding, head
    and rotary embedding are the target's. It is run again for every drafted token, on its own output in place of the
    target's.

    ```python
    draft = MtpDraftModel.from_target(target)
    target.generate(**inputs, assistant_model=draft)
    ```

    Source: DeepSeek-V3, https://huggingface.co/papers/2412.19437, section 2.2.
    """

    config_class = MtpConfig
    drafter_class = MtpDrafter
    _no_split_modules = ["MtpLayer"]
    settings: ClassVar[dict[str, Any]] = {
        "tree_widths": WIDTHS,
        # DeepSeek-V3 was trained on texts of this length first (section 4.2 of the paper)
        "window": Setting(4096, "Number of last entries that are kept, or `all`.", int, choices=("all",)),
        "sinks": Setting(4, "Number of first entries that are kept in addition to the window.", int, least=0),
    }

    def __init__(self, config: MtpConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        decoder = decoder_like(config)
        self.layers = nn.ModuleList([MtpLayer(config, decoder)])
        self.post_init()

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        """Checkpoint MTP layers as a whole: a decoder layer that is checkpointed itself gets no cache."""
        super()._set_gradient_checkpointing(*args, **kwargs)
        for layer in self.layers:
            for module in layer.block.modules():  # type: ignore[union-attr]
                if hasattr(module, "gradient_checkpointing"):
                    module.gradient_checkpointing = False

    @classmethod
    def from_target(cls, target: PreTrainedModel, checkpoint: str | None = None, **overrides: Any) -> Self:
        """Return the draft that lies in the target's checkpoint, in eval mode at its `place`.

        The checkpoint is the folder that the target was loaded from, or its files in the cache of the Hub. The tensors
        of the MTP layers alone are read.

        Args:
            target (`PreTrainedModel`): The target.
            checkpoint (`str`, *optional*): Folder or Hub id of the checkpoint, if the target was not loaded from it.
            overrides (`Any`): Settings of the draft by name.

        Raises:
            ValueError: If the target was not loaded from a checkpoint, or it holds no MTP layers, or layers of a kind
                that is not supported.
        """
        view = TargetView(target)
        settings = cls._settings_of(overrides)
        cls.check_structure(target)
        refuse_target(view, cls)
        # by name, as the code of a draft imports no conversion
        found = resolve_name("hf_longspec.modeling.mtp.convert_mtp:MtpCheckpoint").of(target, checkpoint)
        config = cls.config_class.from_target(target, **(found.fields | overrides))
        with torch.device("meta"):
            draft = cls(config)
        dtype = target.get_input_embeddings().weight.dtype
        draft.load_state_dict(found.tensors(draft.state_dict(), dtype), assign=True)
        return draft._beginning(view, settings)

    @classmethod
    def check_structure(cls, target: PreTrainedModel) -> None:
        """Refuse targets without rotary positions or a final norm, and those whose layers cannot be MTP layers."""
        decoder_of(target)
        final_norm_of(target)
        decoder_like(cls.config_class.from_target(target))

    def forward(
        self,
        hidden_states: torch.Tensor,
        tokens: torch.Tensor,
        target: PreTrainedModel,
        steps: int = 1,
        window: int | None = None,
        sinks: int = 0,
        score: Callable[[int, torch.Tensor], Any] | None = None,
    ) -> list[Any]:
        """Return the logits of chained steps over whole texts, in which every drafted token is that of the text.

        Args:
            hidden_states (`torch.Tensor` of shape `(B, T, hidden)`): Output of the target's final norm at T tokens.
            tokens (`torch.LongTensor` of shape `(B, L)`): The tokens after the first of these, at least T.
            target (`PreTrainedModel`): The target.
            steps (`int`, *optional*, defaults to 1): Number of chained steps.
            window (`int`, *optional*): Number of entries of the text that each place attends to. All by default.
            sinks (`int`, *optional*, defaults to 0): First entries that all places attend to in addition to the window.
            score (`Callable`, *optional*): Function of the step and of its outputs `(B, n, hidden)`, for training.

        Returns:
            `list[torch.Tensor]`: For each step s, logits `(B, n, vocab)`, or the result of `score`, of the
            n = min(T, L - s) first entries. Row p follows the entries 0 to p and the tokens p + 1 to p + s.
        """
        parts, results = self.parts_of(target), []
        states, entries = hidden_states.to(self.dtype), TextEntries(window, sinks)
        for step in range(steps):
            after = tokens[:, step : step + states.shape[1]]
            states = states[:, : after.shape[1]]
            positions = (step + torch.arange(after.shape[1], device=after.device)).expand_as(after)
            embedded, angles = parts.embed(after).to(states), parts.rotary(positions, states)
            states = self.layers[0](states, embedded, positions, angles, partial(entries, step))
            results.append(parts.head(states) if score is None else score(step, states))
        return results

    def parts_of(self, target: PreTrainedModel) -> TargetParts:
        """Return embedding, head and rotary embedding of the target."""
        return TargetParts(target, self.config.layer_idx)

    @property
    def prompt_tokens(self) -> int:
        window = self.setting("window")
        return 2**62 if window == "all" else int(window)

    def layers_of(self, text: Any) -> tuple[int, ...]:
        """Return the place of the target whose input is read: its final norm, which the draft applies itself."""
        return (text.num_hidden_layers,)

    def check_settings(self, target: TargetView) -> None:
        refuse_compiled_forward(target.model)


class TextEntries:
    """Keys and values of chained steps over whole texts, in one layer.

    Place p of every step attends to the entries of the text up to p, the last `window` of them and the first `sinks`,
    and to its own entries of later steps. Later steps may have fewer places.
    """

    def __init__(self, window: int | None = None, sinks: int = 0) -> None:
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._window, self._sinks = window, sinks

    def __call__(
        self, step: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Store a step, and return keys and values of all up to it, with its mask."""
        steps = up_to(step, self._parts, (keys, values))
        count, length = keys.shape[2], steps[0][0].shape[2]
        entries = torch.arange(length, device=keys.device)
        places = entries[:count, None]
        own = [entries[: part.shape[2]] == places for part, _ in steps[1:]]
        seen = entries <= places
        if self._window is not None:
            seen = seen & ((entries > places - self._window) | (entries < self._sinks))
        whole = torch.cat([seen, *own], 1).expand(len(keys), -1, -1)
        return *(torch.cat(parts, 2) for parts in zip(*steps, strict=True)), whole  # type: ignore[return-value]
