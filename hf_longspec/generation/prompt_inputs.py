"""Inputs of the model beside its tokens: images, types of tokens.

Plain `generate` passes such inputs to the first forward and decodes text after it. So does the loop: the whole prompt
runs in one forward of the model's own, and the last tokens of the prompt run once more, as the chain that seeds the
drafter. Tokens of an image must not be part of that chain. The forward shows which tokens are text: the decoder got
their embeddings.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from .cache import SpeculativeCache
from .padding import has_gaps
from .rotary import FrequencyChange, RotaryLimit
from .target import TargetView
from .user_cache import held_by

# Keyword arguments of `generate` for the model that the loop reads itself, or makes itself.
KNOWN_MODEL_KWARGS = {
    "attention_mask",
    "cache_position",
    "inputs_tensor",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "position_ids",
    "synced_gpus",
    "tokenizer",
    "use_cache",
}
# Inputs `(batch, T)` that transformers cuts along with the tokens. 0 is text in all models that are supported.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


def inputs_beside_tokens(target: TargetView, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that the model would get from plain `generate`, and would use; empty for text alone."""
    given = {name: value for name, value in model_kwargs.items() if name not in KNOWN_MODEL_KWARGS}
    if all(outputs is None for outputs in (given.get("mm_encoder_outputs") or {}).values()):
        given["mm_encoder_outputs"] = None  # what generate() made of pixels and the like, and here there were none
    given = {name: value for name, value in given.items() if value is not None}
    are_text = (name in TOKEN_TYPES and not value.any() and target.ignores_zeros(name) for name, value in given.items())
    return {} if all(are_text) else given


def refuse_inputs(
    target: TargetView,
    input_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    max_length: int,
    chunk_size: int | None,
) -> None:
    """Refuse inputs beside the tokens after which text would differ from that of plain `generate`.

    Raises:
        ValueError: With the names of the inputs, the rule and the remedy.
    """
    given = inputs_beside_tokens(target, model_kwargs)
    if not given:
        return
    model, length = target.model, input_ids.shape[1]
    names, without = _names(given), "call generate() without assistant_model."
    if any(hasattr(module, "rope_deltas") for module in model.modules()):
        raise ValueError(
            f"{names}: the positions of {type(model).__name__} after an image do not count tokens (rope_deltas), and "
            f"the loop counts tokens. Pass text alone, or {without}"
        )
    if kept := sorted(_of_every_forward(target, input_ids, given)):
        raise ValueError(
            f"{', '.join(kept)} would not reach the model: plain generate passes it to every forward, and speculative "
            f"decoding passes inputs beside the tokens to the first one. Drop what is not needed, or {without}"
        )
    if chunk_size is not None and chunk_size < length:
        raise ValueError(
            f"prefill_chunk_size={chunk_size} with {names}: such a prompt runs in one forward. Drop prefill_chunk_size."
        )
    if (cache := model_kwargs.get("past_key_values")) is not None and (stored := int(cache.get_seq_length())):
        raise ValueError(
            f"past_key_values holds {stored} tokens, and {names} would be input of the first forward. Leave "
            "past_key_values out, or drop the inputs if the cache holds what they gave."
        )
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        of_tokens = {name for name, value in tensors.items() if value.shape[:2] == input_ids.shape}
        if unknown := sorted(of_tokens - set(TOKEN_TYPES)):
            raise ValueError(
                f"{', '.join(unknown)} may have a value for each token, and attention_mask has padding, which the loop "
                "moves. Pass prompts of the same length, or one at a time."
            )
        if target.hides_keys_within(max_length) and has_gaps(mask):
            raise ValueError(
                f"{names}, and attention_mask has zeros between tokens, which the target's sliding windows count in "
                f"plain generate: such a prompt runs without them. Move the zeros to the left of each row, or {without}"
            )
    if (largest := int(input_ids.max())) >= target.vocab_size:
        raise ValueError(
            f"input_ids contains {largest}, and the vocabulary has {target.vocab_size} tokens: drafts cannot look up "
            f"placeholders outside of it. Please {without}"
        )
    if (column := FrequencyChange.of(target.config).column) < max_length:
        raise ValueError(
            f"max_length={max_length} with {names}: rotary frequencies change at position {column}, where the loop may "
            f"have to run the prompt again without these inputs. Keep max_length at {column} or below, or {without}"
        )


