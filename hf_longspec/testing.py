"""Tiny random targets, prompts and drafts, and the comparison of sampled frequencies with a distribution.

A tiny target has the structure of its architecture (grouped heads, windows, softcaps, sinks, experts, latent KV) at a
size that runs in milliseconds. Its weights are drawn so that the text depends on the context: attention is peaked,
norms and sinks are not at their initial values, and greedy decoding does not settle on one token. The usual
initialisation (std 0.02) gives nearly uniform attention, which would hide a dropped window or a wrong position.

To check a sampler, run it on many rows at once and compare the frequency of every outcome with its probability, in
standard deviations. A correct sampler stays within a few of them whatever the number of rows. The deviation of a wrong
one grows with the square root of that number.

    target = MarkovTarget(vocab_size=7, generator=generator)
    tokens = ...                                   # (rows, 2): the first two tokens after `prefix`, sampled
    assert max_z_score(tokens, target.pair_distribution(prefix)) < MAX_SIGMA
"""

import math
import os
import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .generation.draft_tree import DraftTree
from .generation.drafter import Binding, Drafter, TreeShape, Verification
from .generation.gate import SpeculationGate
from .generation.target import TargetView
from .modeling.base import DraftModel
from .modeling.longspec.modeling_longspec import LongSpecDraftModel
from .modeling.plain.configuration_plain import PlainConfig
from .modeling.tokenswift.modeling_tokenswift import TokenSwiftDraftModel

PAD_TOKEN_ID, BOS_TOKEN_ID, EOS_TOKEN_ID = 0, 1, 2
NUM_SPECIAL_TOKENS = 3

# Shorter than the prompts of most tests, so that windows really fill.
WINDOW = 16

# Logits this far apart leave sampling something to choose and greedy decoding a clear winner at most positions.
LOGIT_STD = 3.0

# A right sampler exceeds this once in 1.7 million outcomes.
MAX_SIGMA = 5.0
# Seconds on one CPU core, and enough to see the wrong rules of tests/generation/test_verification.py by 10 sigma.
SHORT_ROWS = 20_000
# The evidence: resolves frequencies to about 0.001.
LONG_ROWS = 200_000
# Below this many expected counts a binomial is too skewed for a z-score; such outcomes are pooled.
MIN_EXPECTED = 50

_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": PAD_TOKEN_ID,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
}

_SLIDING, _FULL = "sliding_attention", "full_attention"

# One row per architecture: its settings on top of `_COMMON`; `model_type` where it differs from the name, and
# `attn_implementation` where the default of transformers is not the architecture's own attention.
_ROWS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "attn_implementation": "eager",  # sdpa ignores the softcap in transformers 5.17 and refuses it later
        "query_pre_attn_scalar": 24,  # scaling is not head_dim**-0.5
        "attn_logit_softcapping": 4.0,  # low enough to bend the scores of a tiny model
        "final_logit_softcapping": 20.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING],
        "query_pre_attn_scalar": 24,
    },
    "gpt_oss": {
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "phi3": {},
    "granite": {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.5,
    },
    "olmo2": {},
    "cohere2": {
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],  # full-attention layers have no rotary embedding
        "logit_scale": 0.5,
    },
    "glm4": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]},
    "deepseek_v3": {
        "num_key_value_heads": 4,  # latent KV is expanded to every query head
        "head_dim": 8,  # of the rotary part
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,  # value heads narrower than key heads
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
}

TINY_TARGETS: tuple[str, ...] = tuple(_ROWS)
"""Names that [`tiny_target`] accepts."""


def tiny_target(
    name: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """Random decoder-only model of architecture `name`, in eval mode on the CPU.

    The same arguments give the same weights, and the global random state is left as it was.

    Args:
        name (`str`): One of `TINY_TARGETS`.
        seed (`int`, *optional*, defaults to 0): Seed of the weights.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Weights are drawn in float32, then cast.
        attn_implementation (`str`, *optional*):
            As in `from_pretrained`; it does not change the weights. By default what transformers chooses, except
            for gemma2, which runs `eager`.
        **overrides: Config fields that replace those of the row, for instance `sliding_window=8`.

    Raises:
        ValueError: If `name` is unknown.

    >>> tiny_target("gemma2", sliding_window=8).config.sliding_window
    8
    """
    if name not in _ROWS:
        raise ValueError(f"unknown tiny target {name!r}, expected one of: {', '.join(TINY_TARGETS)}")
    settings = {**_COMMON, **_ROWS[name], **overrides}
    own_attention = settings.pop("attn_implementation", None)
    config = AutoConfig.for_model(settings.pop("model_type", name), **settings)
    # The constructors draw weights that are overwritten below; only the CPU generator is involved.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attn_implementation or own_attention
        )
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the weights must not depend on who computes the attention
    _randomize(model, torch.Generator().manual_seed(seed))
    model.set_attn_implementation(attention)
    return model.to(dtype).eval()


