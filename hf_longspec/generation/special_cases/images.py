"""Inputs of the model beside its tokens: images, types of tokens.

Plain `generate` passes such inputs to the first forward and decodes text after it. So does the loop: the whole prompt
runs in one forward of the model's own, and the last tokens of the prompt run once more, as the chain that seeds the
drafter. Tokens of an image must not be part of that chain. A forward up to the decoder shows which tokens are text: it
gets their embeddings. States cannot be shortened, so on targets with recurrent states the last tokens run once only.

With M-RoPE (https://huggingface.co/papers/2409.12191), a token has a position on each of three axes. After an image,
those of text are equal, and differ from its place in the text by a constant. `generate` gives the positions of the
prompt, and counts on from those of its last token.
"""

import math
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

from ..cache import CACHE_NAME, SpeculativeCache
from ..call import IMAGES, KNOWN_MODEL_KWARGS, Call, Prompts, refuse_positions, unpadded
from ..special_case import SpecialCase
from ..target import TargetView
from ..target_modules import before_forward
from .hooks import bare
from .trial import ignores

# Inputs `(batch, T)` that transformers cuts along with the tokens. 0 is text in all models that are supported.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


def inputs_beside_tokens(call: Call) -> dict[str, Any]:
    """Keyword arguments that the model would get from plain `generate`, and would use; empty for text alone."""
    target = call.target
    inputs = {name: value for name, value in call.model_kwargs.items() if name not in KNOWN_MODEL_KWARGS}
    if all(outputs is None for outputs in (inputs.get("mm_encoder_outputs") or {}).values()):
        inputs["mm_encoder_outputs"] = None  # what generate() made of pixels and the like, and here there were none
    inputs = {name: value for name, value in inputs.items() if value is not None}
    inputs = {name: value for name, value in inputs.items() if not is_dropped(call, name)}
    are_text = (name in TOKEN_TYPES and not value.any() and ignores(target, name) for name, value in inputs.items())
    return {} if all(are_text) else inputs


def is_dropped(call: Call, name: str) -> bool:
    """Return whether plain `generate` drops an input before the first forward, as it does with `labels`."""
    prepare = partial(call.target.model.prepare_inputs_for_generation, call.input_ids, is_first_iteration=True)
    passed = prepare(**call.model_kwargs)
    if name in passed:
        return False
    others = prepare(**{key: value for key, value in call.model_kwargs.items() if key != name})
    return passed.keys() == others.keys() and all(_is_same(passed[key], others[key]) for key in passed)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, torch.Tensor) and torch.equal(one, other))


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
        and not (ignores(target, name) if name in TOKEN_TYPES else ignores(target, name, value))
    }


class PromptsWithInputs(Prompts):
    """Prompts of a call, and inputs of the first forward beside them, or positions on several axes.

    Attributes:
        inputs (`dict[str, Any]`): Inputs beside the tokens; empty for text alone.
        axes (`list[torch.LongTensor]`, *optional*): Positions `(axes, T)` of the tokens of every row, the last three on
            the axes of M-RoPE; `None` if the call has none.
    """

    def __init__(self, call: Call):
        super().__init__(call)
        mask = torch.ones_like(self.input_ids) if call.mask is None else call.mask
        self.inputs = call.inputs
        self.types = {name: unpadded(value, mask) for name, value in self.inputs.items() if name in TOKEN_TYPES}
        self.axes = _unpadded_axes(call.model_kwargs.get("position_ids"), mask)
        if self.axes is not None:
            offsets = torch.stack([row[-1:, -1] - (row.shape[1] - 1) for row in self.axes])
            self.offsets = offsets if offsets.any() else None

    @cached_property
    def text_sizes(self) -> list[int]:
        """How many tokens at the end of each prompt are text; none if the decoder's input does not show it.

        The answer is found with a forward that ends where the decoder begins. Tokens are text if the decoder gets
        their embeddings, at the positions of text.
        """
        if not self.inputs:
            return super().text_sizes
        model = bare(self.target.model)
        inputs, positions = self._first_forward(DynamicCache(config=self.target.config), self.new)
        arguments = decoder_arguments(model, inputs)
        embedded, used = (arguments.get(name) for name in ("inputs_embeds", "position_ids"))
        in_place = self.axes is None
        if used is not None:
            in_place = used.shape[:-2] == positions.shape[:-2] and bool((used == positions.to(used.device)).all())
        if embedded is None or embedded.shape[:2] != positions.shape[-2:] or not in_place:
            return []
        sizes = []
        for row, prompt in enumerate(self.new):
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

    def tails(self, seed_tokens: int) -> list[int]:
        if not self.inputs:
            return super().tails(seed_tokens)
        sizes = [min(seed_tokens, size) for size in self.text_sizes]
        # one forward ends in the same column of all rows
        return [min(sizes)] * len(sizes) if self.target.has_states else sizes

    def run(self, cache: SpeculativeCache, heads: list[torch.Tensor]) -> None:
        """Run prompts in one forward, with their last tokens, which will run again, except with recurrent states.

        The logits of the last tokens of whole prompts are kept.
        """
        if not self.inputs:
            super().run(cache, heads)
            return
        prompts = heads if self.target.has_states else self.new
        inputs, positions = self._first_forward(cache, prompts)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=positions.device)
        columns, of_row = last.unique(return_inverse=True)
        logits = self.target.model(**inputs, **self.target.keeping(columns)).logits
        if prompts is self.new:
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


