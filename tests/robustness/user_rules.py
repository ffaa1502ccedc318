"""Logits processors of users by what they do with their arguments and with other objects of the call."""

import functools
import types

import torch
from transformers.generation.streamers import BaseStreamer

from hf_longspec.generation.cache import CACHE_NAME
from tests.robustness.user_processors import VOCAB, Made, Steering, counted, favour, kind, steer
from tests.tiny_targets import tiny_target
from tests.user_objects import Answer

# What the result depends on.


@kind
def thinking_budget():
    """Forces a token from the ninth call on."""

    def call(held, input_ids, scores):
        return favour(scores, torch.full_like(input_ids[:, -1:], 7)) if held.calls > 8 else scores

    return counted(call)


@kind
def late_by_calls():
    """Nothing shows before the sixth call."""
    held = types.SimpleNamespace(late=0)

    def processor(input_ids, scores):
        held.length = held.__dict__.get("length", input_ids.shape[1])
        held.late += input_ids.shape[1] > held.length + 5
        return steer(input_ids, scores, held.late) if held.late else scores

    return Made([processor], state=lambda: held.late)


@kind
def late_by_a_token():
    """Counts from the first text on that has a certain token in its second half."""
    held = types.SimpleNamespace(late=0)

    def processor(input_ids, scores):
        held.late += held.late > 0 or bool((input_ids[:, 14:] % 3 == 0).any())
        return steer(input_ids, scores, held.late) if held.late else scores

    return Made([processor], state=lambda: held.late)


@kind
def list_per_row():
    seen = {}

    def processor(input_ids, scores):
        for row, token in enumerate(input_ids[:, -1].tolist()):
            seen.setdefault(row, []).append(token)
        sums = torch.tensor([[3 + sum(tokens) % 8] for tokens in seen.values()])
        return favour(scores, sums, 6.0)

    return Made([processor], state=lambda: seen)


@kind
def repetition_per_row():
    """Penalises what was emitted since the call began, as kept from call to call."""
    counts = []

    def processor(input_ids, scores):
        if not counts:
            counts.append(torch.zeros_like(scores))
        else:
            counts[0].scatter_add_(1, input_ids[:, -1:], torch.ones(len(input_ids), 1))
        return scores - 2.5 * counts[0]

    return Made([processor], state=lambda: counts[0].tolist())


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

    return Made([processor], state=lambda: seen[-1])


@kind(has_effect=False)
def whole_batch():
    """Fails unless all rows come, each longer by a token than at the last call, with scores as `generate` has them."""

    def call(held, input_ids, scores):
        held.shape = held.shape or input_ids.shape
        assert input_ids.shape == (held.shape[0], held.shape[1] + held.calls - 1), "not the whole batch"
        assert scores.shape == (len(input_ids), VOCAB) and scores.dtype == torch.float32, "not the scores of generate"
        assert input_ids.dtype == torch.long and not torch.is_grad_enabled()
        return scores

    return counted(call, shape=None)


@kind(has_effect="batch")
def mean_of_rows():
    return Made([lambda input_ids, scores: scores - 0.8 * scores.mean(0)])


@kind(has_effect="batch")
def tokens_of_other_rows():
    """Penalises what the rows emitted last."""
    return Made([lambda input_ids, scores: scores.index_add(1, input_ids[:, -1].unique(), _penalty(input_ids, scores))])


def _penalty(input_ids, scores):
    return torch.full((len(scores), len(input_ids[:, -1].unique())), -5.0 * (len(scores) > 1))


@kind(has_effect="batch")
def scores_of_ended_rows():
    """Adds the scores of rows that have ended to those of the others."""

    def processor(input_ids, scores):
        has_ended = input_ids[:, -1] == 0
        return scores + 2.0 * scores[has_ended].sum(0)

    return Made([processor])


@kind
def last_scores():
    """Adds the scores of the last call, of all rows."""
    kept = []

    def processor(input_ids, scores):
        kept.append(scores)
        return scores + (0.7 * kept[-2].roll(1, 0) if len(kept) > 1 else 0)

    return Made([processor], state=lambda: len(kept))


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

    return Made([processor], state=lambda: [one.tolist() for one in kept if one.dtype == torch.long])


@kind
def flat_view():
    """Needs tensors that lie in one piece."""
    return counted(
        lambda held, input_ids, scores: steer(
            input_ids, scores.view(-1).view(scores.shape), held.calls + int(input_ids.view(-1)[-1])
        )
    )


@kind
def in_place():
    def call(held, input_ids, scores):
        scores[:, 3 + held.calls % 9] += 8.0
        return scores

    return counted(call)


