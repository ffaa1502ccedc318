"""Logits processors that users may write.

The package looks for declarations and classes, and never at where a processor keeps its state. So there is an entry for
each way in which a declaration or a class may be found, and for each part of a call that a processor may depend on.
Those with state steer the text by the number of their calls, so one call more or less, or in another order, shows.
"""

import functools
import types
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkingConfig,
    TemperatureLogitsWarper,
    WatermarkingConfig,
)

from hf_longspec import ContextualPenaltyLogitsProcessor, StructuredOutput
from tests.robustness.user_code import ENDS, VOCAB, Applied, Entry
from tests.tiny_tokenizers import letter_tokenizer

# Every third call favours a token so much that it is emitted; the others leave a draft something to accept.
PERIOD, SPAN, STRENGTH = 3, 9, 30.0

PROCESSORS: dict[str, Entry] = {}


def kind(make: Any = None, has_model: bool = False, **facts: Any) -> Any:
    """Add a function that makes a processor to the list, under its name; `has_model` if it takes the target."""
    if make is None:
        return functools.partial(kind, has_model=has_model, **facts)
    apply = make if has_model else lambda model: make()
    PROCESSORS[make.__name__] = Entry(apply, is_passed=True, **facts)
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


def counted(call: Any, **state: Any) -> Applied:
    """Return a call with a function that runs `call`, whose first argument has `calls` and other attributes."""
    held = types.SimpleNamespace(calls=0, **state)

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
def closure():
    return counted(lambda held, input_ids, scores: steer(input_ids, scores, held.calls))


@kind
def attribute():
    return of(Counting())


@kind
def bound_method():
    owner = Counting()
    return passed(owner.__call__, state=lambda: owner.calls)


@kind
def attributes_of_another():
    """Those that it has not are looked up in another object, which declares something."""

    class Proxy:
        calls = 0
        __call__ = Counting.__call__

        def __getattr__(self, name):
            return getattr(Last, name)

    return of(Proxy())


@kind
def told_to_have_state():
    class Told(Counting):
        stateless, history_window = False, 2

    return of(Told())


# State on what others have, too.


@kind(has_model=True)
def attribute_of_the_target(model):
    model.calls = 0

    def processor(input_ids, scores):
        model.calls += 1
        return steer(input_ids, scores, model.calls)

    return passed(processor, state=lambda: vars(model).pop("calls"))


@kind(is_sampled=False)  # how many numbers sampling has drawn by a call is not promised
def torch_random_numbers():
    torch.manual_seed(5)
    return passed(lambda input_ids, scores: steer(input_ids, scores, int(torch.randint(1, 12, ()))))


# Processors of libraries that a user has changed.


@kind
def attribute_of_transformers():
    class Factor:
        """It changes with its use."""

        calls = 0

        def __rmul__(self, other):
            return other * 1.5

        def __rtruediv__(self, other):
            self.calls += 1
            return other / (-3.0 if self.calls % 3 == 0 else 1.0)

    one = RepetitionPenaltyLogitsProcessor(1.5)
    one.penalty = Factor()
    return passed(one, state=lambda: one.penalty.calls)


class Trie:
    """A constraint of a user, with state."""

    def __init__(self):
        self.calls = []

    def allowed(self, row, ids):
        self.calls.append(row)
        return [3 + (len(self.calls) + int(ids[-1]) + place) % 9 for place in (0, 1, 4)]


@kind
def constraint_with_state():
    owner = Trie()
    return passed(state=lambda: owner.calls, prefix_allowed_tokens_fn=lambda row, ids: owner.allowed(row, ids))


@kind
def synthid():
    config = SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3, context_history_size=8)
    return Applied({"watermarking_config": config})


# Processors that are known, or truly declare what they depend on.


class Last(LogitsProcessor):
    """Penalises what followed the last token, by that token alone."""

    stateless = True

    def __call__(self, input_ids, scores):
        return favour(scores, 3 + (5 * input_ids[:, -1:] + 1) % 9, 8.0)


@kind(drafts=True)
def stateless():
    return passed(Last())


@kind(drafts=True)
def stateless_instance():
    class Plain:
        stateless = False

        def __call__(self, input_ids, scores):
            return favour(scores, 3 + (input_ids.sum(1, keepdim=True)) % 9, 8.0)

    one = Plain()
    one.stateless = True
    return passed(one)


@kind(drafts=True)
def stateless_function():
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 4

    def processor(input_ids, scores):
        return scores + table[input_ids[:, -1]]

    processor.stateless = True
    return passed(processor)


@kind(drafts=True)
def history_free():
    class Rolled(LogitsProcessor):
        history_free = True

        def __call__(self, input_ids, scores):
            return scores.roll(1, -1)

    return passed(Rolled())


