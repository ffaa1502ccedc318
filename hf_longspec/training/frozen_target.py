"""The frozen target in training: its states on the rows, computed or read from files, and losses through its head.

A loss never holds the logits of a whole row. The gradient with respect to the hidden states is computed together with
it, chunk by chunk: the logits of a chunk are computed once and freed before the next chunk.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from ..generation.cache import CACHE_NAME, Rows, SpeculativeCache, layers_of
from ..generation.special_cases.recurrences import ignores_earlier_states
from ..generation.target_modules import (
    LOGIT_DIVISORS,
    LOGIT_FACTORS,
    LayerInputs,
    PartOfHead,
    TargetEnds,
    TargetParts,
)

try:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
except ImportError:
    LigerFusedLinearCrossEntropyLoss = None

FACTS_FILE = "store.json"
# States that a store may hold, and the dimension of a row's tensor that counts its tokens.
STATES = {"position_ids": 0, "keys": 1, "values": 1, "hidden": 0}

Row = dict[str, torch.Tensor]
Head = Callable[[torch.Tensor], torch.Tensor]
# Takes the logits of some tokens. Returns the loss of each, its gradient with respect to the logits, and the rank of
# the correct token.
Score = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
# Takes a chunk and returns its score function. What all levels are compared with is computed once per chunk.
Objective = Callable[[slice, torch.dtype], Score]

# Liger's kernel returns no logits. Acceptance is then estimated from at most this many tokens of a batch.
SAMPLED_PLACES = 1024


@dataclass
class TargetStates:
    """Keys, values and hidden states of a target on whole rows."""

    keys: torch.Tensor  # `(B, K, L, D)`: keys of the KV layer, as in the target's cache
    values: torch.Tensor  # `(B, K, L, D)`: values of the KV layer
    hidden: torch.Tensor | None  # `(B, L, hidden)`: input of the target's language-model head


class TargetPass:
    """Runs the frozen target over whole rows, without its head, and keeps the keys and values of one layer.

    A forward has `chunk_size` tokens, by default a whole row. Between chunks the cache of every layer is in memory,
    after the last chunk only that of the KV layer. The final hidden states are returned if `hidden`.
    """

    def __init__(self, parts: TargetParts, chunk_size: int | None = None, hidden: bool = False):
        self.parts = parts
        self.chunk_size = chunk_size
        refuse_chunks(parts.model, chunk_size)
        self.hidden = hidden

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> TargetStates:
        """Return the states for `input_ids` at `position_ids`, both `(B, L)`. Padding must be on the right."""
        length, decoder = input_ids.shape[1], self.parts.decoder
        if self.chunk_size is None or self.chunk_size >= length:
            cache = OneLayerCache(self.parts.config, self.parts.kv_layer)
            (output,) = forwards(decoder, input_ids, position_ids, cache, length)
            return TargetStates(cache.keys, cache.values, output.last_hidden_state if self.hidden else None)
        whole = SpeculativeCache(self.parts.config, len(input_ids), length, tree_slots=1)
        outputs = forwards(decoder, input_ids, position_ids, whole, self.chunk_size)
        hidden = [output.last_hidden_state for output in outputs]
        layer = whole.layers[self.parts.kv_layer]
        keys, values = layer.keys[:, :, :length], layer.values[:, :, :length]
        return TargetStates(keys, values, torch.cat(hidden, 1) if self.hidden else None)


class HiddenPass:
    """Runs the frozen target over whole rows, without its head, and keeps the input of its final norm, or of layers.

    Args:
        layers (`bool` or `tuple[int, ...]`, *optional*, defaults to `True`): Layers whose inputs are concatenated;
            `True` is the final norm.
    """

    def __init__(self, target: PreTrainedModel, chunk_size: int | None = None, layers: bool | tuple[int, ...] = True):
        self.target = target
        self.layers = layers
        self.config = target.config.get_text_config(decoder=True)
        self.chunk_size = chunk_size
        refuse_chunks(target, chunk_size)

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return `(B, L, hidden)` for `input_ids` `(B, L)` at positions 0, 1, 2, ... Padding must be on the right."""
        length, decoder = input_ids.shape[1], self.target.get_decoder()
        with LayerInputs(self.target, self.layers) as inputs:
            if self.chunk_size is None or self.chunk_size >= length:
                decoder(input_ids=input_ids, use_cache=False)
                return inputs.hidden
            cache = SpeculativeCache(self.config, len(input_ids), length, tree_slots=1)
            positions = torch.arange(length, device=input_ids.device).expand_as(input_ids)
            chunks = forwards(decoder, input_ids, positions, cache, self.chunk_size)
            return torch.cat([inputs.hidden for _ in chunks], 1)


