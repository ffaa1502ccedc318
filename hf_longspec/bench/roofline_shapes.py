"""What a floor is computed from: sizes of a target model, and what a GPU can do."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from .summaries import significant

# What a long read and a large matrix product reach of the figures in a data sheet, as a rule of thumb. Measured rates
# replace them: `--tbs` and `--tflops`, or the ceilings that benchmarks/gpu.py writes.
SUSTAINED_BANDWIDTH, SUSTAINED_FLOPS = 0.9, 0.8


@dataclass(frozen=True)
class Machine:
    """What the floors divide by.

    Args:
        name (`str`): For the title of the table.
        tb_per_second (`float`): Memory bandwidth that a long read sustains, 10^12 bytes per second.
        tflops (`float`): Matrix products in the dtype of the weights, 10^12 operations per second, sustained.
        memory_gb (`float`, *optional*): Memory in 10^9 bytes; what does not fit is then marked.
    """

    name: str
    tb_per_second: float
    tflops: float
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        if not (self.tb_per_second > 0 and self.tflops > 0):
            raise ValueError(
                f"{self.tb_per_second} TB/s and {self.tflops} TFLOP/s: both must be positive. Pass measured rates with "
                "--tbs and --tflops."
            )


def sustained(name: str, tb_per_second: float, tflops: float, memory_gb: float) -> Machine:
    """A machine from its data sheet: two digits of the sustained share of its peak rates."""
    bandwidth = significant(SUSTAINED_BANDWIDTH * tb_per_second, 2)
    return Machine(name, bandwidth, significant(SUSTAINED_FLOPS * tflops, 2), memory_gb)


# NVIDIA's data sheets of the SXM modules: bandwidth, dense bfloat16 without sparsity, memory.
MACHINES = {
    "H100": sustained("H100", 3.35, 989, 80),
    "H200": sustained("H200", 4.8, 989, 141),
    "A100-80G": sustained("A100-80G", 2.039, 312, 80),
}


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a decoder with grouped-query attention.

    Args:
        name (`str`): For the title of the table.
        layers (`int`): Decoder layers.
        hidden (`int`): Width of the residual stream.
        intermediate (`int`): Width of the gated feed-forward block; of one expert if there are any.
        heads (`int`): Query heads.
        kv_heads (`int`): Key/value heads.
        head_dim (`int`): Size of a head.
        vocab (`int`): Rows of the language-model head.
        read_weights (`int`): Weights that one forward reads, experts apart: all but a table that is only looked up.
        stored_weights (`int`): All weights.
        expert_weights (`int`): Those that belong to experts.
        experts (`int`): Experts per layer.
        experts_per_token (`int`): Experts that one token runs through.
        windows (`tuple[int | None, ...]`): Sliding window of every layer.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    read_weights: int
    stored_weights: int
    expert_weights: int = 0
    experts: int = 0
    experts_per_token: int = 0
    windows: tuple[int | None, ...] = ()

    def weights_read(self, tokens: int) -> float:
        """Weights that a forward over `tokens` tokens reads; with experts, as many as even routing touches."""
        if not self.experts:
            return float(self.read_weights)
        touched = 1 - (1 - self.experts_per_token / self.experts) ** tokens
        return self.read_weights + touched * self.expert_weights

    def weights_per_token(self) -> float:
        """Weights that one token is multiplied with."""
        share = self.experts_per_token / self.experts if self.experts else 0.0
        return self.read_weights + share * self.expert_weights

    def kv_numbers(self, context: int) -> int:
        """Cached numbers of one row that a step reads: keys and values of all layers, windows applied."""
        return 2 * self.kv_heads * self.head_dim * self.visible(context)

    def visible(self, context: int) -> int:
        """Entries that a query sees, summed over the layers."""
        windows = self.windows or (None,) * self.layers
        return sum(context if window is None else min(window, context) for window in windows)


def dense_shape(name: str, *, qk_norm: bool = False, tied: bool = False, **sizes: Any) -> TargetShape:
    """A Llama-like model from its sizes: projections without biases, two norms per layer and one at the end."""
    query, kv = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    hidden = sizes["hidden"]
    attention = 2 * hidden * query + 2 * hidden * kv + (2 * sizes["head_dim"] if qk_norm else 0)
    layer = attention + 3 * hidden * sizes["intermediate"] + 2 * hidden
    table = sizes["vocab"] * hidden
    read = sizes["layers"] * layer + hidden + table
    return TargetShape(name, **sizes, read_weights=read, stored_weights=read + (0 if tied else table))


SHAPES = {
    "Llama-3.1-8B": dense_shape(
        "Llama-3.1-8B", layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256
    ),
    "Qwen3-8B": dense_shape(
        "Qwen3-8B", qk_norm=True, layers=36, hidden=4096, intermediate=12288, heads=32, kv_heads=8, head_dim=128,
        vocab=151936,
    ),
}  # fmt: skip


def shape_of(target: str) -> TargetShape:
    """The built-in shape of this name, or that of a configuration in a folder or on the Hub.

    Raises:
        ValueError: If there is no such model, or its cache is not one of keys and values.
    """
    if target in SHAPES:
        return SHAPES[target]
    try:
        config = AutoConfig.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no configuration in {target!r}: pass a folder, a Hub id, or one of {', '.join(SHAPES)}. ({error})"
        ) from error
    return shape_from_config(config, target)


def shape_from_config(config: Any, name: str) -> TargetShape:
    """Sizes of a causal language model, its weights counted on a model without memory (the meta device).

    Raises:
        ValueError: If it caches latents (MLA) or a recurrent state, whose traffic is not that of keys and values.
    """
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    if getattr(text, "kv_lora_rank", None) is not None or kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{name} caches latents or a recurrent state ({config.model_type}); the floors are those of cached keys "
            "and values. Choose a target whose layers have full or sliding-window attention."
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counts = _count(model)
    experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts") or 0
    heads = text.num_attention_heads
    return TargetShape(
        name,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=_first(text, "moe_intermediate_size", "intermediate_size") or 0,
        heads=heads,
        kv_heads=_first(text, "num_key_value_heads") or heads,
        head_dim=_first(text, "head_dim") or text.hidden_size // heads,
        vocab=text.vocab_size,
        experts=experts if counts["expert_weights"] else 0,
        experts_per_token=_first(text, "num_experts_per_tok") or 0,
        windows=_windows(text),
        **counts,
    )


def _count(model: Any) -> dict[str, int]:
    """Weights of a model by what a forward does with them."""
    named = dict(model.named_parameters())  # a tied table appears once
    stored = sum(parameter.numel() for parameter in named.values())
    experts = sum(parameter.numel() for name, parameter in named.items() if ".experts." in name)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    looked_up = 0 if embedding is head else embedding.numel()
    return {
        "read_weights": stored - experts - looked_up,
        "stored_weights": stored,
        "expert_weights": experts,
    }


def _windows(text: Any) -> tuple[int | None, ...]:
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if not window or (kinds is None and getattr(text, "use_sliding_window", None) is False):
        return ()
    kinds = kinds or ["sliding_attention"] * text.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
