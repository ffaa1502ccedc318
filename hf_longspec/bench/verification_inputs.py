"""A random model, a random cache and random trees for the verification benchmark.

The model is wide and shallow, and its cache is filled with random keys and values, so nothing is prefilled. Weights,
keys and values are bfloat16 numbers, also in the float32 section: both sections compute the same thing.
"""

import random
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..generation.draft_tree import DraftTree

# A prime, so that the rows of no matrix repeat each other.
NOISE_POOL = 16_777_213

Layer = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of the random model; the defaults are those of four layers of an 8B Llama with a small vocabulary."""

    layers: int = 4
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 256

    def config(self, max_length: int) -> LlamaConfig:
        """As a Llama configuration."""
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=max_length,
            attn_implementation="sdpa",
        )


def random_model(shape: Shape, max_length: int) -> LlamaForCausalLM:
    """A random model in bfloat16: norms at 1, everything else normal with standard deviation 0.02."""
    config = shape.config(max_length)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    cast(model, torch.bfloat16)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffer is not a parameter
    # numbers from a pool: to draw a billion of them takes longer than what is measured
    pool = torch.randn(NOISE_POOL, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    start = 0
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
            continue
        start = (start + 12345) % NOISE_POOL  # two matrices of one size differ
        _fill(parameter.data.view(-1), pool.roll(start))
    return model


def cast(model: LlamaForCausalLM, dtype: torch.dtype) -> None:
    """Give all parameters a dtype, one after another. The rotary frequencies stay float32, as in a loaded model."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _fill(target: torch.Tensor, pool: torch.Tensor) -> None:
    for begin in range(0, len(target), len(pool)):
        part = target[begin : begin + len(pool)]
        part.copy_(pool[: len(part)])


def random_layers(shape: Shape, length: int) -> list[Layer]:
    """Random keys and values of every layer in bfloat16, `(1, K, length, D)` each."""
    generator = torch.Generator().manual_seed(1)
    size = (1, shape.kv_heads, length, shape.head_dim)
    return [
        (torch.randn(size, generator=generator).bfloat16(), torch.randn(size, generator=generator).bfloat16())
        for _ in range(shape.layers)
    ]


def random_tree(num_nodes: int, vocab: int, seed: int = 0) -> DraftTree:
    """A tree in which every node hangs below a random earlier one."""
    draw = random.Random(seed)
    tokens = [draw.randrange(vocab) for _ in range(num_nodes)]
    parents = [-1] + [draw.randrange(node) for node in range(1, num_nodes)]
    valid = torch.ones(1, num_nodes, dtype=torch.bool)
    return DraftTree(torch.tensor([tokens]), torch.tensor([parents]), valid)
