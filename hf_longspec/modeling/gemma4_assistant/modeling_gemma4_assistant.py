"""Gemma4AssistantDraftModel: a few layers without keys of their own attend to the target's cache from one position."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

from ...attention_backends.contexts import LayerAttention, StepContext
from ...attention_backends.interface import AUTOMATIC
from ...attention_backends.lengths import SeqLens
from ...attention_backends.registry import AttentionState
from ...generation.draft_tree import Beam
from ...generation.drafter import Binding, Verification, last_of
from ...generation.target import TargetView
from ...generation.target_modules import (
    TargetEnds,
    attention_of,
    decoder_of,
    final_norm_of,
    last_layer,
    refuse_compiled_forward,
    shape_of,
)
from ..base import DraftModel
from ..configuration_base import DraftConfig, check_sizes, refuse_other_sizes, text_config
from ..saved_config import readable
from ..settings import WIDTHS
from ..shared.aux_drafter import Angles
from ..shared.beams import CacheReader, PrefixStates, Tensors

# Parts of Gemma 4 that no assistant has, and the values of their fields that leave them out.
WITHOUT = {"hidden_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False}
FULL, SLIDING = "full_attention", "sliding_attention"


class SharedLayersConfig(Gemma4TextConfig):
    """Configuration of layers without keys and values of their own.

    The class of transformers 5.23 wants some layers to have them, and refuses every assistant.
    """

    @property
    def kv_sharing_modes(self) -> list[str | None]:
        return ["reuse"] * self.num_hidden_layers


class Gemma4AssistantDraftConfig(DraftConfig):
    """Configuration of [`Gemma4AssistantDraftModel`]."""

    model_type = "longspec_gemma4_assistant"
    sizes: ClassVar[dict[str, tuple[int, int]]] = {"backbone_hidden_size": (0, 2**17), "num_centroids": (0, 2**24)}

    layer_config: dict[str, Any] | None = None  # the `text_config` of an assistant in transformers
    backbone_hidden_size: int = 0  # width of the target
    use_ordered_embeddings: bool = False  # whether the head computes the logits of the tokens of some clusters only
    num_centroids: int = 2048  # number of clusters
    centroid_intermediate_top_k: int = 32  # number of clusters whose tokens have logits

    @classmethod
    def from_target(cls, target: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> Self:
        """Return the configuration of one layer of each type that the target has, half as wide as the target."""
        text = text_config(target)
        layers = {kind: text.per_layer_config[index] for kind, index in layers_read(text).items()}
        full, sliding = layers[FULL], layers.get(SLIDING, layers[FULL])
        default_size = text.hidden_size // full.num_attention_heads
        layer_config = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size // 2,
            "intermediate_size": text.hidden_size,
            "num_hidden_layers": len(layers),
            "layer_types": [*layers],
            "num_attention_heads": full.num_attention_heads,
            "num_key_value_heads": getattr(full, "num_key_value_heads", None) or full.num_attention_heads,
            "head_dim": getattr(sliding, "head_dim", None) or default_size,
            "global_head_dim": getattr(full, "head_dim", None) or default_size,
            "sliding_window": getattr(text, "sliding_window", None) or Gemma4TextConfig.sliding_window,
        }
        values = {"layer_config": layer_config | WITHOUT, "backbone_hidden_size": text.hidden_size}
        return super().from_target(target, **(values | overrides))

    @property
    def layer(self) -> SharedLayersConfig:
        fields = WITHOUT | (self.layer_config or {})
        layers = fields.get("num_hidden_layers", 1)
        return SharedLayersConfig.from_dict(fields | {"num_kv_shared_layers": layers})

    @property
    def head_dim(self) -> int:
        """Size of the largest heads."""
        size = shape_of(self.layer, "head_dim")
        return int(max(size) if isinstance(size, list) else size)

    def check_types(self) -> None:
        super().check_types()
        fields = self.layer_config or {}
        check_sizes("layer_config in the draft's config.json", fields)
        with readable("layer_config in the draft's config.json", fields, SharedLayersConfig.from_dict):
            self.layer  # noqa: B018
        for name, value in WITHOUT.items():
            if fields.get(name, value) not in (None, value):
                raise ValueError(
                    f"layer_config has {name}={fields[name]!r}: expected {value!r}, as assistants of Gemma 4 have. "
                    "Use another draft."
                )
        if other := sorted(set(fields.get("layer_types") or ()) - {FULL, SLIDING}):
            raise ValueError(f"layer_config has layers of types {other}: expected {FULL} and {SLIDING}.")
        most = self.num_centroids
        if self.use_ordered_embeddings and not (
            most and self.vocab_size % most == 0 and 1 <= self.centroid_intermediate_top_k <= most
        ):
            raise ValueError(
                f"num_centroids={most}, centroid_intermediate_top_k={self.centroid_intermediate_top_k}: expected a "
                f"divisor of vocab_size={self.vocab_size}, as all clusters have the same size, and at most as many. "
                "Correct the draft's config.json."
            )


def layers_read(text: Any) -> dict[str, int]:
    """Return the target's layer whose keys and values are read, for each type of the draft's layers.

    It is the last layer of its type that has a cache of its own.
    """
    has_windows = SLIDING in (getattr(text, "layer_types", None) or ())
    return {kind: last_layer(text, kind) for kind in ((SLIDING, FULL) if has_windows else (FULL,))}


class Gemma4AssistantDrafter(CacheReader):
    """Draft a tree of fixed size."""

    wants_hidden = True

    def __init__(self, binding: Binding, draft: Any):
        super().__init__(binding, draft)
        target, self.rings = binding.target.model, []
        self.ends, self.norm = TargetEnds(target), final_norm_of(target)
        self.kinds, self.read_layers = zip(*layers_read(binding.target.config).items(), strict=True)
        self.angles: Angles = binding.part((Angles, self.device), lambda: Angles(draft.rotary_embedding(self.device)))
        size = binding.cache.batch_size, 1, draft.config.backbone_hidden_size
        # output of the target's final norm at the last committed tokens
        self.state = torch.zeros(size, dtype=self.dtype, device=self.device)

    @property
    def state_bytes(self) -> int:
        return self.state.nbytes

    @property
    def _holder(self) -> Any:
        return self.binding.cache if self.draft is self._owner else self.draft

    def row_states(self) -> Sequence[torch.Tensor]:
        return (self.state,)

    def observe(self, verification: Verification) -> None:
        assert verification.hidden is not None
        path, counts = verification.path, verification.num_nodes
        self.state = self.run(self.newest, verification.hidden, path, counts.on(path.device), self.state)

    def newest(
        self, hidden: torch.Tensor, path: torch.Tensor, counts: torch.Tensor, before: torch.Tensor
    ) -> torch.Tensor:
        """Return the states of the last kept nodes; rows that kept none keep their earlier state."""
        last = last_of(path, counts).to(hidden.device)[:, None, None]
        states = self.norm(hidden.gather(1, last.expand(-1, 1, hidden.shape[2]))).to(before)
        return torch.where(counts.to(before.device)[:, None, None] > 0, states, before)

    def inputs(self, root: torch.Tensor) -> Tensors:
        """Return the roots `(B,)`, and the states before them."""
        return root, self.state

    def begin(self, inputs: Tensors, prefix: PrefixStates) -> Tensors:
        """Return the states before the roots, and the position of all nodes `(B, 1)`."""
        return inputs[1], prefix.lengths.on(self.device)[:, None]

    def level_inputs(self, beam: Beam, depth: int, shared: Tensors, states: Sequence[torch.Tensor]) -> Tensors:
        before, positions = shared
        return beam.tokens, self.of_parents(beam, states[0]) if depth else before, positions

    def level(self, changing: Tensors, depth: int, prefix: PrefixStates) -> Tensors:
        """Return logits `(B, n, V)` after the newest level of a beam, and states `(B, n, hidden)`."""
        tokens, states, positions = changing
        embedded = self.ends.embed(tokens).to(self.device, self.dtype)
        used = slice(prefix.lengths.longest)
        layers = zip(self.kinds, prefix.layers, strict=True)
        shared = {kind: (keys[:, :, used], values[:, :, used]) for kind, (keys, values) in layers}
        return self.draft(embedded, states, positions, self.angles.rotary, shared, prefix.lengths)


# Keys and values `(B, K, S, D)` of the target, by the type of the draft's layers that read them.
SharedStates = dict[str, tuple[torch.Tensor, torch.Tensor]]


def gemma4() -> Any:
    """Return transformers' own module of the layers, which loads much that other drafts do not need."""
    from transformers.models.gemma4 import modeling_gemma4

    return modeling_gemma4


