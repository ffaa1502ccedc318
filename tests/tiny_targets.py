"""Tiny random targets with the structure of their architectures, prompts and drafts.

The usual initialisation gives nearly uniform attention, which would hide a dropped window or a wrong position. Here
attention is peaked, norms and sinks are not at their initial values, and greedy texts vary.
"""

import math
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_longspec.generation.draft_tree import DraftTree
from hf_longspec.generation.drafter import Binding, Drafter, Verification
from hf_longspec.generation.target import TargetView
from hf_longspec.modeling.base import DraftModel
from hf_longspec.modeling.eagle3.modeling_eagle3 import Eagle3DraftModel
from hf_longspec.modeling.longspec.modeling_longspec import LongSpecDraftModel
from hf_longspec.modeling.mtp.modeling_mtp import MtpConfig, MtpDraftModel
from hf_longspec.modeling.plain.modeling_plain import PlainConfig
from hf_longspec.modeling.tokenswift.modeling_tokenswift import TokenSwiftDraftModel
from tests.valid_tree import check_tree

PAD_TOKEN_ID, BOS_TOKEN_ID, EOS_TOKEN_ID = 0, 1, 2
NUM_SPECIAL_TOKENS = 3

# Shorter than the prompts of most tests, so that windows really fill.
WINDOW = 16

# Logits this far apart leave sampling something to choose and greedy decoding a clear winner at most positions.
LOGIT_STD = 3.0

Draft = TypeVar("Draft", bound=DraftModel)

_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
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
        "sliding_window": WINDOW,
        "attn_implementation": "eager",  # sdpa ignores the softcap in transformers 5.17 and refuses it later
        "query_pre_attn_scalar": 24,  # scaling is not head_dim**-0.5
        "attn_logit_softcapping": 4.0,  # low enough to bend the scores of a tiny model
        "final_logit_softcapping": 20.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "layer_types": [_SLIDING, _FULL, _SLIDING],
        "query_pre_attn_scalar": 24,
    },
    "gpt_oss": {
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
        "sliding_window": WINDOW,
        "layer_types": [_SLIDING, _FULL],  # full-attention layers have no rotary embedding
        "logit_scale": 0.5,
    },
    "glm4": {},
    "smollm3": {"no_rope_layers": [1, 0]},
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
    """Random decoder-only model of an architecture of `TINY_TARGETS`, with overrides of its config, in eval mode.

    The same seed gives the same weights under any attention, drawn in float32 and cast; no random state is changed.
    """
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


def unpacked(model: PreTrainedModel) -> PreTrainedModel:
    """Return a float model with the flags that transformers leaves on one from a GGUF file that it has unpacked."""
    quantization = {"quant_method": "gguf", "dequantize": True}
    model.is_quantized, model.quantization_method = True, "gguf"
    model.config.quantization_config = quantization
    return model


def tiny_prompts(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """`input_ids` and `attention_mask` of random prompts of these lengths without special tokens, padded on the left.

    A row depends on the seed, its index and its length alone.

    >>> tiny_prompts(128, [2, 4])[1].tolist()
    [[0, 0, 1, 1], [1, 1, 1, 1]]
    """
    input_ids = torch.full((len(lengths), max(lengths)), PAD_TOKEN_ID)
    attention_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(1009 * seed + row)
        input_ids[row, -length:] = torch.randint(NUM_SPECIAL_TOKENS, vocab_size, (length,), generator=generator)
        attention_mask[row, -length:] = 1
    return input_ids, attention_mask


def generate(model: Any, draft: Any = None, lengths: Sequence[int] = (33, 3, 13), seed: int = 0, **options: Any) -> Any:
    """Continue random prompts of these lengths: greedily and to the full length unless the options say otherwise."""
    input_ids, mask = tiny_prompts(model.config.vocab_size, lengths)
    inputs = {"input_ids": input_ids, "attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    inputs |= {"eos_token_id": None, "pad_token_id": PAD_TOKEN_ID, "assistant_model": draft}
    torch.manual_seed(seed)
    return model.generate(**(inputs | options))


@torch.no_grad()
def _randomize(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw every weight again, then scale the output so that the logits have a standard deviation of `LOGIT_STD`."""
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
            # Small relative to the layers' outputs: with tied embeddings a token would otherwise predict itself.
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


def made_for(cls: type[Draft], target: Any, *models: Any, **overrides: Any) -> Draft:
    """`cls.from_target`; the checkpoint with a random MTP layer that `MtpDraftModel` reads is written for it."""
    if not issubclass(cls, MtpDraftModel):
        return cls.from_target(target, *models, **overrides)
    with TemporaryDirectory() as folder:
        write_mtp_layers(target, folder)
        return cls.from_target(target, checkpoint=folder, **overrides)


def write_mtp_layers(target: Any, folder: Any) -> MtpDraftModel:
    """Write a checkpoint with a random MTP layer under the names of DeepSeek, and nothing else; return its draft."""
    draft = MtpDraftModel(MtpConfig.from_target(target))
    randomize(draft)
    first, weights = target.config.get_text_config().num_hidden_layers, {}
    for name, weight in draft.state_dict().items():
        _, layer, rest = name.split(".", 2)
        rest = f"shared_head.{rest}" if rest.startswith("norm.") else rest.removeprefix("block.")
        weights[f"model.layers.{first + int(layer)}.{rest}"] = weight.clone()
    save_file(weights, Path(folder) / "model.safetensors")
    return draft


def random_draft(cls: type[Draft], target: Any, seed: int = 3, **overrides: Any) -> Draft:
    """An untrained draft with peaked attention and spread logits, so that a wrong key, position or state shows."""
    draft = made_for(cls, target, **overrides)
    randomize(draft, seed)
    return draft


random_longspec_draft = partial(random_draft, LongSpecDraftModel)
random_tokenswift_draft = partial(random_draft, TokenSwiftDraftModel)
random_eagle3_draft = partial(random_draft, Eagle3DraftModel)


def randomize(draft: DraftModel, seed: int = 3) -> None:
    """Spread the weights of a draft, so that a wrong key, position or state shows in its trees."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * (0.3 if weight.dim() == 2 else 0.5))


class RandomTreeDraftModel(DraftModel):
    """Proposes trees of random shape whose nodes carry a known continuation with some probability, else noise."""

    config_class = PlainConfig
    weightless: ClassVar[bool] = True

    def __init__(self, config: Any, hints: Any = None):
        super().__init__(config)
        self.hints: list[list[int]] = hints or []  # continuation of each row, as plain decoding emits it
        self.num_nodes = 7
        self.luck = 0.7  # probability that a node on the right path carries the right token
        self.chain = False  # chains instead of trees
        self.seed = 0  # of the trees
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
        check_tree(tree)
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
        num_valid = self.random.randint(max(1, self.draft.num_nodes - 2), self.draft.num_nodes)
        return tokens, parents, [node < num_valid for node in range(self.draft.num_nodes)]
