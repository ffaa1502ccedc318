"""Eagle3DraftModel: one decoder layer on states of three layers of the target, run once per drafted token."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb

from ...generation.drafter import Binding
from ..settings import WIDTHS, Setting
from ..shared.aux_drafter import AuxDrafter
from ..shared.aux_hidden_states import Attend, Attention, AuxConfig, AuxDraftModel, Rotary, up_to
from .generation_eagle3 import Eagle3Drafter, ParallelEagle3Drafter


class Eagle3Config(AuxConfig):
    """Configuration of [`Eagle3DraftModel`]. The first layer reads an embedding with each hidden state.

    A P-EAGLE draft is one with a `mask_token_id`.
    """

    model_type = "longspec_eagle3"

    fc_bias: bool = False  # whether the projection of the auxiliary hidden states has a bias
    norm_before_residual: bool = False  # whether the residual of the first layer is the normalised state
    norm_before_fc: bool = False  # whether the auxiliary hidden states are normalised together
    fc_norm: bool = False  # whether each of them is normalised alone
    norm_output: bool = False  # whether the next step reads the normalised state instead of the residual stream
    training_steps: int = 3  # number of chained steps in training; of a P-EAGLE draft, of levels

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.norm_before_fc and self.fc_norm:
            yield "norm_before_fc=True and fc_norm=True: auxiliary hidden states are normalised only once"


class Eagle3Layer(GradientCheckpointingLayer):
    """One layer: attention and SwiGLU. The first one attends with the normalised embedding and state concatenated."""

    def __init__(self, config: Eagle3Config, index: int):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.norm_before_residual = config.norm_before_residual
        if index == 0:
            self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.self_attn = Attention(config, 2 * size if index == 0 else size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        states: torch.Tensor,
        embedded: torch.Tensor | None,
        angles: Rotary,
        attend: Attend,
        query_places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the residual stream after this layer; see [`Eagle3DraftModel.run`]."""
        residual = states
        if embedded is None:
            normed = self.input_layernorm(states)
        else:
            normed = self.hidden_norm(states)
            residual = normed if self.norm_before_residual else states
            normed = torch.cat([self.input_layernorm(embedded), normed], -1)
        query, key, value = self.self_attn.project(normed)
        query, key = apply_rotary_pos_emb(query, key, *angles)
        if query_places is not None:
            residual = residual.gather(1, query_places[..., None].expand(-1, -1, residual.shape[-1]))
            columns = query_places[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[-1])
            query = query.gather(2, columns)
        states = residual + self.self_attn.output(attend(self.index, query, key, value))
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3DraftModel(AuxDraftModel):
    """A draft of one decoder layer, which reads the target's residual stream at three places.

    An entry joins these auxiliary hidden states of one token with the embedding of the next. Its keys and values are
    the draft's own; with one layer they depend on the entry alone, so that a window over the last entries is exact.

    ```python
    draft = Eagle3DraftModel.from_pretrained("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", target=target)
    target.generate(**inputs, assistant_model=draft)
    ```

    Source: EAGLE-3, https://huggingface.co/papers/2503.01840.
    """

    config_class = Eagle3Config
    _no_split_modules = ["Eagle3Layer"]
    settings: ClassVar[dict[str, Any]] = {
        "tree_widths": WIDTHS,  # 16 nodes with the root, which is a whole tile of the kernels
        "norm_output": Setting(
            None, "Whether the next level reads normalised states, in place of what config.json says.", bool
        ),
    }

    def __init__(self, config: Eagle3Config, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        width = config.num_aux_hidden_states * config.target_hidden_size
        eps = config.rms_norm_eps
        self.fc = nn.Linear(width, config.hidden_size, bias=config.fc_bias)
        self.input_norm = nn.RMSNorm(width, eps=eps) if config.norm_before_fc else None
        norms = [nn.RMSNorm(config.target_hidden_size, eps=eps) for _ in range(config.num_aux_hidden_states)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.layers = nn.ModuleList(Eagle3Layer(config, index) for index in range(config.num_hidden_layers))
        parallel = config.mask_token_id is not None
        # not zero, where the gradient of a norm is large
        mask_hidden = config.initializer_range * torch.randn(1, 1, width) if parallel else None
        self.mask_hidden = None if mask_hidden is None else nn.Parameter(mask_hidden)
        self.add_ends(config)

    def forward(
        self,
        aux_hidden_states: torch.Tensor,
        tokens: torch.LongTensor,
        steps: int = 1,
        target: PreTrainedModel | None = None,
        window: int | None = None,
        sinks: int = 0,
        score: Callable[[int, torch.Tensor], Any] | None = None,
    ) -> list[Any]:
        """Return the logits of chained steps over whole texts, in which every drafted token is that of the text.

        Steps after the first of a P-EAGLE draft read a mask instead of a token and of the states of the step before.

        Args:
            aux_hidden_states (`torch.Tensor` of shape `(B, T, num_aux_hidden_states * target_hidden_size)`): Inputs of
                the target's layers `target_layer_ids` at each of the T entries, joined.
            tokens (`torch.LongTensor` of shape `(B, T)`): Token of each entry, the one after the token of the states.
            steps (`int`, *optional*, defaults to 1): Number of chained steps.
            target (`PreTrainedModel`, *optional*): The target, for drafts without an embedding or head of their own.
            window (`int`, *optional*): Number of entries of the text that each place attends to, in layers that were
                not trained with a window of their own. All by default.
            sinks (`int`, *optional*, defaults to 0): First entries that all places attend to in addition to the window.
            score (`Callable`, *optional*): Function of the step and of its outputs `(B, T - s, hidden)`, for training.

        Returns:
            `list[torch.Tensor]`: For each step s, logits `(B, T - s, draft vocabulary)`, or the result of `score`. Row
            p follows the entries 0 to p and s drafted tokens, those of entries p + 1 to p + s.
        """
        rotary = self.rotary_embedding(tokens.device)
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        embedded, states = self.embed(tokens, target), self.features(aux_hidden_states.to(self.dtype))
        logits: list[Any] = []
        # layers trained with a window saw no sinks besides
        parallel = self.mask_hidden is not None
        spans = [(size, 0, parallel) if size else (window, sinks, False) for size in self.config.window_of_layers]
        attention = ChainedAttention(spans)
        for step in range(steps):
            count = length - step
            if step == 1 and parallel:
                masks = self.with_mask_rows(aux_hidden_states[:, :0].to(self.dtype), tokens[:, :0], length, target)
            if step and parallel:
                embedded, states = masks
            angles = rotary(states, positions[:, step:])
            outputs, states = self.run(states[:, :count], embedded[:, step:], angles, partial(attention, step))
            logits.append(self.logits(outputs, target) if score is None else score(step, outputs))
        return logits

    def features(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Project auxiliary hidden states `(B, T, layers * hidden)` to the width of the draft, `(B, T, hidden)`."""
        if self.input_norm is not None:
            aux_hidden_states = self.input_norm(aux_hidden_states)
        if self.fc_norm is not None:
            parts = aux_hidden_states.chunk(self.config.num_aux_hidden_states, -1)
            aux_hidden_states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(aux_hidden_states)

    def run(
        self,
        states: torch.Tensor,
        embedded: torch.Tensor,
        angles: Rotary,
        attend: Attend,
        query_places: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers.

        Args:
            states (`torch.Tensor` of shape `(B, T, hidden)`): Features of the target, or the parents' states.
            embedded (`torch.Tensor` of shape `(B, T, hidden)`): Embeddings of the entries' tokens.
            angles (`tuple[torch.Tensor, torch.Tensor]`): Cosines and sines of the entries' positions.
            attend (`Callable`): Attention of a layer, from its index, query `(B, H, n, D)`, key and value
                `(B, K, T, D)` to `(B, H, n, D)`.
            query_places (`torch.LongTensor` of shape `(B, n)`, *optional*): Entries to compute. All by default.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Normalised outputs `(B, n, hidden)`, from which logits are computed,
            and the states `(B, n, hidden)` that the next step reads.
        """
        for index, layer in enumerate(self.layers):
            is_last = index == len(self.layers) - 1
            states = layer(states, embedded if index == 0 else None, angles, attend, query_places if is_last else None)
        outputs = self.norm(states)
        return outputs, outputs if self.effective("norm_output") else states

    def with_mask_rows(
        self, aux_hidden_states: torch.Tensor, tokens: torch.Tensor, count: int, target: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embeddings and features `(B, T + count, hidden)` of T entries, and of the rows that P-EAGLE adds."""
        masks = tokens.new_full((len(tokens), count), self.config.mask_token_id)
        assert self.mask_hidden is not None
        hidden = self.mask_hidden.expand(len(tokens), count, -1)
        embedded = self.embed(torch.cat([tokens, masks], 1), target)
        return embedded, self.features(torch.cat([aux_hidden_states, hidden], 1))

    def make_drafter(self, binding: Binding) -> AuxDrafter:
        return (Eagle3Drafter if self.mask_hidden is None else ParallelEagle3Drafter)(binding, self)


class ChainedAttention:
    """Attention of chained steps over whole texts.

    Place p of step s attends to the entries of the text up to p, and to its own entries of the steps 1 to s. This is
    the training-time test of EAGLE-3, https://huggingface.co/papers/2503.01840, section 3.2.

    A step of a layer may run again for its gradient (activation checkpointing), and then attends to the same.

    Args:
        spans (`Sequence[tuple[int | None, int, bool]]`): Window and sinks of each layer, and whether the window moves
            with the steps. Places attend to the last `window` entries up to p, or in step s up to p + s, and to the
            first `sinks` entries. Entry p never leaves a window.
    """

    def __init__(self, spans: Sequence[tuple[int | None, int, bool]]):
        self.spans = spans
        self._keys: list[list[torch.Tensor]] = [[] for _ in spans]
        self._values: list[list[torch.Tensor]] = [[] for _ in spans]

    def __call__(
        self, step: int, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention output `(B, H, n, D)` of a step in a layer."""
        count, groups = query.shape[2], query.shape[1] // key.shape[1]
        keys, values = (
            up_to(step, kept[index], part.repeat_interleave(groups, 1))
            for kept, part in ((self._keys, key), (self._values, value))
        )
        mask = self._mask(step, index, count, keys[0].shape[2], query.device)
        scores = (query @ keys[0].transpose(2, 3)).masked_fill(~mask, torch.finfo(query.dtype).min)
        chain_scores = [(query * chained[:, :, :count]).sum(-1, keepdim=True) for chained in keys[1:]]
        scores = torch.cat([scores, *chain_scores], -1).float() * query.shape[-1] ** -0.5
        weights, length = scores.softmax(-1).to(query.dtype), keys[0].shape[2]
        out = weights[..., :length] @ values[0]
        for chained, weight in zip(values[1:], weights[..., length:].unbind(-1), strict=True):
            out = out + weight[..., None] * chained[:, :, :count]
        return out

    def _mask(self, step: int, index: int, count: int, length: int, device: torch.device) -> torch.Tensor:
        places, entries = torch.arange(count, device=device)[:, None], torch.arange(length, device=device)
        mask = entries <= places
        window, sinks, moves = self.spans[index]
        if window is not None:
            ends = places + step if moves else places
            mask = mask & ((entries > ends - window) | (entries < sinks) | (entries == places))
        return mask
