"""TokenSwift's partial cache taken literally: one list of positions per row, layer and KV head, one token at a time."""

import sys

import torch

SINKS = 4


class Slots:
    """One list; entry s is the position that slot s holds. The build chooses by the scores."""

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
        """Tokens that still fit: free slots, and slots after the sinks that have not been replaced."""
        return self.budget - len(self.positions) + max(0, self.victim - SINKS + 1)

    def add(self, position):
        if len(self.positions) < self.budget:
            self.positions.append(position)
        else:
            self.positions[self.victim] = position
            self.victim -= 1


class Attended:
    """Queries `(H, T, D)` and keys `(K, T, D)` of every layer for one text, from transformers' eager attention."""

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

    def scores(self, layer, head, query, length):
        """`q . k` of the query at one position with each of the first ones, summed over the heads of a KV head."""
        group = len(self.queries[layer]) // len(self.keys[layer])
        products = [self._products(layer, h) for h in range(head * group, (head + 1) * group)]
        return [sum(float(product[query, position]) for product in products) for position in range(length)]

    def weights(self, layer, query, length):
        """Attention probabilities, summed over all heads, up to a factor."""
        scaling = self.keys[layer].shape[-1] ** -0.5
        heads = range(len(self.queries[layer]))
        weights = [(self._products(layer, h)[query, : query + 1] * scaling).softmax(0) for h in heads]
        return [sum(float(weight[position]) for weight in weights) for position in range(length)]

    def _products(self, layer, h):
        group = len(self.queries[layer]) // len(self.keys[layer])
        return self.queries[layer][h].double() @ self.keys[layer][h // group].double().T