@cache
def _on_top_of(below: Any) -> Any:
    """Return [`PromptsWithInputs`] of the prompts of a verification mode."""
    return type(PromptsWithInputs.__name__, (PromptsWithInputs, below), {})


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


class Inputs(SpecialCase):
    """Images and other inputs beside the tokens, and positions on several axes."""

    case = IMAGES

    def change(self, call: Call) -> None:
        """Read the inputs, and check positions on several axes, which `generate` makes for M-RoPE."""
        call.inputs = inputs_beside_tokens(call)
        call.prompts_class = _on_top_of(call.prompts_class)
        positions = call.position_ids
        if positions is not None and positions.dim() == 3 and positions.shape[-1] == call.tokens.shape[1]:
            call.position_ids = None
            if not call.inputs:
                # they begin elsewhere if the cache holds an image
                count = call.tokens.shape[1] if call.mask is None else call.mask.sum(-1, keepdim=True)
                refuse_positions(positions[-3:], call.tokens, call.mask, positions[-1:, :, -1:] - (count - 1))

    def why_not(self, call: Call) -> Iterator[str]:
        prompts: Any = call.prompts
        if prompts.inputs or prompts.offsets is not None:
            yield from _reasons_of_positions(prompts)
        if prompts.inputs:
            yield from _reasons_of_inputs(prompts, prompts.inputs)


def _reasons_of_positions(prompts: PromptsWithInputs) -> Iterator[str]:
    """Yield reasons why positions after images (M-RoPE) would differ from those of plain `generate`."""
    model = prompts.target.model
    names = names_of(prompts.inputs) or (CACHE_NAME if any(prompts.past_lengths) else "position_ids")
    counts_on = type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
    if any(hasattr(part, "rope_deltas") for part in model.modules()) and not (counts_on and prompts.axes is not None):
        yield (
            f"{names}: multimodal positions (M-RoPE), as {type(model).__name__} uses them, are not supported with a "
            "draft. Pass text only, in a new cache."
        )
    if prompts.offsets is not None and prompts.target.rotary_limit < math.inf:
        yield (
            f"{names}: positions that differ from the places of tokens by {prompts.offsets.flatten().tolist()} "
            "(M-RoPE) are not supported with rotary frequencies that change (rope_parameters). Pass text only, "
            "in a new cache."
        )


def _reasons_of_inputs(prompts: PromptsWithInputs, inputs: dict[str, Any]) -> Iterator[str]:
    """Yield reasons why text after these inputs beside the tokens would differ from that of plain `generate`."""
    target, input_ids = prompts.target, prompts.input_ids
    names, kind = names_of(inputs), type(target.model).__name__
    if not target.mode.takes_inputs:
        yield (f"{names}: inputs beside the tokens are not supported with the masks of {kind}. Pass text only.")
    if repeated := sorted(of_every_forward(target, input_ids, inputs)):
        yield (
            f"{', '.join(repeated)}: plain generate passes it to every forward, and speculative decoding to the first "
            "one only. Drop it if it is not needed."
        )
    chunk_size = prompts.chunk_size
    if chunk_size is not None and chunk_size < input_ids.shape[1]:
        yield (
            f"prefill_chunk_size={chunk_size} is not supported with {names}, as the prompt then runs in one forward. "
            "Drop prefill_chunk_size."
        )
    if stored := max(prompts.past_lengths):
        yield (
            f"{CACHE_NAME} holds {stored} tokens, and {names} needs an empty cache. Drop {CACHE_NAME}, or drop "
            "the inputs if the cache already contains them."
        )
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    of_tokens = {name for name, value in tensors.items() if value.shape[:2] == input_ids.shape}
    if (prompts.padding is not None or target.has_states) and (unknown := sorted(of_tokens - set(TOKEN_TYPES))):
        yield (
            f"{', '.join(unknown)}: inputs with a value for each token are not supported with padding or recurrent "
            "states. Pass prompts of equal length, or one at a time."
        )
    if target.has_states and len(set(map(len, prompts.texts))) > 1:
        yield (
            f"{names}: prompts of different lengths are not supported with such inputs and recurrent states. Pass "
            "prompts of equal length, or one at a time."
        )
    if (largest := int(input_ids.max())) >= target.vocab_size:
        yield (
            f"input_ids contains {largest}, and the vocabulary has {target.vocab_size} tokens: drafts embed "
            "placeholders as well. Use a placeholder of the vocabulary."
        )
    if not (sizes := prompts.text_sizes):
        yield (
            f"{names}: the decoder of {kind} does not get one embedding per token, at the position of the token. Pass "
            "text only."
        )
    elif 0 in sizes:
        yield (
            f"the prompt of row {sizes.index(0)} does not end with text: its last token belongs to {names}. Add a "
            "token of text."
        )
