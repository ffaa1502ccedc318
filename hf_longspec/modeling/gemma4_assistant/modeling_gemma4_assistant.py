"""Gemma4AssistantDraftModel: a few layers without keys of their own attend to the target's cache from one position."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ...attention_backends.contexts import LayerAttention, StepContext
from ...attention_backends.interface import AUTOMATIC
from ...attention_backends.lengths import SeqLens
from ...attention_backends.registry import AttentionState
from ...generation.target import TargetView
from ...generation.target_modules import attention_of, decoder_of, final_norm_of, refuse_compiled_forward
from ..base import DraftModel
from ..configuration_base import refuse_other_sizes
from ..settings import WIDTHS
from .configuration_gemma4_assistant import SLIDING, Gemma4AssistantDraftConfig, layers_read
from .generation_gemma4_assistant import Gemma4AssistantDrafter

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
    reads_published = True
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
