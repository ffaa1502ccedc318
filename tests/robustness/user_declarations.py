"""Logits processors of libraries, as they are and as users change them, and those that declare what they depend on."""

import copy
import functools

import torch
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkingConfig,
    TemperatureLogitsWarper,
    WatermarkingConfig,
)
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from hf_longspec import ContextualPenaltyLogitsProcessor, StructuredOutput
from tests.robustness.user_processors import ENDS, VOCAB, Made, counted, favour, kind, steer
from tests.tiny_tokenizers import letter_tokenizer

# Processors of libraries that a user has changed.


@kind
def subclass_of_transformers():
    class Mine(TemperatureLogitsWarper):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            return steer(input_ids, super().__call__(input_ids, scores), self.calls)

    one = Mine(0.9)
    return Made([one], state=lambda: one.calls)


@kind
def subclass_of_the_contextual_penalty():
    """What its base says of a window does not hold for it."""

    class Mine(ContextualPenaltyLogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            return steer(input_ids, super().__call__(input_ids, scores), self.calls)

    one = Mine(1.2, 5)
    return Made([one], state=lambda: one.calls)


@kind
def subclass_of_a_declared_class():
    class Mine(Last):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            return steer(input_ids, super().__call__(input_ids, scores), self.calls)

    one = Mine()
    return Made([one], state=lambda: one.calls)


class Factor:
    """A factor that changes with its use."""

    calls = 0

    def __rmul__(self, other):
        return other * 1.5

    def __rtruediv__(self, other):
        self.calls += 1
        return other / (-3.0 if self.calls % 3 == 0 else 1.0)


@kind
def attribute_of_transformers():
    one, factor = RepetitionPenaltyLogitsProcessor(1.5), Factor()
    one.penalty = factor
    return Made([one], state=lambda: factor.calls)


@kind
def call_of_an_instance_of_transformers():
    """An attribute that transformers calls, in an object of its exact class."""
    calls = []
    one = PrefixConstrainedLogitsProcessor(None, 1)
    one._prefix_allowed_tokens_fn = lambda row, ids: (
        calls.append(0) or [3 + (len(calls) + place) % 9 for place in (0, 4)]
    )
    return Made([one], state=lambda: len(calls))


@kind
def constraint_with_state():
    calls = []

    def allowed(row, ids):
        calls.append(row)
        return [3 + (len(calls) + int(ids[-1]) + place) % 9 for place in (0, 1, 4)]

    return Made(kwargs={"prefix_allowed_tokens_fn": allowed}, state=lambda: calls)


@kind
def constraint_of_a_method():
    class Trie:
        calls = 0

        def allowed(self, row, ids):
            self.calls += 1
            return [3 + (self.calls + int(ids[-1]) + place) % 9 for place in (0, 1, 4)]

    trie = Trie()
    return Made([PrefixConstrainedLogitsProcessor(trie.allowed, 1)], state=lambda: trie.calls)


@kind
def watermark():
    return Made(kwargs={"watermarking_config": WatermarkingConfig(bias=5.0)})


@kind
def synthid():
    config = SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3, context_history_size=8)
    return Made(kwargs={"watermarking_config": config})


# Processors that truly declare what they depend on.


class Last(LogitsProcessor):
    """Penalises what followed the last token, by that token alone."""

    stateless = True

    def __call__(self, input_ids, scores):
        return favour(scores, 3 + (5 * input_ids[:, -1:] + 1) % 9, 8.0)


@kind(is_declared=True)
def stateless():
    return Made([Last()])


@kind(is_declared=True)
def stateless_instance():
    class Plain:
        stateless = False

        def __call__(self, input_ids, scores):
            return favour(scores, 3 + (input_ids.sum(1, keepdim=True)) % 9, 8.0)

    one = Plain()
    one.stateless = True
    return Made([one])


@kind(is_declared=True)
def stateless_function():
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 4

    def processor(input_ids, scores):
        return scores + table[input_ids[:, -1]]

    processor.stateless = True
    return Made([processor])


@kind(is_declared=True)
def history_free():
    class Rolled(LogitsProcessor):
        history_free = True

        def __call__(self, input_ids, scores):
            return scores.roll(1, -1)

    return Made([Rolled()])


@kind(is_declared=True)
def history_window():
    class Pairs(LogitsProcessor):
        history_window = 2

        def __call__(self, input_ids, scores):
            return favour(scores, 3 + (input_ids[:, -2:].sum(1, keepdim=True)) % 9, 8.0)

    return Made([Pairs()])


@kind(is_declared=True)
def contextual_penalty():
    return Made([ContextualPenaltyLogitsProcessor(3.0, 6)])


@kind(is_declared=True)
def known_ones():
    return Made(kwargs={"repetition_penalty": 1.6, "no_repeat_ngram_size": 2, "suppress_tokens": [5, 6]})


@functools.cache
def _letters():
    return letter_tokenizer("abcdefghijklmnopqrstuvwxyz.,!"[: VOCAB - 3])


@kind(is_declared=True)
def structured_output():
    return Made([StructuredOutput(_letters(), regex="(ab|c|de){9}[a-z]*", eos_token_id=ENDS[0])])


@kind
def declared_beside_one_with_state():
    made = counted(lambda held, input_ids, scores: steer(input_ids, scores, held.calls))
    return Made([Last(), *made.processors, copy.copy(Last())], state=made.state)
