"""Floors of decoding: the least time that memory traffic and arithmetic leave for a step, computed, not measured.

Weights are read while their matrix products run, keys and values while attention runs; the longer of the two counts in
each pair, and the pairs follow each other. Activations, norms and launches are left out, so nothing can be faster than
a floor, and a real step is slower. Whether a draft can pay follows from

    c = time of a step without a draft / time of an iteration        speed-up <= c * tau

where tau is the number of tokens an iteration emits. Below tau = 1 / c a draft slows down whatever it proposes.
"""

from dataclasses import asdict, dataclass
from typing import Any

from .roofline_shapes import Machine, TargetShape

FLOPS_PER_WEIGHT = 2  # a multiplication and an addition
FLOPS_PER_SCORE = 4  # one of each for q . k, and again for the weighted sum of values


@dataclass(frozen=True)
class Iteration:
    """Floor of one iteration of a drafter.

    Args:
        drafter (`str`): Which, with its settings.
        draft_ms (`float`): Drafting.
        verify_ms (`float`): The verification.
        c (`float`): Time of a step without a draft over that of the iteration.
        max_tau (`int`): Most tokens that an iteration can emit.
    """

    drafter: str
    draft_ms: float
    verify_ms: float
    c: float
    max_tau: int

    @property
    def iteration_ms(self) -> float:
        """Both together."""
        return self.draft_ms + self.verify_ms

    @property
    def break_even_tau(self) -> float:
        """Tokens per iteration below which decoding without a draft is faster."""
        return 1 / self.c

    @property
    def max_speedup(self) -> float:
        """With every drafted token accepted."""
        return self.c * self.max_tau

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        derived = ("iteration_ms", "break_even_tau", "max_speedup")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


