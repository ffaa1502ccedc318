"""Inputs of the model beside its tokens: images, types of tokens.

Plain `generate` passes such inputs to the first forward and decodes text after it. So does the loop: the whole prompt
runs in one forward of the model's own, and the last tokens of the prompt run once more, as the chain that seeds the
drafter. Tokens of an image must not be part of that chain. A forward up to the decoder shows which tokens are text: it
gets their embeddings. States cannot be shortened, so on targets with recurrent states the last tokens run once only.

With M-RoPE (https://huggingface.co/papers/2409.12191), a token has a position on each of three axes. After an image,
those of text are equal, and differ from its place in the text by a constant. `generate` gives the positions of the
prompt, and counts on from those of its last token.
"""

import threading
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from .cache import CACHE_NAME, SpeculativeCache, has_gaps
from .hooks import bare
from .masked import PlainForwards
from .target import TargetView
from .target_modules import before_forward
from .traits import RotaryLimit
from .user_cache import held_by

# Keyword arguments of `generate` for the model that the loop reads itself, or makes itself.
KNOWN_MODEL_KWARGS = {
    "attention_mask",
    "cache_position",
    "inputs_tensor",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    CACHE_NAME,
    "position_ids",
    "synced_gpus",
    "tokenizer",
    "use_cache",
}
# Inputs `(batch, T)` that transformers cuts along with the tokens. 0 is text in all models that are supported.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


