"""Text that follows a JSON schema, a regular expression, a grammar, or is one of some texts.

[`StructuredOutput`] forbids every token after which the text could not be completed. The parser is that of llguidance
(https://github.com/guidance-ai/llguidance), which takes tokens back and names those that a grammar forces. With a
draft, the loop asks it about all nodes of a tree (`generation/special_cases/grammar.py`).
"""

import copy
import json
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import LogitsProcessor
from transformers.utils import logging

try:  # by name, so that its types are not read, which only some environments have
    llguidance: Any = import_module("llguidance")
    from_tokenizer: Any = import_module("llguidance.hf").from_tokenizer
except ImportError:  # it comes with hf_longspec[grammar]
    llguidance = from_tokenizer = None

logger = logging.get_logger(__name__)
# Vocabularies as the parser reads them, which takes up to a second, by tokenizer and end tokens.
_vocabularies: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


class Position:
    """A parser after some tokens of one text.

    Args:
        vocabulary (`llguidance.LLTokenizer`): Tokens as bytes.
        grammar (`str`): In the format of llguidance.
    """

    def __init__(self, vocabulary: Any, grammar: str):
        self._matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
        self._vocab_size = vocabulary.vocab_size  # the parser ends at a token beyond it
        self._tokens: list[int] = []

    def seek(self, tokens: Sequence[int]) -> bool:
        """Move to the end of a text; return whether the grammar allows it."""
        known, tokens = self._tokens, list(tokens)
        common = min(len(known), len(tokens))
        if known[:common] != tokens[:common]:
            common = next(place for place, pair in enumerate(zip(known, tokens, strict=False)) if pair[0] != pair[1])
        self.back(len(known) - common)
        return all(map(self.push, tokens[common:]))

    def push(self, token: int) -> bool:
        """Move on by a token; return whether the grammar allows it."""
        is_allowed = token < self._vocab_size and self._matcher.try_consume_tokens([token]) == 1
        if is_allowed:
            self._tokens.append(token)
        return is_allowed

    def back(self, count: int) -> None:
        """Take the last tokens back."""
        if count:
            self._matcher.rollback(count)
            del self._tokens[-count:]

    def forced(self) -> list[int]:
        """Return the tokens of the only continuation, as the tokenizer would split it; empty if there are several."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    def fill(self, bits: torch.Tensor) -> None:
        """Write the tokens that may come next, a bit for each, to `bits` `(words,)` in int32.

        Raises:
            ValueError: If the parser gives up, such as on a grammar that is too complex.
        """
        self._matcher.unsafe_compute_mask_ptr(bits.data_ptr(), bits.nbytes)
        if self._matcher.is_error():
            raise ValueError(f"the grammar cannot be followed any further: {_first_line(self._matcher.get_error())}")

    def tour(self, tokens: Sequence[int], parents: Sequence[int], valid: Sequence[int], ends: Any) -> Iterator[int]:
        """Yield the nodes of a tree that the grammar allows, while this position is after each of them.

        It begins after the root, and returns there. Nodes with end tokens are left out.
        """
        children: list[list[int]] = [[] for _ in tokens]
        for node in range(len(tokens) - 1, 0, -1):
            if valid[node] and tokens[node] not in ends:
                children[parents[node]].append(node)
        start, pending = len(self._tokens), [(0, 0)]
        while pending:
            node, depth = pending.pop()
            self.back(len(self._tokens) - start - max(depth - 1, 0))
            if node and not self.push(tokens[node]):
                continue
            yield node
            pending += ((child, depth + 1) for child in children[node])
        self.back(len(self._tokens) - start)


class StructuredOutput(LogitsProcessor):
    """Allow only tokens after which the generated text can follow a structure, for `generate` with and without a draft.

    ```python
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    model.generate(**inputs, logits_processor=[StructuredOutput(tokenizer, json_schema=schema)], assistant_model=draft)
    ```

    The text begins where the prompt ends, and ends with an end token; `max_new_tokens` may cut it off. An object may be
    used again, for any prompts that do not continue its last text by one token.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Fast tokenizer of the model.
        json_schema (`dict` or `str`, *optional*): JSON schema, also as JSON or a class of pydantic; `{}` for any JSON.
        regex (`str`, *optional*): Regular expression of the whole text, in the syntax of Rust.
        grammar (`str`, *optional*): Context-free grammar in llguidance's variant of Lark.
        choices (`Sequence[str]`, *optional*): Texts of which one is written.
        whitespace (`bool`, *optional*, defaults to `False`): Whether JSON may have any whitespace between its parts.
            Without it, JSON is written in one line, as by `json.dumps`, so that the structure decides more tokens.
        eos_token_id (`int` or `list[int]`, *optional*): End tokens, by default that of the tokenizer.

    Raises:
        ImportError: If llguidance is not installed.
        ValueError: If not exactly one structure is given, or it cannot be followed.
    """

    # the loop shows it every text once, and its result depends on the text alone
    stateless = True
    is_grammar = True

    def __init__(
        self,
        tokenizer: Any,
        *,
        json_schema: Any = None,
        regex: str | None = None,
        grammar: str | None = None,
        choices: Sequence[str] | None = None,
        whitespace: bool = False,
        eos_token_id: int | list[int] | None = None,
    ):
        if llguidance is None:
            raise ImportError("StructuredOutput needs llguidance: pip install 'hf_longspec[grammar]'")
        given = {"json_schema": json_schema, "regex": regex, "grammar": grammar, "choices": choices}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise ValueError(f"structures {names}: expected exactly one of {', '.join(given)}.")
        ends = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
        self.ends = frozenset(ends if isinstance(ends, list | tuple) else [ends])
        if None in self.ends:
            raise ValueError("the tokenizer has no end token, with which a text ends. Pass eos_token_id.")
        known, key = _vocabularies.setdefault(tokenizer, {}), tuple(sorted(self.ends))
        if key not in known:
            known[key] = from_tokenizer(tokenizer, eos_token=list(key))
        self.vocabulary = known[key]
        self.grammar = _grammar(names[0], given[names[0]], whitespace)
        is_wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(self.grammar, self.vocabulary)
        if is_wrong:
            raise ValueError(f"{names[0]}={str(given[names[0]])[:60]!r} cannot be followed: {_first_line(messages[0])}")
        for message in messages:
            logger.warning("%s: %s", names[0], message)
        self._positions: dict[int, Position] = {}
        self._start: int | None = None  # where the text begins, if that is known for all calls
        self._last: tuple[int, torch.Tensor] | None = None  # where the last text began, and the text

    def bound(self, start: int) -> "StructuredOutput":
        """Return a copy for one call of `generate`, whose texts begin in column `start`."""
        one = copy.copy(self)
        one._start, one._positions = start, {}
        return one

    def masked(self, bits: torch.Tensor, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `scores` `(n, vocab)` with -inf for every token that is not among `bits` `(n, words)`."""
        return only_allowed(scores, bits)

    def position(self, row: int) -> Position:
        """Return the parser of a row."""
        if row not in self._positions:
            self._positions[row] = Position(self.vocabulary, self.grammar)
        return self._positions[row]

    def after(self, row: int, text: Sequence[int], drafted: Sequence[int] = ()) -> Position | None:
        """Return the parser of a row after its text and drafted tokens; `None` where any token may follow.

        That is the case after an end token, which completes the structure and need not end the text, and after drafted
        tokens that the structure does not allow.

        Raises:
            ValueError: If the text does not follow the structure.
        """
        if not self.ends.isdisjoint((*text, *drafted)):
            return None
        position = self.position(row)
        if not position.seek(text):
            raise ValueError(
                f"the text of row {row} does not follow the structure, as another logits processor or setting chose a "
                "token that is not allowed. Pass StructuredOutput last, and no forced tokens."
            )
        return position if position.seek([*text, *drafted]) else None

    def bits(self, count: int) -> torch.Tensor:
        """Return masks `(count, words)` on the host that allow every token."""
        return torch.full((count, -(-self.vocabulary.vocab_size // 32)), -1, dtype=torch.int32)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `scores` `(batch, vocab)` with -inf for tokens that may not follow `input_ids` `(batch, length)`."""
        texts, bits = input_ids[:, self._start_of(input_ids) :].tolist(), self.bits(len(input_ids))
        for row, text in enumerate(texts):
            if position := self.after(row, text):
                position.fill(bits[row])
        return only_allowed(scores, bits)

    def _start_of(self, input_ids: torch.Tensor) -> int:
        """Return the column in which the generated text begins: where it began, if the text grew by one token."""
        if self._start is not None:
            return self._start
        start, last = self._last or (0, input_ids)
        if input_ids.shape != (len(last), last.shape[1] + 1) or not torch.equal(input_ids[:, :-1], last):
            start = input_ids.shape[1]
        self._last = start, input_ids
        return start


def only_allowed(scores: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Return `scores` `(n, vocab)` with -inf where the bit of a token in `bits` `(n, words)` is 0, or is missing."""
    bits = bits.to(scores.device, non_blocking=True)
    places = torch.arange(32, dtype=torch.int32, device=scores.device)
    is_allowed = (bits[..., None] >> places & 1).bool().flatten(1)[:, : scores.shape[1]]
    is_allowed = torch.nn.functional.pad(is_allowed, (0, scores.shape[1] - is_allowed.shape[1]))
    return scores.masked_fill(~is_allowed, -torch.inf)


def _grammar(kind: str, value: Any, whitespace: bool) -> Any:
    """Return a structure in the format of llguidance."""
    make = llguidance.LLMatcher
    if kind == "regex":
        return make.grammar_from_regex(value)
    if kind == "grammar":
        return make.grammar_from_lark(value)
    if kind == "choices":
        if isinstance(value, str) or not value or not all(isinstance(one, str) and one for one in value):
            raise ValueError(f"choices={value!r}: expected a list of texts that are not empty.")
        return make.grammar_from_lark(f"start: {' | '.join(map(json.dumps, value))}")
    schema = value.model_json_schema() if hasattr(value, "model_json_schema") else value
    if isinstance(schema, str):
        schema = json.loads(schema)
    form: Any = {"whitespace_flexible": whitespace}
    if not whitespace:
        form |= {"item_separator": ", ", "key_separator": ": "}
    return make.grammar_from_json_schema(schema, overrides=form)


def _first_line(message: str) -> str:
    """The first line of an error of the parser, and the one with the reason, before which the text may be shown."""
    first, *others = message.strip().splitlines()
    return " ".join([first, *(line for line in others if line.startswith("error: "))])[:300]