def _names(given: dict[str, Any]) -> str:
    """Names of inputs as the user knows them: `generate` may have encoded images before, all under one name."""
    encoded = given.get("mm_encoder_outputs") or {}
    kinds = [f"{kind} inputs" for kind, outputs in encoded.items() if outputs is not None]
    return ", ".join(kinds + sorted(given.keys() - {"mm_encoder_outputs"}))


def _of_every_forward(target: TargetView, input_ids: torch.Tensor, given: dict[str, Any]) -> set[str]:
    """Names of inputs that the second forward of plain `generate` gets, and that text would depend on."""
    rows, length = input_ids.shape
    cache = SpeculativeCache(target.config, rows, length)
    cache.set_lengths([length] * rows)
    grown = {name: nn.functional.pad(value, (0, 1)) if name in TOKEN_TYPES else value for name, value in given.items()}
    passed = target.model.prepare_inputs_for_generation(
        nn.functional.pad(input_ids, (0, 1)),
        next_sequence_length=1,
        past_key_values=cache,
        use_cache=True,
        is_first_iteration=False,
        **grown,
    )
    kept = {name for name in given if passed.get(name) is not None}
    return {
        name
        for name in kept
        if not (target.ignores_zeros(name) if name in TOKEN_TYPES else target.ignores(name, given[name]))
    }


