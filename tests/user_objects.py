"""What users pass to `generate`: a streamer that records, rules as functions, and bombs for the code of users."""

import torch
from transformers import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer


class Recorder(BaseStreamer):
    """Keeps what it is given: the prompt first, then one tensor per position."""

    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        assert not self.ends
        self.puts.append(value.tolist())

    def end(self):
        self.ends += 1


class Answer(StoppingCriteria):
    """Answers by a function of the text and the scores."""

    def __init__(self, function):
        self.function = function

    def __call__(self, input_ids, scores, **kwargs):
        return self.function(input_ids, scores)


class Bomb:
    """Raises once: at its n-th call since it was armed."""

    def __init__(self, calls=1, error=KeyboardInterrupt, armed=lambda: True):
        self.calls, self.error, self.armed = calls, error, armed

    def __call__(self):
        self.calls -= self.armed()
        if self.calls == 0 and self.armed():
            raise self.error

    def processor(self):
        """A logits processor that changes nothing, so that a draft may call it more often."""
        return BombProcessor(self)

    def criterion(self):
        """A stopping criterion that stops nothing."""
        return Answer(lambda input_ids, scores: self() or input_ids.new_zeros(len(input_ids), dtype=torch.bool))


class BombProcessor(LogitsProcessor):
    stateless = True

    def __init__(self, bomb):
        self.bomb = bomb

    def __call__(self, input_ids, scores):
        self.bomb()
        return scores