def tiny_prompts(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged batch of random prompts, padded on the left, as a tokenizer with `padding_side="left"` returns it.

    Special tokens (pad, bos, eos) are not drawn. A row depends on the seed, its index and its length alone, so a
    batch of one prompt is the first row of a longer batch.

    Args:
        vocab_size (`int`): Tokens are drawn from `[3, vocab_size)`.
        lengths (`Sequence[int]`): Prompt length of each row.
        seed (`int`, *optional*, defaults to 0): Seed of the tokens.

    Returns:
        `input_ids` and `attention_mask`, both of shape `(len(lengths), max(lengths))`.

    Raises:
        ValueError: If there is no prompt, a prompt is empty, or the vocabulary holds special tokens only.

    >>> input_ids, attention_mask = tiny_prompts(128, [2, 4])
    >>> attention_mask.tolist()
    [[0, 0, 1, 1], [1, 1, 1, 1]]
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths is {list(lengths)}, expected at least one prompt and at least one token in each")
    if vocab_size <= NUM_SPECIAL_TOKENS:
        raise ValueError(f"vocab_size is {vocab_size}, expected more than the {NUM_SPECIAL_TOKENS} special tokens")
    input_ids = torch.full((len(lengths), max(lengths)), PAD_TOKEN_ID)
    attention_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(1009 * seed + row)
        input_ids[row, -length:] = torch.randint(NUM_SPECIAL_TOKENS, vocab_size, (length,), generator=generator)
        attention_mask[row, -length:] = 1
    return input_ids, attention_mask


@torch.no_grad()
def _randomize(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw every weight anew, then scale the output so that the logits have a standard deviation of `LOGIT_STD`."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    final_norm = model.base_model.norm.weight
    norm_offset = 1.0 if not final_norm.any() else 0.0  # gemma multiplies by 1 + weight
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.add_(0.5 + 0.3 * noise)  # no projection can sharpen attention after these norms
        elif name.endswith("sinks"):
            parameter.copy_(2.0 + noise)  # as heavy as several keys
        elif parameter.ndim == 1:  # other norms and biases: around their initial value
            parameter.add_(0.3 * noise)
        elif parameter is embedding:
            # Small beside what the layers add to it: with tied embeddings a token would otherwise predict itself.
            parameter.copy_(0.02 * noise)
        else:
            parameter.copy_(noise * (1.5 / math.sqrt(parameter.shape[-1])))
    input_ids, _ = tiny_prompts(model.config.vocab_size, [64])
    std = model(input_ids, use_cache=False).logits.std().item()
    gain = round(LOGIT_STD / std, 2)  # rounded: the order of summation must not reach the weights
    if head is embedding:
        final_norm.add_(norm_offset).mul_(gain).sub_(norm_offset)
    else:
        head.mul_(gain)


def random_longspec_draft(target: Any, seed: int = 3, **overrides: Any) -> LongSpecDraftModel:
    """An untrained LongSpec draft with peaked attention and spread logits, so that a wrong key or position shows.

    Args:
        target (`PreTrainedModel`): Its target.
        seed (`int`, *optional*, defaults to 3): Seed of the weights.
        **overrides: As in `LongSpecDraftModel.from_target`.
    """
    draft = LongSpecDraftModel.from_target(target, **overrides)
    randomize(draft, seed)
    return draft


def random_tokenswift_draft(target: Any, seed: int = 3, **overrides: Any) -> TokenSwiftDraftModel:
    """Untrained TokenSwift heads that move the hidden state and spread their logits, so that a wrong state shows.

    Args:
        target (`PreTrainedModel`): Its target.
        seed (`int`, *optional*, defaults to 3): Seed of the weights.
        **overrides: As in `TokenSwiftDraftModel.from_target`.
    """
    draft = TokenSwiftDraftModel.from_target(target, **overrides)
    randomize(draft, seed)
    return draft


def randomize(draft: DraftModel, seed: int = 3) -> None:
    """Spread the weights of a draft, so that a wrong key, position or state shows in its trees."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * (0.3 if weight.dim() == 2 else 0.5))


class FlippingGate(SpeculationGate):
    """Opens and closes at random: one to four steps of each kind, from a seed. Every step has a random tree.

    Attributes:
        turns (`int`): Number of times it opened or closed.
    """

    tree = 0

    def __init__(self, seed: int = 0, trees: int = 1):
        super().__init__([TreeShape("draft", 2, 1)])
        self.random = random.Random(seed)
        self.num_trees = trees
        self.speculating = False
        self.left = self.turns = 0

    def speculates(self) -> bool:
        """Return whether this step speculates."""
        if not self.left:
            self.speculating, self.left = not self.speculating, self.random.randint(1, 4)
            self.turns += 1
        self.left -= 1
        if self.num_trees > 1:
            self.tree = self.random.randrange(self.num_trees)
        return self.speculating

    def record(self, tokens: int, rows: int, length: int) -> None:
        """Measure nothing."""


def ungated(wanted: bool, drafter: Any, ranks: Any) -> None:
    """Replace `gate_of` where steps are counted: all of them speculate, however long they take."""


class RandomTreeDraftModel(DraftModel):
    """Proposes trees of random shape whose nodes carry a known continuation with some probability, else noise.

    Args:
        hints (`list[list[int]]`): Continuation of each row, as plain decoding emits it.
        num_nodes (`int`): Nodes per tree.
        luck (`float`): Probability that a node on the right path carries the right token.
        chain (`bool`): Propose chains instead of trees.
        seed (`int`): Of the trees.
    """

    config_class = PlainConfig
    weightless: ClassVar[bool] = True

    def __init__(
        self, config: Any, hints: Any = None, num_nodes: int = 7, luck: float = 0.7, chain: bool = False, seed: int = 0
    ):
        super().__init__(config)
        self.hints = hints or []
        self.num_nodes = num_nodes
        self.luck = luck
        self.chain = chain
        self.seed = seed
        self.verifications: list[Verification] = []

    def make_drafter(self, binding: Binding) -> Drafter:
        """A drafter with its own random numbers."""
        return RandomTreeDrafter(binding, self)

    def max_nodes(self, target: TargetView) -> int:
        """Nodes per tree."""
        return self.num_nodes


class RandomTreeDrafter(Drafter):
    """Draws a new tree for every row and iteration."""

    def __init__(self, binding: Binding, draft: RandomTreeDraftModel):
        super().__init__(binding)
        self.draft = draft
        self.random = random.Random(draft.seed)
        self.num_nodes = draft.num_nodes
        self.max_depth = draft.num_nodes - 1

    @property
    def seed_tokens(self) -> int:
        """Several, so that the seeding chain is longer than the shortest prompts of the tests."""
        return 5

    def propose(self, root: torch.Tensor) -> DraftTree:
        """A random tree after `root`, with padding in some rows."""
        rows = [self._row(row, int(token)) for row, token in enumerate(root)]
        tokens, parents, valid = (torch.tensor(part, device=root.device) for part in zip(*rows, strict=True))
        tree = DraftTree(tokens, parents, valid, is_chain=self.draft.chain)
        tree.validate()
        return tree

    def observe(self, verification: Verification) -> None:
        """Keep it, so that a test can inspect it."""
        self.draft.verifications.append(verification)

    def _row(self, row: int, root: int) -> tuple[list[int], list[int], list[bool]]:
        assert self.binding.rule is not None
        emitted = len(self.binding.rule.sequences.generated[row])
        coming = self.draft.hints[row][emitted:] if self.draft.hints else []
        vocab = self.binding.target.vocab_size
        tokens, parents, right = [root], [-1], [0]  # right[i]: depth of node i on the right path, or -1
        for node in range(1, self.draft.num_nodes):
            parent = node - 1 if self.draft.chain else self.random.randrange(node)
            depth = right[parent]
            if 0 <= depth < len(coming) and self.random.random() < self.draft.luck:
                tokens.append(coming[depth])
                right.append(depth + 1)
            else:
                tokens.append(self.random.randrange(vocab))
                right.append(-1)
            parents.append(parent)
        used = self.random.randint(max(1, self.draft.num_nodes - 2), self.draft.num_nodes)
        return tokens, parents, [node < used for node in range(self.draft.num_nodes)]


def distribution_rows() -> int:
    """Rows to sample in a test: `LONG_ROWS` if the environment variable HF_LONGSPEC_SOAK is 1, else `SHORT_ROWS`."""
    return LONG_ROWS if os.environ.get("HF_LONGSPEC_SOAK") == "1" else SHORT_ROWS


def z_scores(samples: Tensor, distribution: Tensor) -> Tensor:
    """Distance of each outcome's frequency from its probability, in standard deviations.

    Args:
        samples (`torch.LongTensor` of shape `(rows,)` or `(rows, k)`):
            Outcomes of independent rows: one token, or k tokens in order.
        distribution (`torch.Tensor` of shape `(vocab_size,)` or `(vocab_size,) * k`):
            Probability of every outcome.

    Returns:
        `torch.Tensor` with one entry per outcome of positive probability, the rarest pooled into one, and one last
        entry for the impossible outcomes: 0, or infinite if any occurred.

    Raises:
        ValueError: If `distribution` does not sum to 1, or does not have one dimension per token of a sample.

    >>> z_scores(torch.tensor([0, 1]).repeat_interleave(100), torch.tensor([0.5, 0.5, 0.0])).tolist()
    [0.0, 0.0, 0.0]
    """
    samples = samples if samples.dim() == 2 else samples[:, None]
    if distribution.dim() != samples.shape[1] or abs(distribution.double().sum().item() - 1) > 1e-5:
        raise ValueError(
            f"distribution has {distribution.dim()} dimensions and sum {distribution.sum().item():.6f}, expected "
            f"{samples.shape[1]} and 1. Pass the joint distribution of the sampled tokens, normalised."
        )
    outcome = torch.zeros_like(samples[:, 0])
    for column, size in zip(samples.unbind(1), distribution.shape, strict=True):
        outcome = outcome * size + column
    counts = torch.bincount(outcome, minlength=distribution.numel()).double()
    p, order = distribution.double().flatten().cpu().sort()
    counts = counts.cpu()[order]
    impossible = counts[p == 0].sum() / 0 if counts[p == 0].any() else torch.zeros(())
    counts, p = _pool_rare(counts[p > 0], p[p > 0])
    spread = (len(samples) * p * (1 - p)).clamp_min(0).sqrt()
    z = torch.where(spread > 0, (counts - len(samples) * p) / spread, 0.0)
    return torch.cat([z, impossible[None].double()])


def max_z_score(samples: Tensor, distribution: Tensor) -> float:
    """The largest of [`z_scores`] in absolute value, to be compared with `MAX_SIGMA`.

    >>> max_z_score(torch.tensor([0, 0, 2]), torch.tensor([0.5, 0.5, 0.0]))
    inf
    """
    return z_scores(samples, distribution).abs().max().item()


def _pool_rare(counts: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the smallest outcomes, sorted by probability, until `MIN_EXPECTED` counts are expected of the sum."""
    expected = p * counts.sum()
    rare = (expected < MIN_EXPECTED) | (expected.cumsum(0) - expected < MIN_EXPECTED)
    counts, p = ((torch.cat([x[~rare], x[rare].sum()[None]])) for x in (counts, p))
    return counts, p


class MarkovTarget:
    """
    A target model whose logits depend on the last token only: a table instead of a network.

    Processors see the whole prefix, so the processed scores may depend on all of it.

    Args:
        vocab_size (`int`):
            Number of tokens; also the number of states.
        generator (`torch.Generator`):
            Draws the table.
        processors (`Sequence[Callable]`, *optional*):
            Logits processors of transformers, applied in order.
    """

    def __init__(
        self,
        vocab_size: int,
        generator: torch.Generator,
        processors: Sequence[Callable[[Tensor, Tensor], Tensor]] = (),
    ) -> None:
        self.vocab_size = vocab_size
        self.processors = processors
        self.table = 1.5 * torch.randn(vocab_size, vocab_size, generator=generator)

    def scores(self, prefix: Tensor) -> Tensor:
        """Processed scores `(rows, vocab_size)` of the token after `prefix` of shape `(rows, length)`."""
        scores = self.table[prefix[:, -1]]
        for processor in self.processors:
            scores = processor(prefix, scores)
        return scores

    def node_scores(self, prefix: Tensor, tree: DraftTree) -> Tensor:
        """Processed scores `(rows, num_nodes, vocab_size)` after every node of trees of equal structure.

        The prefix includes the root. The scores of a node depend on the tokens of its own path alone.
        """
        paths = [prefix]
        for node, parent in enumerate(tree.parents[0].tolist()[1:], start=1):
            paths.append(torch.cat([paths[parent], tree.tokens[:, node, None]], dim=1))
        return torch.stack([self.scores(path) for path in paths], dim=1)

    def pair_distribution(self, prefix: Tensor) -> Tensor:
        """Joint distribution `(vocab_size, vocab_size)` of the two tokens after one `prefix` of shape `(length,)`."""
        extended = torch.cat([prefix.expand(self.vocab_size, -1), torch.arange(self.vocab_size)[:, None]], dim=1)
        first = self.scores(prefix[None])[0].double().softmax(-1)
        return first[:, None] * self.scores(extended).double().softmax(-1)


def random_tree(seed: int, batch_size: int, num_nodes: int, vocab_size: int, padding: float = 0.2) -> DraftTree:
    """Trees of any shape, with duplicated siblings when `vocab_size` is small, and padding among the nodes."""
    rng = random.Random(seed)
    tokens = [[rng.randrange(vocab_size) for _ in range(num_nodes)] for _ in range(batch_size)]
    parents = [[-1, *(rng.randrange(node) for node in range(1, num_nodes))] for _ in range(batch_size)]
    valid = [[True] for _ in range(batch_size)]
    for row in range(batch_size):
        for node in range(1, num_nodes):
            valid[row].append(valid[row][parents[row][node]] and rng.random() >= padding)
    return DraftTree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(valid))