def refuse_chunks(target: PreTrainedModel, chunk_size: int | None) -> None:
    """Refuse chunks for a target whose layers forget the states of the chunk before."""
    if chunk_size is not None and ignores_earlier_states(target):
        raise ValueError(
            f"target_chunk_size={chunk_size}: the Mamba-1 layers of {type(target).__name__} begin anew with each "
            "chunk. Leave out target_chunk_size."
        )


def forwards(
    decoder: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, cache: Cache, chunk_size: int
) -> Iterator[Any]:
    """Run a decoder over rows in chunks of `chunk_size` tokens, and yield the output of every chunk.

    A cache is always passed. Without one, transformers takes a jump of the positions for the beginning of another text
    and masks everything before it.
    """
    chunks = zip(input_ids.split(chunk_size, 1), position_ids.split(chunk_size, 1), strict=True)
    for tokens, positions in chunks:
        yield decoder(input_ids=tokens, position_ids=positions, **{CACHE_NAME: cache}, use_cache=True)


class OneLayerCache(Cache):
    """A cache for a single forward that keeps the keys and values of one layer, and recurrent states."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, config: Any, kv_layer: int):
        super().__init__(layers=layers_of(config, Rows(1), 1, lambda *_: DynamicLayer()))
        self.kv_layer = kv_layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of this forward: there are no earlier ones."""
        if layer_idx == self.kv_layer:
            self.keys, self.values = key_states, value_states
        return key_states, value_states


class KVStore(Dataset):
    """Training rows with the target's states, in one safetensors file per row.

    The file of a row holds `input_ids` and `labels` of shape `(L,)` and the states that its training method reads:
    `hidden` `(L, hidden)`, or `keys` and `values` `(K, L, D)` with the `position_ids` `(L,)` that the keys are rotated
    by.

    For an 8B target in bfloat16, a token takes 8 to 12 KB. A store pays for rows that are trained on several times. A
    folder is only used with equal `facts`, which are everything that the states depend on.
    """

    def __init__(self, folder: str | os.PathLike, num_rows: int, facts: dict[str, Any]):
        self.folder = Path(folder)
        self.num_rows = num_rows
        self.facts = json.loads(json.dumps({"num_rows": num_rows, **facts}))
        file = self.folder / FACTS_FILE
        if file.is_file():
            old = json.loads(file.read_text(encoding="utf-8"))
            for name, value in self.facts.items():
                if old.get(name) != value:
                    raise ValueError(
                        f"target_kv_dir={str(folder)!r} was written with {name}={old.get(name)!r}, but this run has "
                        f"{value!r}: use another folder, or delete this one."
                    )

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self.num_rows}")
        return load_file(self._file(index))

    def fill(self, row: Callable[[int], Row], share: tuple[int, int], silent: bool = False) -> None:
        """Write the files that are missing, of the tensors that `row` returns for a number.

        `share` is the index of this process, and the number of processes, each of which writes every n-th row.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if share[0] == 0:
            (self.folder / FACTS_FILE).write_text(json.dumps(self.facts, indent=1), encoding="utf-8")
        mine = range(share[0], self.num_rows, share[1])
        missing = [number for number in mine if not self._file(number).is_file()]
        for number in tqdm(missing, desc="states of the target", disable=silent):
            self._write(number, row(number))

    def _write(self, number: int, row: Row) -> None:
        partial = self._file(number).with_suffix(".partial")
        # cloned: safetensors refuses tensors that share memory, as tokens and labels may
        save_file({name: tensor.cpu().clone().contiguous() for name, tensor in row.items()}, partial)
        partial.replace(self._file(number))  # an interrupted write leaves no file of this name

    def _file(self, number: int) -> Path:
        return self.folder / f"row-{number:08d}.safetensors"


def padded_states(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad and stack the stored states of some rows. The result is empty if the rows have none."""
    batch = {}
    for name, dimension in STATES.items():
        if name in rows[0]:
            by_token = pad_sequence([row[name].movedim(dimension, 0) for row in rows], batch_first=True)
            batch[name] = by_token.movedim(1, 1 + dimension)
    return batch


