"""TokenSwift's partial cache taken literally: one list of positions per row, layer and KV head, one token at a time."""

import sys

import torch

SINKS = 4


class Slots:
    """One list; entry s is the position that slot s holds.

    Args:
        scores (`list[float]`): Of the tokens that the build chooses from.
    """

    def __init__(self, scores, budget, recent):
        self.budget = budget
        numbers = list(range(len(scores)))
        size = min(len(scores), budget)
        kept = numbers[: min(SINKS, size)]
        for number in reversed(numbers):
            if len(kept) < min(size, SINKS + recent) and number not in kept:
                kept.append(number)
        rest = sorted((number for number in numbers if number not in kept), key=lambda number: -scores[number])
        self.positions = kept + rest[: size - len(kept)]
        self.victim = size - 1

    @property
    def room(self):
        """Tokens that still fit: free slots, and slots behind the sinks that have not been replaced."""
        return self.budget - len(self.positions) + max(0, self.victim - SINKS + 1)

    def add(self, position):
        if len(self.positions) < self.budget:
            self.positions.append(position)
        else:
            self.positions[self.victim] = position
            self.victim -= 1


class Attended:
    """Queries `(H, T, D)` and keys `(K, T, D)` of every layer for one text, from transformers' eager attention.

    Args:
        model (`PreTrainedModel`): A target; it is run once, without a cache.
        text (`list[int]`): Tokens.
    """

    def __init__(self, model, text):
        self.queries, self.keys = {}, {}
        module = sys.modules[type(model).__module__]
        eager, implementation = module.eager_attention_forward, model.config._attn_implementation

        def recording(layer, query, key, *args, **kwargs):
            self.queries[layer.layer_idx], self.keys[layer.layer_idx] = query[0], key[0]
            return eager(layer, query, key, *args, **kwargs)

        module.eager_attention_forward = recording
        model.set_attn_implementation("eager")
        try:
            with torch.no_grad():
                self.logits = model(torch.tensor([text]), use_cache=False).logits[0]
        finally:
            model.set_attn_implementation(implementation)
            module.eager_attention_forward = eager

    def scores(self, layer, head, query, length, score="logits"):
        """Scores of the first `length` positions by the query at position `query`, for one KV head, or all (`None`)."""
        queries, keys = self.queries[layer].double(), self.keys[layer].double()
        group = len(queries) // len(keys)
        found = [0.0] * length
        for h in range(len(queries)):
            if head is not None and h // group != head:
                continue
            key, vector = keys[h // group], queries[h, query]
            logits = [float(vector @ key[position]) for position in range(query + 1)]
            if score == "weights":
                logits = (torch.tensor(logits) * key.shape[1] ** -0.5).softmax(0).tolist()
            found = [total + logits[position] for position, total in enumerate(found)]
        return found