@dataclass
class PrefixContext(StepContext):
    """Attention to the committed tokens alone, which all queries of a row see from the same position."""

    def state(self, layer: LayerAttention) -> AttentionState:
        where = layer.key.device
        moved = layer._replace(query=layer.query.to(where))
        outputs, lse = moved.with_sinks(moved.attend_to_prefix(self.lengths, self.positions.to(where)))
        return outputs.to(layer.query.device), lse


class Gemma4AssistantDraftModel(DraftModel):
    """An assistant of Gemma 4, whose layers have no keys and values: each reads those of the target's last layer of its
    type, full or sliding.

    An input joins the embedding of a token with the output of the target's final norm at the token before, or with the
    draft's own output there. All tokens are drafted from the position after the prefix, and nothing is written to a
    cache. So the draft keeps one state per row, and a tree costs no more than its nodes.

    ```python
    draft = Gemma4AssistantDraftModel.from_pretrained("google/gemma-4-E2B-it-assistant", target=target)
    target.generate(**inputs, assistant_model=draft)
    ```

    The layers are those of transformers, and the rules those of its `gemma4_assistant`.
    """

    config_class = Gemma4AssistantDraftConfig
    drafter_class = Gemma4AssistantDrafter
    _no_split_modules = ["Gemma4TextDecoderLayer"]
    settings: ClassVar[dict[str, Any]] = {"tree_widths": WIDTHS}

    def __init__(self, config: Gemma4AssistantDraftConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        layer, parts = config.layer, gemma4()
        layer._attn_implementation = AUTOMATIC
        size, width = layer.hidden_size, config.backbone_hidden_size
        self.pre_projection = nn.Linear(2 * width, size, bias=False)
        self.layers = nn.ModuleList(parts.Gemma4TextDecoderLayer(layer, i) for i in range(layer.num_hidden_layers))
        self.norm = parts.Gemma4RMSNorm(size, eps=layer.rms_norm_eps)
        self.post_projection = nn.Linear(size, width, bias=False)
        self.embed_tokens = nn.Embedding(layer.vocab_size, size)  # the rows of the head
        self.centroids = nn.Linear(size, config.num_centroids, bias=False) if config.use_ordered_embeddings else None
        # Tokens, one cluster after another.
        self.register_buffer("token_ordering", torch.arange(layer.vocab_size) if self.centroids is not None else None)
        # A query also sees the token `sliding_window` + 1 positions before it, as the target has no key for its own.
        self._kinds: tuple[str, ...] = tuple(layer.layer_types)
        windows = (layer.sliding_window + 2 if kind == SLIDING else None for kind in self._kinds)
        self._windows: tuple[int | None, ...] = tuple(windows)
        self.post_init()

    @classmethod
    def check_structure(cls, target: PreTrainedModel) -> None:
        decoder_of(target)
        final_norm_of(target)

    def rotary_embedding(self, device: torch.device) -> Any:
        """Return the rotary embedding of the draft, a function of a tensor, positions and the type of a layer."""
        return gemma4().Gemma4TextRotaryEmbedding(self.config.layer).to(device)

    def forward(
        self,
        embedded: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        rotary: Any,
        shared_kv_states: SharedStates,
        lengths: SeqLens,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits `(B, n, vocab)` after n tokens, and their states `(B, n, target's hidden)`.

        Args:
            embedded (`torch.Tensor` of shape `(B, n, target's hidden)`): The target's embeddings of the tokens.
            states (`torch.Tensor` of shape `(B, n, target's hidden)`): State of the token before each of them.
            positions (`torch.LongTensor` of shape `(B, 1)`): The position after the prefix.
            rotary (`Callable`): See `rotary_embedding`.
            shared_kv_states (`dict`): Keys and values of the target by the type of the layers, see `SharedStates`.
            lengths ([`SeqLens`]): Number of entries of each row that are committed.
        """
        hidden = self.pre_projection(torch.cat([embedded, states], -1))
        angles = {kind: rotary(hidden, positions, kind) for kind in shared_kv_states}
        context = PrefixContext(lengths, positions.expand(-1, hidden.shape[1]), windows=self._windows)
        for layer, kind in zip(self.layers, self._kinds, strict=True):
            more = {"position_embeddings": angles[kind], "attention_mask": None, "tree": context}
            hidden = layer(hidden, shared_kv_states=shared_kv_states, **more)
        hidden = self.norm(hidden)
        return self.logits(hidden), self.post_projection(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `(B, n, vocab)` of normalised states; -inf for tokens of clusters that are not among the best.

        Transformers gives these the smallest of the other logits, less 1. The most likely token is the same.
        """
        rows = self.embed_tokens.weight
        if self.centroids is None:
            return nn.functional.linear(hidden, rows)
        best = self.centroids(hidden).topk(self.config.centroid_intermediate_top_k, dim=-1).indices
        tokens = self.token_ordering.view(self.config.num_centroids, -1)[best].flatten(-2)
        logits = (rows[tokens] @ hidden[..., None]).squeeze(-1)
        return logits.new_full((*hidden.shape[:2], len(rows)), -torch.inf).scatter(-1, tokens, logits)

    def check_settings(self, target: TargetView) -> None:
        """Refuse targets of other sizes, and those whose keys and values the draft cannot read."""
        refuse_compiled_forward(target.model)
        text, layer, read = target.config, self.config.layer, layers_read(target.config)
        sizes = {"backbone_hidden_size": (self.config.backbone_hidden_size, text.hidden_size)}
        refuse_other_sizes(sizes | {"vocab_size": (layer.vocab_size, text.vocab_size)})
        if target.has_latent_cache:
            raise ValueError(
                "this target caches one latent for all heads (MLA), to which an assistant of Gemma 4 cannot attend. "
                "Use SpecAttnDraftModel."
            )
        if target.ranks is not None:
            raise ValueError("an assistant of Gemma 4 does not run under tensor parallelism. Use SpecAttnDraftModel.")
        for index, kind in enumerate(layer.layer_types):
            if kind not in read:
                raise ValueError(f"the draft reads a layer of type {kind}, and the target has none. Use another draft.")
            attention_of(decoder_of(target.model), read[kind])
            own, of_target = layer.per_layer_config[index], text.per_layer_config[read[kind]]
            width = getattr(of_target, "head_dim", None) or text.hidden_size // of_target.num_attention_heads
            refuse_other_sizes({"head_dim": (own.head_dim, getattr(of_target, "v_head_dim", None) or width)})
            heads = getattr(of_target, "num_key_value_heads", None) or of_target.num_attention_heads
            if layer.num_attention_heads % heads:
                raise ValueError(
                    f"the draft has {layer.num_attention_heads} query heads, expected a multiple of the target's "
                    f"{heads} key/value heads. Pass the target that the draft was trained for."
                )