@kind(drafts=True)
def history_window():
    class Pairs(LogitsProcessor):
        history_window = 2

        def __call__(self, input_ids, scores):
            return favour(scores, 3 + (input_ids[:, -2:].sum(1, keepdim=True)) % 9, 8.0)

    return passed(Pairs())


@kind(drafts=True)
def contextual_penalty():
    return passed(ContextualPenaltyLogitsProcessor(3.0, 6))


@kind(drafts=True)
def structured_output():
    letters = letter_tokenizer("abcdefghijklmnopqrstuvwxyz.,!"[: VOCAB - 3])
    return passed(StructuredOutput(letters, regex="(ab|c|de){9}[a-z]*", eos_token_id=ENDS[0]))


# Options for which `generate` makes processors; some prepare tensors in their first call.
OF_TRANSFORMERS = {
    "penalties": {"repetition_penalty": 1.6, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "bad words": {"bad_words_ids": [[5], [6, 7]]},
    "bias of sequences": {"sequence_bias": {(5,): 2.0, (6, 7): -3.0}},
    "forced end": {"forced_eos_token_id": 10, "exponential_decay_length_penalty": (3, 1.2)},
    "suppressed": {"begin_suppress_tokens": [4], "suppress_tokens": [5, 6]},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=5.0)},
}
PROCESSORS |= {
    name: Entry(lambda model, options=options: Applied({**options}), is_passed=True, drafts=True, has_effect=None)
    for name, options in OF_TRANSFORMERS.items()
}


@kind
def declared_beside_one_with_state():
    return of(Counting(), Last(), Last())


# What a processor gets and returns.


@kind
def matcher():
    """Advances by one token, and refuses a text that does not continue the last one."""
    seen = []

    def processor(input_ids, scores):
        texts = input_ids.tolist()
        assert not seen or [text[:-1] for text in texts] == seen[-1], "the text does not continue the last one"
        seen.append(texts)
        allowed = torch.tensor([[3 + (sum(text) * 7 + place) % 9 for place in range(3)] for text in texts])
        return scores + torch.full_like(scores, -torch.inf).scatter(1, allowed, 0)

    return passed(processor, state=lambda: seen[-1])


@kind(has_effect=False)
def whole_batch():
    """Fails unless all rows come, each longer by a token than at the last call, with scores as `generate` has them."""

    def call(held, input_ids, scores):
        held.shape = held.shape or input_ids.shape
        assert input_ids.shape == (held.shape[0], held.shape[1] + held.calls - 1), "not the whole batch"
        assert scores.shape == (len(input_ids), VOCAB) and scores.dtype == torch.float32, "not the scores of generate"
        assert input_ids.dtype == torch.long and not torch.is_grad_enabled()
        assert input_ids.is_contiguous() and scores.is_contiguous(), "not in one piece"
        return scores

    return counted(call, shape=None)


@kind(has_effect="batch")
def scores_of_ended_rows():
    """Adds the scores of rows that have ended to those of the others."""

    def processor(input_ids, scores):
        has_ended = input_ids[:, -1] == 0
        return scores + 2.0 * scores[has_ended].sum(0)

    return passed(processor)


@kind(has_effect=False)
def keeps_its_arguments():
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
def half_precision():
    """Rounds, so that scores tie."""
    return counted(lambda held, input_ids, scores: (steer(input_ids, scores, held.calls) / 4).bfloat16())


@kind
def fails_at_its_sixth_call():
    def call(held, input_ids, scores):
        if held.calls == 6:
            raise LookupError(f"{held.calls} calls, {input_ids.tolist()}")
        return scores

    return counted(call)


# Processors that run models.


@kind(has_model=True)
def runs_the_target(model):
    """Adds logits of the last five tokens alone."""
    return counted(lambda held, input_ids, scores: scores + model(input_ids[:, -5:]).logits[:, -1] * (held.calls % 2))


@kind(has_model=True, is_sampled=False)  # the inner call draws from the seed, too
def generates_with_the_target(model):
    def call(held, input_ids, scores):
        mask = torch.ones_like(input_ids[:, -4:])
        options = {"attention_mask": mask, "max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
        return favour(scores, model.generate(input_ids[:, -4:], **options)[:, -1:], 4.0 * (held.calls % 2))

    return counted(call)


@kind(drafts=False, reason="runs the target")
def guidance():
    return Applied({"guidance_scale": 1.7})


# Subclasses: what their base declares, or is known for, does not hold for them.


def subclass(base, *arguments):
    class Mine(base):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            return steer(input_ids, super().__call__(input_ids, scores), self.calls)

    return of(Mine(*arguments))


BASES = {TemperatureLogitsWarper: (0.9,), Last: ()}
PROCESSORS |= {
    f"subclass_of_{base.__name__}": Entry(
        lambda model, base=base, arguments=arguments: subclass(base, *arguments), is_passed=True
    )
    for base, arguments in BASES.items()
}
