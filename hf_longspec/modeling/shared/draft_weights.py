"""A copy of a target whose linear layers have weights of 4 or 8 bits, for the steps in which the target drafts itself.

A drafting step at batch one reads all weights, so it is faster with fewer bits. QuantSpec
(https://huggingface.co/papers/2502.10424) drafts with weights and a cache of 4 bits. Here the copy reads the cache of
the target, so it needs neither a prefill nor keys of its own.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ...generation.special_cases.forward_check import is_quantized

logger = logging.get_logger(__name__)

BITS = {"int8": 8, "int4": 4}
# Attributes of a module that hold its hooks around forwards.
HOOKS = [f"_forward_{when}hooks{how}" for when in ("", "pre_") for how in ("", "_with_kwargs")]
HOOKS.append("_forward_hooks_always_called")
# Weights of a row that share a scale in 4 bits. In 8 bits, all of a row do.
GROUP = 64
# Tiles of the innermost dimension in a packed matrix of 4 bits on a GPU.
INNER_TILES = 8


class LowBitLinear(nn.Module):
    """A linear layer whose weights are rounded to multiples of their scale, that of their absolute maximum.

    Products are computed in bfloat16, by torch's kernels for packed weights.
    """

    packed: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear: nn.Linear, bits: int):
        super().__init__()
        weight = linear.weight.detach()
        self.bits, self.dtype, self.bias = bits, weight.dtype, linear.bias
        self.out_features, self.in_features = weight.shape
        rounded, scales = rounded_groups(weight, bits, self.in_features if bits == 8 else GROUP)
        rounded, scales = rounded.view_as(weight), scales.squeeze(-1)
        self.register_buffer("packed", rounded.to(torch.int8) if bits == 8 else packed_by_four(rounded), False)
        if bits == 4:  # for each group the scale and the value of the middle
            scales = torch.stack([scales.T, torch.zeros_like(scales.T)], -1)
        self.register_buffer("scales", scales.squeeze(-1).to(torch.bfloat16).contiguous(), False)

    @staticmethod
    def takes(module: nn.Module, bits: int) -> bool:
        """Return whether the kernels take the matrix of a module."""
        if type(module) is not nn.Linear or not module.weight.is_floating_point():
            return False
        rows, columns = module.weight.shape
        return bits == 8 or (rows % GROUP == 0 and columns % (2 * GROUP) == 0)

    @property
    def weight(self) -> torch.Tensor:
        """The rounded weights, for models that multiply with them in other ways."""
        columns = torch.eye(self.in_features, dtype=torch.bfloat16, device=self.packed.device)
        return self._product(columns).T.to(self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._product(x.reshape(-1, self.in_features).to(torch.bfloat16)).to(x.dtype)
        out = out.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the products `(N, rows)` of vectors `(N, columns)` with the weights."""
        x, aten = x.contiguous(), torch.ops.aten
        if self.bits == 8:
            product: torch.Tensor = aten._weight_int8pack_mm(x, self.packed, self.scales)
        elif x.device.type == "cpu":
            product = aten._weight_int4pack_mm_for_cpu(x, self.packed, GROUP, self.scales)
        else:
            product = aten._weight_int4pack_mm(x, self.packed, GROUP, self.scales)
        return product


def rounded_groups(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights `(rows, columns)` as multiples `(rows, groups, group)` of their scales `(rows, groups, 1)`."""
    groups = weight.float().view(len(weight), -1, group)
    most = 2 ** (bits - 1) - 1
    scales = groups.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / most
    return (groups / scales).round(), scales


def packed_by_four(rounded: torch.Tensor) -> torch.Tensor:
    """Return integers from -7 to 7 `(rows, columns)` in the order of torch's kernels for 4 bits."""
    values = (rounded + 8).to(torch.int32)
    if values.device.type == "cpu":
        packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    else:
        pairs = (values[:, ::2] << 4 | values[:, 1::2]).to(torch.uint8)
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs, INNER_TILES)
    return packed


def rounded_layers(target: PreTrainedModel, bits: int) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers that a copy rounds, with their names: all but the head and parts of adapters."""
    head = target.get_output_embeddings()
    for name, module in target.named_modules():
        if module is not head and "lora_" not in name and LowBitLinear.takes(module, bits):
            yield name, module


def why_not_rounded(target: PreTrainedModel, weights: str) -> str | None:
    """Return why the weights of a target cannot be rounded, and what to do; `None` if they can."""
    rule = f"draft_weights={weights!r}"
    if is_quantized(target):
        return f"{rule}: the weights of this target are quantized already. Set draft_weights=None."
    layers = [layer for _, layer in rounded_layers(target, BITS[weights])]
    if not layers:
        return (
            f"{rule}: no linear layer of {type(target).__name__} has a size that the kernels take. Set "
            "draft_weights=None, or pass a copy of the target that transformers has loaded in fewer bits."
        )
    if devices := {layer.weight.device.type for layer in layers} - {"cpu", "cuda"}:
        return f"{rule}: weights on {', '.join(sorted(devices))} cannot be rounded. Set draft_weights=None."
    return None


def rounded_copy(target: PreTrainedModel, weights: str) -> PreTrainedModel:
    """Return a copy of a target in eval mode that shares hooks, and all but the weights of `rounded_layers`."""
    layers, bits = dict(rounded_layers(target, BITS[weights])), BITS[weights]
    size = sum(layer.weight.numel() for layer in layers.values()) * bits // 8
    logger.warning_once(
        f"draft_weights={weights!r}: a copy of {len(layers)} linear layers takes {size / 2**20:,.0f} MiB."
    )
    # what the copy of an object is, by the address of the object
    copies: dict[int, Any] = {id(x): x for x in (*target.parameters(), *target.buffers())}
    copies |= {id(layer): LowBitLinear(layer, bits) for layer in layers.values()}
    # a hook may hold what cannot be copied, and the copy must not run one that the target has no more
    copies |= {id(hooks): hooks for module in target.modules() for hooks in map(vars(module).get, HOOKS)}
    copied: PreTrainedModel = copy.deepcopy(target, copies)
    return copied.eval()


def state_of_weights(target: PreTrainedModel) -> list[Any]:
    """Return what changes when a copy would be another one: modules, active adapters, weights and their places."""
    names = "_active_adapter", "_disable_adapters", "merged_adapters"
    state: list[Any] = []
    for module in target.modules():
        state += [id(module), *(copy.copy(vars(module)[name]) for name in names if name in vars(module))]
        state += [(x.data_ptr(), x._version) for x in module.parameters(recurse=False)]
    return state