def inputs_beside_tokens(target: TargetView, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that the model would get from plain `generate`, and would use; empty for text alone."""
    inputs = {name: value for name, value in model_kwargs.items() if name not in KNOWN_MODEL_KWARGS}
    if all(outputs is None for outputs in (inputs.get("mm_encoder_outputs") or {}).values()):
        inputs["mm_encoder_outputs"] = None  # what generate() made of pixels and the like, and here there were none
    inputs = {name: value for name, value in inputs.items() if value is not None}
    are_text = (
        name in TOKEN_TYPES and not value.any() and target.ignores_zeros(name) for name, value in inputs.items()
    )
    return {} if all(are_text) else inputs


def names_of(inputs: dict[str, Any]) -> str:
    """Names of inputs as the user knows them: `generate` may have encoded images before, all under one name."""
    encoded = inputs.get("mm_encoder_outputs") or {}
    kinds = [f"{kind} inputs" for kind, outputs in encoded.items() if outputs is not None]
    return ", ".join(kinds + sorted(inputs.keys() - {"mm_encoder_outputs"}))


def of_every_forward(target: TargetView, input_ids: torch.Tensor, inputs: dict[str, Any]) -> set[str]:
    """Names of inputs that the second forward of plain `generate` gets, and that text would depend on."""
    rows, length = input_ids.shape
    cache = SpeculativeCache(target.config, rows, length)
    cache.set_lengths([length] * rows)
    grown = {name: nn.functional.pad(value, (0, 1)) if name in TOKEN_TYPES else value for name, value in inputs.items()}
    passed = target.model.prepare_inputs_for_generation(
        nn.functional.pad(input_ids, (0, 1)),
        next_sequence_length=1,
        **{CACHE_NAME: cache},
        use_cache=True,
        is_first_iteration=False,
        **grown,
    )
    return {
        name
        for name, value in inputs.items()
        if passed.get(name) is not None
        and not (target.ignores_zeros(name) if name in TOKEN_TYPES else target.ignores(name, value))
    }


class Prompts:
    """Prompts of a call without their padding, and inputs of the first forward beside them.

    Attributes:
        inputs (`dict[str, Any]`): Inputs beside the tokens; empty for text alone.
        mask (`torch.LongTensor` of shape `(batch, P)`, *optional*): 0 at padding; `None` if there is none.
        held (`list[int]`): Number of tokens of every row that the cache holds.
        has_gaps (`bool`): Whether there is padding between tokens of a row.
        counts_gaps (`bool`): Whether windows of the target count that padding.
        by_chains (`bool`): Whether the prompts run as chains that are verified, since their rows differ.
        texts (`list[torch.LongTensor]`): Tokens `(T,)` of every row, those in the cache included.
        rotary ([`RotaryLimit`], *optional*): `None` if the target's rotary frequencies never change.
        axes (`list[torch.LongTensor]`, *optional*): Positions `(axes, T)` of the tokens of every row, the last three on
            the axes of M-RoPE; `None` if the call has none.
        offsets (`torch.LongTensor` of shape `(batch, 1)`, *optional*): Position of the last token of every row, minus
            its place in the text; `None` if all are 0.
        logits (`torch.Tensor` of shape `(batch, vocab)`, *optional*): Logits of the last token of each prompt, once it
            ran with inputs beside the tokens; `None` with recurrent states.
    """

    def __init__(
        self,
        target: TargetView,
        input_ids: torch.Tensor,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        max_length: int,
    ):
        self.target, self.input_ids, self.config, self.max_length = target, input_ids, config, max_length
        self.cache, mask = model_kwargs.get(CACHE_NAME), model_kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        self.inputs = inputs_beside_tokens(target, model_kwargs)
        self.types = {name: _unpadded(value, mask) for name, value in self.inputs.items() if name in TOKEN_TYPES}
        self.texts = _unpadded(input_ids, mask)
        self.axes = _unpadded_axes(model_kwargs.get("position_ids"), mask)
        self.offsets = None
        if self.axes is not None:
            offsets = torch.stack([row[-1:, -1] - (row.shape[1] - 1) for row in self.axes])
            self.offsets = offsets if offsets.any() else None
        self.logits: torch.Tensor | None = None
        self.held = held_by(self.cache, mask)
        self.mask = mask if sum(map(len, self.texts)) < input_ids.numel() else None
        self.has_gaps = self.mask is not None and has_gaps(mask)
        self.counts_gaps = self.has_gaps and target.hides_keys_within(max_length)
        lengths = {len(text) for text in self.texts}
        # padding on the right would change states, so prompts of different lengths run as chains there
        is_uneven = target.has_states and len(lengths) > 1
        self.by_chains = self.counts_gaps or len(set(self.held)) > 1 or is_uneven
        self.rotary = RotaryLimit.of(target.model, target.config, [len(text) for text in self.texts])
        self._new = [text[count:] for text, count in zip(self.texts, self.held, strict=True)]

    @cached_property
    def plain(self) -> PlainForwards:
        """The forwards in which plain `generate` runs the tokens of this call.

        It runs the padding after rows that have ended, so its cache has as many columns as the longest row.
        """
        width = self.input_ids.shape[1]
        lags = tuple(width - len(text) for text in self.texts)
        stored = max((held + lag for held, lag in zip(self.held, lags, strict=True) if held), default=0)
        return PlainForwards(lags, stored, width, self.config.prefill_chunk_size or width)

    @cached_property
    def text_sizes(self) -> list[int]:
        """How many tokens at the end of each prompt are text; none if the decoder's input does not show it.

        The answer is found with a forward that ends where the decoder begins. Tokens are text if the decoder gets
        their embeddings, at the positions of text.
        """
        if not self.inputs:
            return [len(prompt) for prompt in self._new]
        model = bare(self.target.model)
        inputs, positions = self._first_forward(DynamicCache(config=self.target.config), self._new)
        arguments = decoder_arguments(model, inputs)
        embedded, used = (arguments.get(name) for name in ("inputs_embeds", "position_ids"))
        in_place = self.axes is None
        if used is not None:
            in_place = used.shape[:-2] == positions.shape[:-2] and bool((used == positions.to(used.device)).all())
        if embedded is None or embedded.shape[:2] != positions.shape[-2:] or not in_place:
            return []
        sizes = []
        for row, prompt in enumerate(self._new):
            embeddings = model.get_input_embeddings()(prompt).to(embedded.device)
            is_text = (embedded[row, : len(prompt)] == embeddings).all(-1)
            for rows in self.types.values():
                is_text &= (rows[row] == 0).to(is_text.device)
            if self.axes is not None:
                axes = self.axes[row][-3:].to(is_text.device)
                is_text &= (axes - axes[-1:, -1:] == torch.arange(1 - len(prompt), 1, device=axes.device)).all(0)
            size = int(is_text.flip(0).long().cumprod(0).sum())
            # with states the last tokens run once only, and the forward before them must not be empty
            sizes.append(min(size, len(prompt) - 1) if self.target.has_states else size)
        return sizes

    def prefill(
        self,
        cache: SpeculativeCache,
        seed_tokens: int,
        columns: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Run all but the last tokens of every row under the model's own attention, right-padded, possibly in chunks.

        With `columns`, see [`TreeContext`], and on a cache with rows of different lengths, chains are verified instead.

        With inputs beside the tokens, all tokens run in one forward, and the last ones will run again, except with
        recurrent states.

        Returns:
            `list[torch.LongTensor]`: Last tokens of every row, which are not in the cache: `seed_tokens` at most, or
            one more with recurrent states.
        """
        target, chunk_size = self.target, self.config.prefill_chunk_size
        sizes = [min(seed_tokens, size) for size in self.text_sizes]
        if self.inputs and target.has_states:  # one forward ends in the same column of all rows
            sizes = [min(sizes)] * len(sizes)
        elif target.has_states and not self.by_chains:  # all rows have as many new tokens
            count = len(self._new[0]) - sizes[0]
            # one token alone may be computed by other rules than several
            is_alone = count % (chunk_size or max(count, 2)) == 1
            sizes = [size + is_alone for size in sizes]
        heads = [prompt[: len(prompt) - size] for prompt, size in zip(self._new, sizes, strict=True)]
        if self.inputs:
            self._run_with_inputs(cache, heads if target.has_states else self._new)
        elif self.by_chains:
            with target.attention():
                target.prefill_rows(heads, cache, chunk_size, columns)
        elif max(map(len, heads)):
            # whole prompts after the limit, since there the last token decides the frequencies of all
            is_passed = self.rotary is not None and self.rotary.is_passed
            target.prefill(pad_sequence(self._new if is_passed else heads, batch_first=True), cache, chunk_size)
        cache.set_lengths([count + len(head) for count, head in zip(self.held, heads, strict=True)])
        return [prompt[len(head) :] for prompt, head in zip(self._new, heads, strict=True)]

    def _run_with_inputs(self, cache: SpeculativeCache, prompts: list[torch.Tensor]) -> None:
        """Run prompts or their beginnings in one forward, and keep the logits of the last tokens of whole prompts."""
        inputs, positions = self._first_forward(cache, prompts)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=positions.device)
        columns, of_row = last.unique(return_inverse=True)
        logits = self.target.model(**inputs, **self.target.keeping(columns)).logits
        if prompts is self._new:
            where = last if logits.shape[1] == positions.shape[-1] else of_row
            self.logits = logits[range(len(last)), where.to(logits.device)]

    def _first_forward(self, cache: Any, prompts: list[torch.Tensor]) -> tuple[dict[str, Any], torch.Tensor]:
        """Return the arguments of a forward of prompts as plain `generate` prepares them, and the position ids.

        The prompts are whole, or beginnings of the same length.
        """
        tokens = pad_sequence(prompts, batch_first=True)
        count = tokens.shape[1]
        positions = torch.arange(count, device=tokens.device).expand_as(tokens)
        if self.axes is not None:
            positions = pad_sequence([row.T for row in self.axes], batch_first=True).permute(2, 0, 1)[..., :count]
        types = {name: pad_sequence(rows, batch_first=True)[:, :count] for name, rows in self.types.items()}
        inputs = self.target.model.prepare_inputs_for_generation(
            tokens,
            position_ids=positions,
            **{CACHE_NAME: cache},
            use_cache=True,
            is_first_iteration=True,
            **(self.inputs | types),
        )
        return inputs, positions


def _unpadded(values: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows of `(batch, P)` values without padding, where `mask` is 0."""
    return [row[keep.bool()] for row, keep in zip(values, mask, strict=True)]


def _unpadded_axes(positions: torch.Tensor | None, mask: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the rows `(axes, T)` of `(axes, batch or 1, P)` positions without padding; `None` if there are no axes."""
    if positions is None or positions.dim() < 3:
        return None
    rows = positions.expand(-1, len(mask), -1).unbind(1)
    return [row[:, keep.bool()] for row, keep in zip(rows, mask, strict=True)]


class _Reached(Exception):
    """The forward has reached the text decoder."""


def decoder_arguments(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that the text decoder of `model` gets in a forward, which ends there."""
    caught: dict[str, Any] = {}
    own_thread = threading.get_ident()  # another thread may be generating on the same model

    def catch(positional: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        if threading.get_ident() == own_thread:
            caught.update(arguments)
            raise _Reached

    handle = before_forward(model.get_decoder(), catch)
    try:
        with suppress(_Reached), torch.compiler.set_stance("force_eager"):
            model(**inputs)
    finally:
        handle.remove()
    return caught