@kind
def double_precision():
    return counted(lambda held, input_ids, scores: steer(input_ids, scores.double(), held.calls))


@kind
def half_precision():
    """Rounds, so that scores tie."""
    return counted(lambda held, input_ids, scores: (steer(input_ids, scores, held.calls) / 4).bfloat16())


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


@kind
def guidance():
    return Made(kwargs={"guidance_scale": 1.7})


@functools.cache
def other_model():
    """A model beside the target."""
    return tiny_target("llama", seed=8, vocab_size=VOCAB, num_hidden_layers=1)


@kind
def runs_another_model():
    """On the cache of its last call, so every text has to continue the last one."""

    def call(held, input_ids, scores):
        text = input_ids if held.cache is None else input_ids[:, -1:]
        out = other_model()(text, **{CACHE_NAME: held.cache}, use_cache=True)
        held.cache = out[CACHE_NAME]
        return scores - out.logits[:, -1]

    return counted(call, cache=None)


# Processors that share state with other objects of the call.


@kind
def shared_with_a_criterion():
    held = types.SimpleNamespace(calls=0)

    def processor(input_ids, scores):
        held.calls += 1
        return steer(input_ids, scores, held.calls)

    def criterion(input_ids, scores):
        held.calls += 1
        return input_ids.new_full((len(input_ids),), held.calls > 19, dtype=torch.bool)

    return Made([processor], {"stopping_criteria": [Answer(criterion)]}, state=lambda: held.calls)


@kind
def shared_with_a_criterion_that_ends_rows():
    held = types.SimpleNamespace(calls=0)

    def processor(input_ids, scores):
        held.calls += 1
        return steer(input_ids, scores, held.calls)

    def criterion(input_ids, scores):
        return (input_ids[:, -1] + held.calls) % 7 == 2

    return Made([processor], {"stopping_criteria": [Answer(criterion)]}, state=lambda: held.calls)


class Counting(BaseStreamer):
    calls = 0

    def put(self, value):
        self.calls += 1

    def end(self):
        self.calls += 100


@kind(has_effect="single")  # a streamer takes one row
def shared_with_a_streamer():
    streamer = Counting()
    processor = lambda input_ids, scores: steer(input_ids, scores, streamer.calls)  # noqa: E731
    return Made([processor], {"streamer": streamer}, state=lambda: streamer.calls)


@kind
def two_that_share():
    """The order of both matters."""
    log = []

    def first(input_ids, scores):
        log.append("first")
        return scores

    def second(input_ids, scores):
        log.append("second")
        return steer(input_ids, scores, len(log) // 2 + 5 * (log[-2] == "second"))

    return Made([first, second], state=lambda: log)


@kind
def fails_at_its_sixth_call():
    def call(held, input_ids, scores):
        if held.calls == 6:
            raise LookupError(f"{held.calls} calls, {input_ids.tolist()}")
        return scores

    return counted(call)


@kind
def first_calls_alone():
    return counted(lambda held, ids, scores: favour(scores, ids[:, -2:-1]) if held.calls < 5 else scores)


@kind
def copy_of_itself():
    """A copy answers as one that was never called."""

    class Fresh(Steering):
        calls = 0

        def __deepcopy__(self, memo):
            return type(self)()

        def count(self):
            self.calls += 1
            return self.calls

    one = Fresh()
    return Made([one], state=lambda: one.calls)


@kind
def uncopyable():
    class Fixed(Steering):
        calls = 0

        def __deepcopy__(self, memo):
            raise TypeError("not to be copied")

        __copy__ = __reduce_ex__ = __deepcopy__

        def count(self):
            self.calls += 1
            return self.calls

    one = Fixed()
    return Made([one], state=lambda: one.calls)


@kind
def equal_to_anything():
    """State that compares as equal."""

    class Equal:
        number = 0

        def __eq__(self, other):
            return True

        __hash__ = None

        def __repr__(self):
            return "the same"

    class Mine(Steering):
        held = Equal()

        def count(self):
            self.held.number += 1
            return self.held.number

    Mine.held = Equal()
    return Made([Mine()], state=lambda: Mine.held.number)


@kind
def swaps_its_class():
    class Second(Steering):
        def count(self):
            type(self).turns += 1
            self.__class__ = First
            return type(self).turns

    class First(Steering):
        turns = 0

        def count(self):
            Second.turns = First.turns = First.turns + 1
            self.__class__ = Second
            return First.turns

    return Made([First()], state=lambda: First.turns)