def digest(tokens: torch.Tensor) -> str:
    """Hash tokens. The hash of its first row identifies a dataset."""
    return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8).hexdigest()


class DraftObjective:
    """Sums the loss over the predicted tokens of a batch, from the draft's hidden states through the target's head.

    With the target's hidden states, the loss is the divergence from the target's distribution. Without them, it is the
    cross-entropy of the labels, computed by Liger's kernel where that runs. `norm` is applied to the target's hidden
    states before the head. `token_ids` are the tokens of a draft with a reduced vocabulary, in increasing order; all
    labels are among them.
    """

    def __init__(
        self,
        ends: TargetEnds,
        chunk_size: int,
        norm: torch.nn.Module | None = None,
        token_ids: torch.Tensor | None = None,
    ):
        self.ends = ends
        self.chunk_size = chunk_size
        self.norm = norm
        self.token_ids = token_ids

    def __call__(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        counts: torch.Tensor | None = None,
        target_hidden: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, slice]:
        """Return the summed losses of `n` tokens, and the ranks of the correct tokens.

        The draft's hidden states, input of the head, are `(levels, n, hidden)`, those of the target `(n, hidden)`, the
        labels `(n,)`. Tokens add to the loss where `counts` `(levels, n)` is true, by default all.

        Returns:
            The sums `(levels,)`. For `m` of the tokens, the number of tokens that the draft finds more likely than the
            correct one, `(levels, m)`. A slice that selects these `m` tokens: all `n`, except with Liger's kernel.
        """
        ids = None if self.token_ids is None else self.token_ids.to(labels.device)
        if target_hidden is not None:
            norm = self.norm or torch.nn.Identity()
            objective = forward_kl(target_hidden, lambda states: self._whole_head(norm(states)), ids)
        elif ids is not None:
            objective = cross_entropy(torch.searchsorted(ids, labels))
        elif torch.is_grad_enabled() and (fused := liger_cross_entropy(self.ends, hidden)) is not None:
            return self._fused(fused, hidden, labels, counts)
        else:
            objective = cross_entropy(labels)
        totals, ranks = head_loss(hidden, self._head, objective, self.chunk_size, counts)
        return totals, ranks, slice(None)

    @cached_property
    def _part_of_head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return self.ends.head if self.token_ids is None else PartOfHead(self.ends, self.token_ids)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits of the draft's tokens in the dtype of the target's head, whatever the dtype of the draft."""
        return self._part_of_head(hidden.to(self.ends.model.get_output_embeddings().weight.dtype))

    def _whole_head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.ends.head(hidden.to(self.ends.model.get_output_embeddings().weight.dtype))

    def _fused(
        self,
        fused: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        labels: torch.Tensor,
        counts: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, slice]:
        """Sum the losses with a kernel that returns no logits. The ranks are those of a sample."""
        sample = slice(None, None, 1 + len(labels) // SAMPLED_PLACES)
        with torch.no_grad():
            few = hidden[:, sample]
            _, ranks = head_loss(few, self._head, cross_entropy(labels[sample]), self.chunk_size)
        places = [slice(None)] * len(hidden) if counts is None else list(counts)
        totals = [fused(states[place], labels[place]) for states, place in zip(hidden, places, strict=True)]
        return torch.stack(totals), ranks, sample


def liger_cross_entropy(
    ends: TargetEnds, hidden: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return a function that sums the cross-entropy of labels `(n,)` given hidden states `(n, hidden)`, or `None`.

    Liger's kernels run on GPUs. They support a head that is one linear layer, optionally with a softcap.

    Source: Liger Kernel (https://github.com/linkedin/Liger-Kernel), `LigerFusedLinearCrossEntropyLoss`.
    """
    kind = ends.config.model_type
    if LigerFusedLinearCrossEntropyLoss is None or not hidden.is_cuda or kind in LOGIT_FACTORS | LOGIT_DIVISORS:
        return None
    head = ends.model.get_output_embeddings()
    softcap = getattr(ends.config, "final_logit_softcapping", None)
    fused = LigerFusedLinearCrossEntropyLoss(reduction="sum", softcap=softcap)

    def loss(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = fused(head.weight, states.to(head.weight.dtype), labels, getattr(head, "bias", None))
        return total.float()

    return loss


def head_loss(
    hidden: torch.Tensor, head: Head, objective: Objective, chunk_size: int, counts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum an objective over tokens, through the head, for one or several levels of hidden states.

    Args:
        head (`Callable`): Maps `(m, hidden)` to logits `(m, vocab)`.
        objective (`Callable`): [`cross_entropy`] or [`forward_kl`], bound to what the draft is compared with.
        counts (`torch.BoolTensor` of shape `(levels, n)`, *optional*): Tokens that add to the sum; by default all.

    Returns:
        The sums `(levels,)`, and a `torch.LongTensor` of shape `(levels, n)` with the number of tokens that the draft
        finds more likely than the correct one. It is 0 for a hit.
    """
    if counts is None:
        counts = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    totals, ranks = _HeadLoss.apply(hidden, head, objective, chunk_size, counts)
    return totals, ranks


def cross_entropy(labels: torch.Tensor) -> Objective:
    """Return the cross-entropy of tokens `(n,)` as an objective."""

    def objective(chunk: slice, dtype: torch.dtype) -> Score:
        tokens = labels[chunk, None]

        def score(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            log_draft = logits.log_softmax(-1)
            losses = -log_draft.gather(1, tokens)[:, 0]
            gradient = log_draft.exp_()
            gradient.scatter_add_(1, tokens, gradient.new_full(tokens.shape, -1.0))
            return losses, gradient, rank(logits, tokens)

        return score

    return objective


def forward_kl(target_hidden: torch.Tensor, head: Head, token_ids: torch.Tensor | None = None) -> Objective:
    """Return the Kullback-Leibler divergence from the target's distribution to the draft's as an objective.

    `head` maps hidden states `(n, hidden)` of the target for the same tokens to its logits. With `token_ids`, in
    increasing order, the distribution is that over these tokens, and another most likely token is never hit.
    """

    def objective(chunk: slice, dtype: torch.dtype) -> Score:
        logits = head(target_hidden[chunk]).to(dtype)
        tokens = logits.argmax(-1, keepdim=True)
        misses = torch.zeros_like(tokens[:, 0])
        if token_ids is not None:
            places = torch.searchsorted(token_ids, tokens).clamp_max(len(token_ids) - 1)
            misses = (token_ids[places] != tokens)[:, 0].long()
            logits, tokens = logits[:, token_ids], places
        log_target = logits.log_softmax(-1)
        target = log_target.exp()
        negative_entropy = dot(target, log_target)

        def score(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            log_draft = logits.log_softmax(-1)
            losses = negative_entropy - dot(target, log_draft)
            return losses, log_draft.exp_().sub_(target), rank(logits, tokens) + misses

        return score

    return objective


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the scalar products of the rows of two `(m, vocab)` tensors, without allocating their product."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]


def rank(logits: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Count the tokens that come before `token` `(m, 1)` in the order of the logits `(m, vocab)`.

    Tokens with equal logits are ordered by their ids.

    >>> rank(torch.tensor([[1.0, 3.0, 2.0, 2.0]]), torch.tensor([[3]])).tolist()
    [2]
    """
    logit = logits.gather(1, token)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return torch.count_nonzero((logits > logit) | ((logits == logit) & (ids < token)), dim=1)


class _HeadLoss(torch.autograd.Function):
    """Computes the gradient in the forward pass and returns it in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: Head, objective: Objective, chunk_size: int, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        totals = torch.zeros(len(hidden), dtype=wide, device=hidden.device)
        ranks = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, hidden.shape[1], chunk_size):
            chunk = slice(start, start + chunk_size)
            score = objective(chunk, wide)
            for level, states in enumerate(hidden):
                with torch.set_grad_enabled(gradient is not None):
                    leaf = states[chunk].detach().requires_grad_(gradient is not None)
                    logits = head(leaf)
                losses, slope, ranks[level, chunk] = score(logits.detach().to(wide))
                weight = counts[level, chunk].to(wide)
                totals[level] += losses @ weight
                if gradient is not None:
                    slope = slope.mul_(weight[:, None]).to(logits.dtype)
                    (gradient[level, chunk],) = torch.autograd.grad(logits, leaf, slope)
        ctx.gradient = gradient
        ctx.mark_non_differentiable(ranks)
        return totals, ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = ctx.gradient
        if gradient is not None:
            gradient = gradient * slope[:, None, None].to(gradient.dtype)
        return gradient, None, None, None, None