@dataclass(frozen=True)
class Roofline:
    """Floors of one target on one machine, at one batch size and context.

    Args:
        shape ([`TargetShape`]): The target.
        machine ([`Machine`]): Where it runs.
        batch (`int`): Rows.
        context (`int`): Cached tokens per row.
        weight_bytes (`float`, *optional*, defaults to 2): Bytes of one weight: 2 for bfloat16, 1 for FP8.
        kv_bytes (`float`, *optional*, defaults to 2): Bytes of one cached number.
        attention_tflops (`float`, *optional*): What the attention kernel reaches where arithmetic bounds it; the
            machine's rate by default, which no attention kernel reaches.
    """

    shape: TargetShape
    machine: Machine
    batch: int
    context: int
    weight_bytes: float = 2
    kv_bytes: float = 2
    attention_tflops: float | None = None

    def __post_init__(self) -> None:
        if self.batch < 1 or self.context < 0:
            raise ValueError(
                f"batch={self.batch}, context={self.context}: expected at least one row and no less than 0."
            )

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token, all layers."""
        shape = self.shape
        return 2 * shape.layers * shape.kv_heads * shape.head_dim * self.kv_bytes

    @property
    def fits(self) -> bool:
        """Whether weights and the stored keys and values are within the machine's memory, if that is known."""
        stored = self.shape.stored_weights * self.weight_bytes + self.batch * self.context * self.kv_bytes_per_token
        return self.machine.memory_gb is None or stored <= self.machine.memory_gb * 1e9

    @property
    def ar_ms(self) -> float:
        """A step without a draft."""
        return self.verify_ms(1)

    def weights_ms(self, tokens: int) -> float:
        """All layers and the head on `tokens` tokens, attention apart."""
        read = self.shape.weights_read(tokens) * self.weight_bytes
        return self._longer(read, FLOPS_PER_WEIGHT * self.shape.weights_per_token() * tokens)

    def attention_ms(self, queries: int, context: int | None = None) -> float:
        """Attention of all layers: `queries` per row over `context` entries, by default those of the cache."""
        context = self.context if context is None else context
        seen = self.shape.visible(context)
        flops = FLOPS_PER_SCORE * self.shape.heads * self.shape.head_dim * seen * queries * self.batch
        return self._longer(self.batch * self.shape.kv_numbers(context) * self.kv_bytes, flops, self.attention_tflops)

    def verify_ms(self, nodes: int) -> float:
        """One verification of `nodes` nodes per row."""
        return self.weights_ms(nodes * self.batch) + self.attention_ms(nodes)

    def masked_verify_ms(self, nodes: int) -> float:
        """The same as transformers' `sdpa` computes a masked block: keys repeated for every query head of a group.

        They are read, written for each head of the group, and read again; a lone node needs no mask.
        """
        if nodes == 1:
            return self.ar_ms
        group = self.shape.heads // self.shape.kv_heads
        repeats = 2 * group * self.batch * self.shape.kv_numbers(self.context) * self.kv_bytes
        return self.verify_ms(nodes) + self._longer(repeats, 0)

    def longspec(self, widths: list[int], window: int = 512) -> Iteration:
        """LongSpec: per level its one block, one layer of the target's cache, and the target's head."""
        block_and_head, entries = self._longspec_weights(), self.context + window
        kv = 2 * self.shape.kv_heads * self.shape.head_dim * self.kv_bytes * self.batch * entries
        draft = 0.0
        previous = 1  # nodes of the level that is run, to propose the next one
        for width in widths:
            tokens = previous * self.batch
            scores = FLOPS_PER_SCORE * self.shape.heads * self.shape.head_dim * entries * tokens
            draft += self._longer(block_and_head * self.weight_bytes, FLOPS_PER_WEIGHT * block_and_head * tokens)
            draft += self._longer(kv, scores, self.attention_tflops)
            previous = width
        name = f"LongSpec {'+'.join(map(str, widths))}"
        return self._iteration(name, draft, 1 + sum(widths), len(widths) + 1)

    def specattn(self, gamma: int, ratio: float) -> Iteration:
        """SpecAttn: gamma steps of the whole target over a share of the cache."""
        step = self.weights_ms(self.batch) + ratio * self.attention_ms(1)
        return self._iteration(f"SpecAttn gamma {gamma}, {ratio:.0%}", gamma * step, gamma + 1, gamma + 1)

    def tokenswift(self, branching: list[int], nodes: int | None = None, budget: int | None = 4096) -> Iteration:
        """TokenSwift: heads of one square matrix each, with one pass over the language-model head for all of them.

        Args:
            branching (`list[int]`): Children of every node, level by level; entry 0 is the target's own prediction.
            nodes (`int`, *optional*): Nodes that are verified, n-grams included; by default those of the tree.
            budget (`int`, *optional*): Entries that the step which gives the hidden state reads. None: the state is
                that of the last verification, whose prediction is the root already (`verify_hidden`).
        """
        widths = branching[1:] if budget is None else branching
        heads = (len(branching) - 1) * self.shape.hidden**2
        if budget is None:
            heads += self.shape.vocab * self.shape.hidden
        draft = self._longer(heads * self.weight_bytes, FLOPS_PER_WEIGHT * heads * self.batch)
        if budget is not None:  # its head is read once for the prediction and for the heads
            draft += self.weights_ms(self.batch) + self.attention_ms(1, min(budget, self.context))
        own = 1
        total = 1
        for width in widths:
            own *= width
            total += own
        where = "verify_hidden" if budget is None else f"partial cache {budget}"
        nodes = nodes or total
        return self._iteration(f"TokenSwift {where}, {nodes} nodes", draft, nodes, len(widths) + 1)

    def _iteration(self, drafter: str, draft: float, nodes: int, max_tau: int) -> Iteration:
        verify = self.verify_ms(nodes)
        return Iteration(drafter, draft, verify, self.ar_ms / (draft + verify), max_tau)

    def _longspec_weights(self) -> int:
        """Self-attention, query and output of the cross-attention, feed-forward, and the target's head."""
        shape = self.shape
        query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        block = shape.hidden * (4 * query + 2 * kv + 3 * shape.intermediate)
        return block + shape.vocab * shape.hidden

    def _longer(self, read: float, flops: float, tflops: float | None = None) -> float:
        """Milliseconds of reading and of computing at the same time."""
        seconds = max(read / self.machine.tb_per_second, flops / (tflops or self.machine.tflops))
        return seconds / 1e9
