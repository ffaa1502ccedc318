"""What drafts share that read auxiliary hidden states of the target: EAGLE-3, P-EAGLE, DFlash and its kin.

They read the target's residual stream before some of its layers, once per committed token. Such an entry has keys and
values of the draft's own, in a ring for each layer, so that memory does not grow with the context.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...generation.target import TargetView
from ...generation.target_modules import PartOfHead, final_norm_of, layer_at, refuse_compiled_forward
from ..configuration_base import refuse_other_sizes, text_config
from ..settings import Setting
from .vocabulary import VocabularyConfig, VocabularyDraftModel

# The value of `window` that stands for the number of positions that the draft was trained with.
TRAINED = "trained"
# Rotary embeddings whose frequencies do not change with the length of the text: a ring holds rotated keys.
ROPE_TYPES = ("default", "linear", "yarn", "llama3")


class AuxConfig(VocabularyConfig):
    """Configuration of a draft that reads auxiliary hidden states, the inputs of some of the target's layers."""

    model_type = "longspec_aux"
    sizes: ClassVar[dict[str, tuple[int, int]]] = VocabularyConfig.sizes | {
        "target_hidden_size": (0, 2**17),
        "num_aux_hidden_states": (1, 2**12),
    }

    hidden_size: int = 0  # width of the draft
    target_hidden_size: int = 0  # width of the target's residual stream
    num_aux_hidden_states: int = 3  # number of layers whose inputs are read
    # These layers; their number stands for the final norm. The input of layer j is transformers' `hidden_states[j]`.
    target_layer_ids: list[int] | tuple[int, ...] = ()
    intermediate_size: int = 0  # width of the SwiGLU
    num_hidden_layers: int = 1
    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 0
    hidden_act: str = "silu"  # activation of the SwiGLU
    rms_norm_eps: float = 1e-6  # epsilon of all norms
    initializer_range: float = 0.02  # standard deviation of the initial weights
    attention_bias: bool = False  # whether the projections of the attention have a bias
    mlp_bias: bool = False  # whether the projections of the SwiGLU have a bias
    qk_norm: bool = False  # whether queries and keys are normalised before they are rotated
    own_embedding: bool = False  # whether the draft has an embedding of its own, in place of the target's
    own_head: bool = False  # whether the draft has a language-model head of its own, in place of the target's
    # Token of the entries whose token is not known yet, of drafts that draft several tokens in one forward.
    mask_token_id: int | None = None
    rope_parameters: dict[str, Any] | None = None  # rotary embedding of the draft, independent of the target's
    max_position_embeddings: int = 2048  # as in the checkpoint; no limit of positions
    layer_windows: list[Any] | tuple[Any, ...] | None = None  # windows that the layers were trained with
    trained_max_length: int = 2048  # number of positions that a query saw in training, the default of `window`

    @classmethod
    def from_target(cls, target: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> Self:
        """Return the configuration of a one-layer draft of the target's width, with its number and size of heads."""
        text = text_config(target)
        last = text.per_layer_config[text.num_hidden_layers - 1]  # layers may differ (gemma4)
        heads = last.num_attention_heads
        values = {
            "hidden_size": text.hidden_size,
            "target_hidden_size": text.hidden_size,
            "target_layer_ids": default_layer_ids(text.num_hidden_layers),
            "intermediate_size": 8 * text.hidden_size // 3,  # of a gated layer, arXiv:2002.05202, section 3.2
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(last, "num_key_value_heads", None) or heads,
            "head_dim": getattr(last, "head_dim", None) or text.hidden_size // heads,
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or cls.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }
        return super().from_target(target, **(values | overrides))

    @property
    def window_of_layers(self) -> list[int | None]:
        """Window that each layer was trained with; `None` for those that saw everything."""
        return list(self.layer_windows or [None] * self.num_hidden_layers)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        kind, windows = (self.rope_parameters or {}).get("rope_type", "default"), self.window_of_layers
        if kind not in ROPE_TYPES:
            yield f"rope_type={kind!r}: expected one of {', '.join(ROPE_TYPES)}, whose frequencies do not change"
        if self.num_attention_heads % self.num_key_value_heads:
            yield f"num_attention_heads={self.num_attention_heads}: expected a multiple of num_key_value_heads"
        if len(windows) != self.num_hidden_layers:
            yield f"layer_windows={windows!r}: expected an entry for each of the {self.num_hidden_layers} layers"
        if (self.mask_token_id or 0) >= max(1, self.vocab_size):
            yield f"mask_token_id={self.mask_token_id}: expected a row of the embedding, below {self.vocab_size}"


def default_layer_ids(num_layers: int) -> list[int]:
    """Return the layers of the target that EAGLE-3 reads if nothing else is said: an early, the middle, a late one.

    >>> default_layer_ids(32), default_layer_ids(3)
    ([2, 16, 29], [2, 1, 0])
    """
    return [min(2, num_layers), num_layers // 2, max(0, num_layers - 3)]


class AuxDraftModel(VocabularyDraftModel):
    """Base of the drafts that read auxiliary hidden states.

    Subclasses build their layers and call `add_ends`.
    """

    settings: ClassVar[dict[str, Any]] = {
        "window": Setting(
            TRAINED,
            "Number of last entries that are kept. `trained` is the length that the draft was trained with, and `None` "
            "keeps all.",
            int,
            choices=(TRAINED,),
        ),
        "sinks": Setting(4, "Number of first entries that are kept in addition to the window.", int, least=0),
        "rope_theta": Setting(None, "Base of the draft's rotary embedding, in place of that in config.json.", float),
        "target_layer_ids": Setting(
            None, "Layers whose inputs are read, in place of those in config.json; j means `hidden_states[j]`."
        ),
    }

    def add_ends(self, config: Any) -> None:
        """Add final norm, embedding, head and the map of a reduced vocabulary, and initialise all weights."""
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embedding else None
        size = config.draft_vocab_size or config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, size, bias=False) if config.own_head else None
        self.add_vocabulary(config)
        self.post_init()

    @classmethod
    def from_target(cls, target: PreTrainedModel, **overrides: Any) -> Self:
        """Return an untrained draft for `target` in eval mode at its `place`, with copies of embedding and head."""
        draft = super().from_target(target, **overrides)
        draft.copy_from(target)
        return draft

    @classmethod
    def check_structure(cls, target: PreTrainedModel) -> None:
        final_norm_of(target)

    @torch.no_grad()
    def copy_from(self, target: PreTrainedModel) -> None:
        """Copy the target's embedding and the rows of its head into those that the draft has of its own.

        Raises:
            ValueError: If the draft has another width, or the target's weights are not in memory.
        """
        for part, module, what in (
            (self.embed_tokens, target.get_input_embeddings(), "own_embedding"),
            (self.lm_head, target.get_output_embeddings(), "own_head"),
        ):
            if part is None:
                continue
            if module.weight.is_meta or module.weight.shape[1] != part.weight.shape[1]:
                raise ValueError(
                    f"{what}=True: cannot copy the target's rows, which have shape {tuple(module.weight.shape)} on "
                    f"{module.weight.device}. Load the target without offloading, with the width of the draft."
                )
            ids = self.token_ids.to(module.weight.device)
            rows = module.weight if part is self.embed_tokens else module.weight[ids]
            part.weight.copy_(rows)

    def embed(self, tokens: torch.Tensor, target: PreTrainedModel | None = None) -> torch.Tensor:
        """Return embeddings `(B, T, hidden)` of target ids `(B, T)`, without a factor that the target applies.

        Raises:
            ValueError: If the draft has no embedding of its own, and no target is given.
        """
        if self.embed_tokens is not None:
            return self.embed_tokens(tokens)
        module = _part_of(target, "input")
        embedded = module(tokens.to(module.weight.device) if module.weight.device.type != "meta" else tokens)
        scale = getattr(module, "embed_scale", None)  # of gemma, whose table the drafts read as it is
        return (embedded if scale is None else embedded / scale).to(self.norm.weight)

    def logits(
        self, outputs: torch.Tensor, target: PreTrainedModel | None = None, part: PartOfHead | None = None
    ) -> torch.Tensor:
        """Return logits `(..., draft vocabulary)` of normalised outputs `(..., hidden)`.

        `part` has the rows of the target's head for the draft's tokens. Without it, all rows are read.

        Raises:
            ValueError: If the draft has no head of its own, and no target is given.
        """
        if self.lm_head is not None:
            return self.lm_head(outputs)
        if part is not None and part.weight is not None:
            return nn.functional.linear(outputs, part.weight, part.bias)
        head = _part_of(target, "output")
        logits = head(outputs)
        return logits if self.d2t is None else logits[..., self.token_ids.to(logits.device)]

    def rotary_embedding(self, device: torch.device) -> nn.Module:
        """Return the rotary embedding of the draft, a function of a tensor (for its dtype) and positions `(B, T)`."""
        theta = self.effective("rope_theta")
        config = copy.deepcopy(self.config)
        if theta is not None:
            config.rope_parameters = (config.rope_parameters or {}) | {"rope_theta": float(theta)}
        return LlamaRotaryEmbedding(config).to(device)

    def effective(self, name: str) -> Any:
        """Return the value of a setting, or if it is `None` that of the config."""
        value = getattr(self.generation_config, name, None)
        return getattr(self.config, name, None) if value is None else value

    @property
    def prompt_tokens(self) -> int:
        """Number of last tokens of a text whose entries are kept; practically all without a window."""
        window: Any = getattr(self.generation_config, "window", TRAINED)
        window = self.config.trained_max_length if window == TRAINED else window
        return sys.maxsize if window is None else int(window)

    def layers_of(self, text: Any) -> tuple[int, ...]:
        """Return the layers of a target with this text config whose inputs are read.

        Raises:
            ValueError: If they are not as many as the draft reads.
        """
        layers = self.effective("target_layer_ids") or (
            default_layer_ids(text.num_hidden_layers) if self.config.num_aux_hidden_states == 3 else []
        )
        count = self.config.num_aux_hidden_states
        if not isinstance(layers, list | tuple) or len(layers) != count or not all(type(j) is int for j in layers):
            raise ValueError(
                f"target_layer_ids={layers!r}: expected a list of {count} integers (num_aux_hidden_states). The input "
                "of layer j of the target is its hidden_states[j]. Set draft.generation_config.target_layer_ids."
            )
        return tuple(layers)

    def check_settings(self, target: TargetView) -> None:
        refuse_compiled_forward(target.model)
        sizes = {"vocab_size": target.config.vocab_size, "target_hidden_size": target.config.hidden_size}
        refuse_other_sizes({name: (getattr(self.config, name), size) for name, size in sizes.items()})
        if self.config.hidden_size != target.config.hidden_size and not (self.embed_tokens and self.lm_head):
            raise ValueError(
                f"the draft has hidden_size={self.config.hidden_size} and no embedding or head of its own, but the "
                f"target's have {target.config.hidden_size}. Pass the target that the draft was trained for."
            )
        for layer in self.layers_of(target.config):
            layer_at(target.model, layer)


def _part_of(target: Any, part: str) -> Any:
    found = None if target is None else getattr(target, f"get_{part}_embeddings")()
    if found is None:
        name = {"input": "embedding", "output": "head"}[part]
        raise ValueError(f"this draft has no {name} of its own and uses the target's: pass target=.")
    return found


Rotary = tuple[torch.Tensor, torch.Tensor]
# From the index of a layer, its query, key and value to the attention output.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    """Projections of an attention."""

    def __init__(self, config: AuxConfig, width: int):
        super().__init__()
        self.head_dim, bias = config.head_dim, config.attention_bias
        heads, kv_heads = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(width, heads, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads, bias=bias)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def project(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries `(B, H, T, D)`, keys and values `(B, K, T, D)`, not rotated."""
        query = self.q_proj(normed).unflatten(-1, (-1, self.head_dim))
        query = self.q_norm(query) if self.qk_norm else query
        return query.transpose(1, 2), *self.project_entries(normed)

    def project_entries(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `(B, K, T, D)`, not rotated."""
        key, value = (part(states).unflatten(-1, (-1, self.head_dim)) for part in (self.k_proj, self.v_proj))
        key = self.k_norm(key) if self.qk_norm else key
        return key.transpose(1, 2), value.transpose(1, 2)

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """Project attention output `(B, H, T, D)` to `(B, T, hidden)`."""
        return self.o_proj(attended.transpose(1, 2).flatten(2))


T = TypeVar("T")


def up_to(step: int, kept: list[T], new: T) -> list[T]:
    """Return what was kept of the steps before, and this step's, which is kept the first time."""
    if len(kept) == step:
        kept.append(new)
    return [*kept[:step], new]
