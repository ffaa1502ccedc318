"""Logits processors that users may write.

The package looks for declarations and classes, and never at where a processor keeps its state. So there is an entry for
each way in which a declaration or a class may be found, and for each part of a call that a processor may depend on.
Those with state steer the text by the number of their calls, so one call more or less, or in another order, shows.
"""

import functools
import types
from typing import Any

import torch
from transformers import LogitsProcessor, SynthIDTextWatermarkingConfig, TemperatureLogitsWarper, WatermarkingConfig

from hf_longspec import ContextualPenaltyLogitsProcessor, StructuredOutput
from tests.robustness.user_code import ENDS, VOCAB, Applied, Entry
from tests.tiny_tokenizers import letter_tokenizer

# Every third call favours a token so much that it is emitted; the others leave a draft something to accept.
PERIOD, SPAN, STRENGTH = 3, 9, 30.0

PROCESSORS: dict[str, Entry] = {}


def kind(make: Any = None, **facts: Any) -> Any:
    """Add a function that makes a processor for a target to the list, under its name."""
    if make is None:
        return functools.partial(kind, **facts)
    PROCESSORS[make.__name__] = Entry(make, is_passed=True, **facts)
    return make


def steer(input_ids: torch.Tensor, scores: torch.Tensor, count: int) -> torch.Tensor:
    """Favour a token by a number of calls and the last token of each row."""
    if count % PERIOD:
        return scores
    return favour(scores, 3 + (count // PERIOD + input_ids[:, -1:]) % SPAN)


def favour(scores: torch.Tensor, tokens: torch.Tensor, strength: float = STRENGTH) -> torch.Tensor:
    """Favour a token of each row, of `(batch, 1)`."""
    return scores.scatter_add(1, tokens, scores.new_full(tokens.shape, strength))


def passed(*processors: Any, state: Any = lambda: None, **options: Any) -> Applied:
    """Return a call with processors and other options."""
    return Applied({"logits_processor": [*processors], **options}, state)


def of(one: Any, *others: Any) -> Applied:
    """Return a call with a processor whose attribute `calls` is its state."""
    return passed(one, *others, state=lambda: one.calls)


def counted(call: Any) -> Applied:
    """Return a call with a function that runs `call`, whose first argument has the number of its calls."""
    held = types.SimpleNamespace(calls=0)

    def processor(input_ids, scores):
        held.calls += 1
        return call(held, input_ids, scores)

    return passed(processor, state=lambda: held.calls)


class Counting:
    """A processor of a user, with state."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return steer(input_ids, scores, self.calls)


# Undeclared, by where a declaration is looked for.


@kind
def closure(model):
    return counted(lambda held, input_ids, scores: steer(input_ids, scores, held.calls))


@kind
def bound_method(model):
    owner = Counting()
    return passed(owner.__call__, state=lambda: owner.calls)


@kind
def attributes_of_another(model):
    """Those that it has not are looked up in another object, which declares something."""

    class Proxy:
        calls = 0
        __call__ = Counting.__call__

        def __getattr__(self, name):
            return getattr(Last, name)

    return of(Proxy())


@kind
def told_to_have_state(model):
    class Told(Counting):
        stateless, history_window = False, 2

    return of(Told())


class Trie:
    """A constraint of a user, with state."""

    def __init__(self):
        self.calls = []

    def allowed(self, row, ids):
        self.calls.append(row)
        return [3 + (len(self.calls) + int(ids[-1]) + place) % 9 for place in (0, 1, 4)]


@kind
def constraint_with_state(model):
    owner = Trie()
    return passed(state=lambda: owner.calls, prefix_allowed_tokens_fn=lambda row, ids: owner.allowed(row, ids))


@kind
def synthid(model):
    config = SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3, context_history_size=8)
    return Applied({"watermarking_config": config})


# Processors that are known, or truly declare what they depend on.


class Last(LogitsProcessor):
    """Penalises what followed the last token, by that token alone."""

    stateless = True

    def __call__(self, input_ids, scores):
        return favour(scores, 3 + (5 * input_ids[:, -1:] + 1) % 9, 8.0)


@kind(drafts=True)
def stateless(model):
    return passed(Last())


@kind(drafts=True)
def stateless_instance(model):
    class Plain:
        stateless = False

        def __call__(self, input_ids, scores):
            return favour(scores, 3 + (input_ids.sum(1, keepdim=True)) % 9, 8.0)

    one = Plain()
    one.stateless = True
    return passed(one)


@kind(drafts=True)
def history_free(model):
    class Rolled(LogitsProcessor):
        history_free = True

        def __call__(self, input_ids, scores):
            return scores.roll(1, -1)

    return passed(Rolled())


@kind(drafts=True)
def history_window(model):
    class Pairs(LogitsProcessor):
        history_window = 2

        def __call__(self, input_ids, scores):
            return favour(scores, 3 + (input_ids[:, -2:].sum(1, keepdim=True)) % 9, 8.0)

    return passed(Pairs())


@kind(drafts=True)
def contextual_penalty(model):
    return passed(ContextualPenaltyLogitsProcessor(3.0, 6))


@kind(drafts=True)
def structured_output(model):
    letters = letter_tokenizer("abcdefghijklmnopqrstuvwxyz.,!"[: VOCAB - 3])
    return passed(StructuredOutput(letters, regex="(ab|c|de){9}[a-z]*", eos_token_id=ENDS[0]))


# Processors that `generate` makes: fuzz.py has their options, but for this one.


@kind(drafts=True)
def watermark(model):
    return Applied({"watermarking_config": WatermarkingConfig(bias=5.0)})


@kind
def declared_beside_one_with_state(model):
    return of(Counting(), Last(), Last())


# What a processor gets and returns.


@kind(has_effect=False)
def keeps_its_arguments(model):
    """Fails if a tensor that it was given, or has returned, was changed later."""
    kept, copies = [], []

    def processor(input_ids, scores):
        result = scores + 0
        assert all(map(torch.equal, kept, copies)), "a kept tensor was changed"
        kept.extend((input_ids, scores, result))
        copies.extend(map(torch.clone, (input_ids, scores, result)))
        return result

    return passed(processor, state=lambda: [one.tolist() for one in kept if one.dtype == torch.long])


@kind
def half_precision(model):
    """Rounds, so that scores tie."""
    return counted(lambda held, input_ids, scores: (steer(input_ids, scores, held.calls) / 4).bfloat16())


@kind
def fails_at_its_sixth_call(model):
    def call(held, input_ids, scores):
        if held.calls == 6:
            raise LookupError(f"{held.calls} calls, {input_ids.tolist()}")
        return scores

    return counted(call)


# Processors that run models.


@kind
def runs_the_target(model):
    """Adds logits of the last five tokens alone."""
    return counted(lambda held, input_ids, scores: scores + model(input_ids[:, -5:]).logits[:, -1] * (held.calls % 2))


@kind(drafts=False, reason="runs the target")
def guidance(model):
    return Applied({"guidance_scale": 1.7})


# Subclasses: what their base declares, or is known for, does not hold for them.


def subclass(base, *arguments):
    class Mine(base):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            return steer(input_ids, super().__call__(input_ids, scores), self.calls)

    return of(Mine(*arguments))


PROCESSORS |= {
    "subclass_of_a_known_one": Entry(lambda model: subclass(TemperatureLogitsWarper, 0.9), is_passed=True),
    "subclass_of_a_declared_one": Entry(lambda model: subclass(Last), is_passed=True),
}
