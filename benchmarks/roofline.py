"""Floors of decoding for a model on a GPU: the least time of a step, a verification and an iteration. Nothing is run.

Whether a draft can pay follows from c, the time of a step without a draft over that of an iteration: the speed-up is at
most c * tau, and below tau = 1 / c a draft slows down whatever it proposes.

    python -m benchmarks.roofline --target Llama-3.1-8B --gpu H200
    python -m benchmarks.roofline --target path/or/hub-id --tbs 3.1 --tflops 700 --batches 1,8 --contexts 8192,131072
"""

import argparse
from dataclasses import dataclass
from itertools import accumulate, product
from operator import mul
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness import integers
from benchmarks.report import table
from hf_longspec.modeling.shared.draft_weights import BITS, GROUP


@dataclass(frozen=True)
class Machine:
    """The rates that floors divide by."""

    name: str  # for the title of the table
    tb_per_second: float  # memory bandwidth that a long read sustains, 10^12 bytes per second
    tflops: float  # matrix products in the dtype of the weights, 10^12 operations per second, sustained
    memory_gb: float | None = None  # memory in 10^9 bytes; what does not fit is then marked


# What a long read and a large matrix product sustain, as a rule of thumb: 0.9 of the bandwidth and 0.8 of the dense
# bfloat16 rate in NVIDIA's data sheets of the SXM modules. Measured rates replace them: `--tbs` and `--tflops`, or the
# ceilings that benchmarks/gpu.py writes. Memory in 10^9 bytes.
RATES = {"H100": (3.0, 790, 80), "H200": (4.3, 790, 141), "A100-80G": (1.8, 250, 80)}
MACHINES = {name: Machine(name, *rates) for name, rates in RATES.items()}


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a decoder with grouped-query attention."""

    name: str  # for the title of the table
    layers: int  # decoder layers
    hidden: int  # width of the residual stream
    intermediate: int  # width of the gated feed-forward block; of one expert if there are any
    heads: int  # query heads
    kv_heads: int  # key/value heads
    head_dim: int  # size of a head
    vocab: int  # rows of the language-model head
    read_weights: int  # weights that one forward reads, experts apart: all but a table that is only looked up
    stored_weights: int  # all weights
    expert_weights: int = 0  # those that belong to experts
    experts: int = 0  # experts per layer
    experts_per_token: int = 0  # experts that one token runs through
    windows: tuple[int | None, ...] = ()  # sliding window of every layer

    def weights_read(self, tokens: int) -> float:
        """Weights that a forward over `tokens` tokens reads; with experts, as many as even routing touches."""
        if not self.experts:
            return float(self.read_weights)
        touched = 1 - (1 - self.experts_per_token / self.experts) ** tokens
        return self.read_weights + touched * self.expert_weights

    def visible(self, context: int) -> int:
        windows = self.windows or (None,) * self.layers
        return sum(context if window is None else min(window, context) for window in windows)


# Configurations that need no download, by name.
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {"model_type": "llama", "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256},
    "Qwen3-8B": {"model_type": "qwen3", "num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936},
}
ALIKE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


def shape_of(target: str) -> TargetShape:
    """The shape of a built-in configuration, or that of one in a folder or on the Hub; ValueError if there is none."""
    if target in CONFIGS:
        return shape_from_config(AutoConfig.for_model(**CONFIGS[target], **ALIKE, tie_word_embeddings=False), target)
    try:
        config = AutoConfig.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no configuration in {target!r}: pass a folder, a Hub id, or one of {', '.join(CONFIGS)}. ({error})"
        ) from error
    return shape_from_config(config, target)


def shape_from_config(config: Any, name: str) -> TargetShape:
    """Sizes of a causal language model, its weights counted on the meta device; ValueError unless it caches keys."""
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    if getattr(text, "kv_lora_rank", None) is not None or kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{name} caches latents or a recurrent state ({config.model_type}); the floors are those of cached keys "
            "and values. Choose a target whose layers have full or sliding-window attention."
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = dict(model.named_parameters())  # a tied table appears once
    stored = sum(weight.numel() for weight in weights.values())
    of_experts = sum(weight.numel() for name, weight in weights.items() if ".experts." in name)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    looked_up = 0 if embedding is head else embedding.numel()
    experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts") or 0
    heads = text.num_attention_heads
    sizes = {"layers": text.num_hidden_layers, "hidden": text.hidden_size, "heads": heads, "vocab": text.vocab_size}
    sizes |= {"intermediate": _first(text, "moe_intermediate_size", "intermediate_size") or 0}
    sizes |= {"kv_heads": _first(text, "num_key_value_heads") or heads}
    sizes |= {"head_dim": _first(text, "head_dim") or text.hidden_size // heads, "expert_weights": of_experts}
    sizes |= {"read_weights": stored - of_experts - looked_up, "stored_weights": stored}
    sizes |= {"experts": experts if of_experts else 0, "experts_per_token": _first(text, "num_experts_per_tok") or 0}
    return TargetShape(name, **sizes, windows=_windows(text))


def _windows(text: Any) -> tuple[int | None, ...]:
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if not window or (kinds is None and getattr(text, "use_sliding_window", None) is False):
        return ()
    kinds = kinds or ["sliding_attention"] * text.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


FLOPS_PER_WEIGHT = 2  # a multiplication and an addition
FLOPS_PER_SCORE = 4  # one of each for q . k, and again for the weighted sum of values


@dataclass(frozen=True)
class Iteration:
    """Floor of one iteration of a drafter."""

    drafter: str  # name of the drafter, with its settings
    draft_ms: float  # drafting
    verify_ms: float  # the verification
    c: float  # time of a step without a draft over that of the iteration
    max_tau: int  # most tokens that an iteration can emit

    @property
    def iteration_ms(self) -> float:
        return self.draft_ms + self.verify_ms

    @property
    def break_even_tau(self) -> float:
        """Tokens per iteration below which decoding without a draft is faster."""
        return 1 / self.c


@dataclass(frozen=True)
class Roofline:
    """Floors of one target on one machine, at one batch size and context."""

    shape: TargetShape
    machine: Machine
    batch: int  # rows
    context: int  # cached tokens per row
    weight_bytes: float = 2  # bytes of one weight: 2 for bfloat16, 1 for FP8
    kv_bytes: float = 2  # bytes of one cached number
    # of attention where arithmetic bounds it; by default the machine's rate, which no attention kernel reaches
    attention_tflops: float | None = None

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
        return self.verify_ms(1)

    def weights_ms(self, tokens: int) -> float:
        """All layers and the head on `tokens` tokens, attention apart."""
        return self._longer(self.shape.weights_read(tokens) * self.weight_bytes, self.weights_flops(tokens))

    def weights_flops(self, tokens: int) -> float:
        """Operations of the weights on `tokens` tokens, of experts as many as a token runs through."""
        share = self.shape.experts_per_token / self.shape.experts if self.shape.experts else 0.0
        return FLOPS_PER_WEIGHT * (self.shape.read_weights + share * self.shape.expert_weights) * tokens

    def attention_ms(self, queries: int, context: int | None = None) -> float:
        """Attention of all layers: `queries` per row over `context` entries, by default those of the cache."""
        context = self.context if context is None else context
        seen = self.shape.head_dim * self.shape.visible(context) * self.batch
        flops = FLOPS_PER_SCORE * self.shape.heads * seen * queries
        return self._longer(2 * self.shape.kv_heads * seen * self.kv_bytes, flops, self.attention_tflops)

    def verify_ms(self, nodes: int) -> float:
        """One verification of `nodes` nodes per row."""
        return self.weights_ms(nodes * self.batch) + self.attention_ms(nodes)

    def longspec(self, widths: list[int], window: int = 512, vocab: int | None = None) -> Iteration:
        """LongSpec: per level its one block, one layer of the target's cache, and `vocab` rows of the target's head."""
        shape, entries = self.shape, self.context + window
        query, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        # self-attention, query and output of the cross-attention, feed-forward
        block = shape.hidden * (4 * query + 2 * keys + 3 * shape.intermediate)
        block_and_head = block + (vocab or shape.vocab) * shape.hidden
        kv = 2 * keys * self.kv_bytes * self.batch * entries
        draft = 0.0
        previous = 1  # nodes of the level that is run, to propose the next one
        for width in widths:
            tokens = previous * self.batch
            scores = FLOPS_PER_SCORE * query * entries * tokens
            draft += self._longer(block_and_head * self.weight_bytes, FLOPS_PER_WEIGHT * block_and_head * tokens)
            draft += self._longer(kv, scores, self.attention_tflops)
            previous = width
        name = f"LongSpec {'+'.join(map(str, widths))}" + (f", {vocab:,} tokens" if vocab else "")
        return self._iteration(name, draft, 1 + sum(widths), len(widths) + 1)

    def specattn(self, gamma: int, ratio: float, draft_weights: str | None = None) -> Iteration:
        """SpecAttn: gamma steps of the whole target over a share of the cache, maybe with weights of fewer bits."""
        weights, name = self.weights_ms(self.batch), f"SpecAttn gamma {gamma}, {ratio:.0%}"
        if draft_weights is not None:
            name += f", {draft_weights}"
            head = self.shape.vocab * self.shape.hidden
            rounded = self.shape.weights_read(self.batch) - head
            # in 4 bits a group has two numbers of two bytes; those of 8 bits, one for each row, are not counted
            of_one = BITS[draft_weights] / 8 + (4 / GROUP if draft_weights == "int4" else 0)
            read = rounded * of_one + head * self.weight_bytes
            weights = self._longer(read, self.weights_flops(self.batch))
        step = weights + ratio * self.attention_ms(1)
        return self._iteration(name, gamma * step, gamma + 1, gamma + 1)

    def tokenswift(self, branching: list[int], budget: int | None = 4096) -> Iteration:
        """TokenSwift: heads of one square matrix each, with one pass over the language-model head for all of them.

        Level 0 of the branching is the target's own prediction, by a step over `budget` entries; without it the state
        is that of the last verification, whose prediction is the root already (`verify_hidden`).
        """
        widths = branching[1:] if budget is None else branching
        heads = (len(branching) - 1) * self.shape.hidden**2
        if budget is None:
            heads += self.shape.vocab * self.shape.hidden
        draft = self._longer(heads * self.weight_bytes, FLOPS_PER_WEIGHT * heads * self.batch)
        if budget is not None:  # its head is read once for the prediction and for the heads
            draft += self.weights_ms(self.batch) + self.attention_ms(1, min(budget, self.context))
        nodes = sum(accumulate(widths, mul, initial=1))
        where = "verify_hidden" if budget is None else f"partial cache {budget}"
        return self._iteration(f"TokenSwift {where}, {nodes} nodes", draft, nodes, len(widths) + 1)

    def _iteration(self, drafter: str, draft: float, nodes: int, max_tau: int) -> Iteration:
        verify = self.verify_ms(nodes)
        return Iteration(drafter, draft, verify, self.ar_ms / (draft + verify), max_tau)

    def _longer(self, read: float, flops: float, tflops: float | None = None) -> float:
        """Milliseconds of reading and of computing at the same time."""
        seconds = max(read / self.machine.tb_per_second, flops / (tflops or self.machine.tflops))
        return seconds / 1e9


# What the tables show: trees of LongSpec, the share that SpecAttn drafts over, TokenSwift's children and partial cache.
TREES, RATIO = ([4, 16, 16, 16, 11], [4, 4, 4, 3]), 0.07
BRANCHING, BUDGET = [1, 3, 3, 3], 4096


def tables(rooflines: list[Roofline], args: argparse.Namespace) -> str:
    at = rooflines[0]
    facts = (
        f"Floors, computed and not measured: {at.shape.name} on {at.machine.name} ({at.machine.tb_per_second:g} TB/s, "
        f"{at.machine.tflops:g} TFLOP/s). A forward of one token reads "
        f"{at.shape.weights_read(1) * at.weight_bytes / 1e9:.2f} GB of weights; keys and values take "
        f"{at.kv_bytes_per_token / 1024:g} KiB per token."
    )
    steps, drafters = [], []
    for at in rooflines:
        place = {"batch": at.batch, "context": f"{at.context}" + ("" if at.fits else " (does not fit)")}
        verified = {f"verify {n}, ms": f"{at.verify_ms(n):.2f}" for n in args.nodes}
        steps.append({**place, "step, ms": f"{at.ar_ms:.2f}", **verified})
        iterations = [at.longspec(widths, vocab=vocab) for widths in TREES for vocab in (None, at.shape.vocab // 4)]
        iterations += [at.specattn(gamma, RATIO, weights) for gamma in args.gammas for weights in (None, *BITS)]
        iterations += [at.tokenswift(BRANCHING, budget=budget) for budget in (BUDGET, None)]
        for iteration in iterations:
            times = {"draft, ms": iteration.draft_ms, "verify, ms": iteration.verify_ms}
            times |= {"iteration, ms": iteration.iteration_ms}
            line: dict[str, Any] = {**place, "drafter": iteration.drafter}
            line |= {name: f"{value:.2f}" for name, value in times.items()}
            line |= {"c": f"{iteration.c:.3f}", "break-even tau": f"{iteration.break_even_tau:.2f}"}
            drafters.append(line | {"at most": f"{iteration.c * iteration.max_tau:.2f}x (tau {iteration.max_tau})"})
    return "\n\n".join([facts, table(steps), table(drafters)])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", default="Llama-3.1-8B", help=f"{', '.join(CONFIGS)}, a folder or a Hub id (default: %(default)s)")
    add("--gpu", choices=list(MACHINES), default="H200", help="default: %(default)s")
    add("--tbs", type=float, help="measured bandwidth, 10^12 bytes per second")
    add("--tflops", type=float, help="measured matrix products, 10^12 operations per second")
    add("--attention-tflops", type=float, help="what the attention kernel reaches (default: as --tflops)")
    add("--batches", type=integers, default="1,4,8", help="default: %(default)s")
    add("--contexts", type=integers, default="8192,32768,131072", help="default: %(default)s")
    add("--nodes", type=integers, default="16,64", help="nodes of a verification (default: %(default)s)")
    add("--gammas", type=integers, default="6,9", help="drafted tokens of SpecAttn (default: %(default)s)")
    add("--weight-bytes", type=float, default=2.0, help="2 for bfloat16, 1 for FP8, 0.5 for 4 bits (default: 2)")
    add("--kv-bytes", type=float, default=2.0, help="likewise for the cache (default: 2)")
    args = parser.parse_args(arguments)
    try:
        shape, machine, places = shape_of(args.target), machine_of(args), product(args.batches, args.contexts)
        options = args.weight_bytes, args.kv_bytes, args.attention_tflops
        print(tables([Roofline(shape, machine, *place, *options) for place in places], args))
    except ValueError as error:
        parser.error(str(error))


def machine_of(args: argparse.Namespace) -> Machine:
    if (args.tbs is None) != (args.tflops is None):
        raise ValueError("--tbs and --tflops belong together: pass both measured rates, or neither.")
    if args.tbs is None:
        return MACHINES[args.gpu]
    return Machine(f"{args.gpu}, measured rates", args.tbs, args.tflops, MACHINES[args.gpu].memory_gb)


if __name__ == "__main__":
    main()