class Prompts:
    """Prompts of a call without their padding, and inputs of the first forward beside them.

    Args:
        target ([`TargetView`]): The target.
        input_ids (`torch.LongTensor` of shape `(batch, P)`): Prompts with their padding on the left.
        cache (*optional*): Cache of the user's, which may hold the beginning of every row.
        model_kwargs (`dict[str, Any]`): Keyword arguments for the model, checked by [`refuse_inputs`].

    Attributes:
        mask (`torch.LongTensor` of shape `(batch, P)`, *optional*): 0 at padding; `None` if there is none.
        held (`list[int]`): Number of tokens of every row that the cache holds.
        has_gaps (`bool`): Whether there is padding between tokens of a row.
        texts (`list[torch.LongTensor]`): Tokens `(T,)` of every row, those in the cache included.
        logits (`torch.Tensor` of shape `(batch, vocab)`, *optional*): Logits of the last token of each prompt, once it
            ran with inputs beside the tokens.
    """

    def __init__(self, target: TargetView, input_ids: torch.Tensor, cache: Any, model_kwargs: dict[str, Any]):
        mask = model_kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        values = inputs_beside_tokens(target, model_kwargs)
        self.types = {name: _unpadded(value, mask) for name, value in values.items() if name in TOKEN_TYPES}
        self.others = {name: value for name, value in values.items() if name not in TOKEN_TYPES}
        self.texts = _unpadded(input_ids, mask)
        self.logits: torch.Tensor | None = None
        self.held = held_by(cache, mask)
        self.mask = mask if sum(map(len, self.texts)) < input_ids.numel() else None
        self.has_gaps = self.mask is not None and has_gaps(mask)
        self._new = [text[count:] for text, count in zip(self.texts, self.held, strict=True)]

    def prefill(
        self,
        target: TargetView,
        cache: SpeculativeCache,
        rotary: RotaryLimit | None,
        seed_tokens: int,
        chunk_size: int | None,
        columns: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Run all but the last tokens of every row under the model's own attention, right-padded, possibly in chunks.

        With `columns`, see [`TreeContext`], and on a cache with rows of different lengths, chains are verified instead.

        With inputs beside the tokens, all tokens run in one forward, and the last ones will run again.

        Returns:
            `list[torch.LongTensor]`: Last tokens of every row, `seed_tokens` at most, which are not in the cache.

        Raises:
            ValueError: If a prompt does not end with text, or its positions are not those of its tokens.
        """
        has_inputs = bool(self.types or self.others)
        sizes = [min(seed_tokens, len(prompt)) for prompt in self._new]
        if has_inputs:
            sizes = self._run_with_inputs(target, cache, seed_tokens)
        heads = [prompt[: len(prompt) - size] for prompt, size in zip(self._new, sizes, strict=True)]
        if columns is not None or cache.lengths.is_ragged:
            with target.attention():
                target.prefill_rows(heads, cache, chunk_size, columns)
        elif max(map(len, heads)) and not has_inputs:
            # whole prompts after the limit, since there the last token decides the frequencies of all
            padded = pad_sequence(self._new if rotary is not None and rotary.is_passed else heads, batch_first=True)
            target.prefill(padded, cache, chunk_size)
        cache.set_lengths([count + len(head) for count, head in zip(self.held, heads, strict=True)])
        return [prompt[len(head) :] for prompt, head in zip(self._new, heads, strict=True)]

    def _run_with_inputs(self, target: TargetView, cache: SpeculativeCache, most: int) -> list[int]:
        """Run whole prompts in one forward, and return how many tokens at the end of each are text, `most` at most."""
        model, prompts, names = target.model, self._new, _names(self.types | self.others)
        tokens = pad_sequence(prompts, batch_first=True)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=tokens.device)
        columns, of_row = last.unique(return_inverse=True)
        inputs = model.prepare_inputs_for_generation(
            tokens,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            is_first_iteration=True,
            **{name: pad_sequence(rows, batch_first=True) for name, rows in self.types.items()},
            **self.others,
        )
        with decoder_arguments(model) as given:
            logits = model(**inputs, **target.keeping(columns)).logits
        where = last if logits.shape[1] == tokens.shape[1] else of_row
        self.logits = logits[range(len(prompts)), where.to(logits.device)]
        embedded, used = (given.get(name) for name in ("inputs_embeds", "position_ids"))
        in_place = used is None or bool((used == positions.to(used.device)).all())
        if embedded is None or embedded.shape[:2] != tokens.shape or not in_place:
            raise ValueError(
                f"{names}: the decoder of {type(model).__name__} did not get one embedding for each token, at the "
                "position of the token. Call generate() without assistant_model."
            )
        sizes = []
        for row, prompt in enumerate(prompts):
            end = slice(max(0, len(prompt) - most), len(prompt))
            is_text = (embedded[row, end] == model.get_input_embeddings()(prompt[end]).to(embedded.device)).all(-1)
            for rows in self.types.values():
                is_text &= (rows[row][end] == 0).to(is_text.device)
            sizes.append(int(is_text.flip(0).long().cumprod(0).sum()))
        if 0 in sizes:
            raise ValueError(
                f"the prompt of row {sizes.index(0)} does not end with text: its last token belongs to {names}, and a "
                "draft continues text. Add a token of text, or call generate() without assistant_model."
            )
        return sizes


def _unpadded(values: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows of `(batch, P)` values without padding, where `mask` is 0."""
    return [row[keep.bool()] for row, keep in zip(values, mask, strict=True)]


@contextmanager
def decoder_arguments(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Give the keyword arguments of this thread's last call of the text decoder of `model` in this context."""
    caught: dict[str, Any] = {}
    own_thread = threading.get_ident()  # another thread may be generating on the same model

    def catch(module: nn.Module, inputs: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        if threading.get_ident() == own_thread:
            caught.clear()
            caught.update(arguments)

    handle = model.get_decoder().register_forward_pre_hook(catch, with_kwargs=True)
    try:
        yield caught
    finally:
        handle.remove()
