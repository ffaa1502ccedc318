"""A copy of a target whose linear layers have weights of 4 or 8 bits, for the steps in which the target drafts itself.

A drafting step at batch one reads all weights, so it is faster with fewer bits. QuantSpec
(https://huggingface.co/papers/2502.10424) drafts with weights and a cache of 4 bits. Here the copy reads the cache of
the target, so it needs neither a prefill nor keys of its own.
"""

import copy
import re
from collections.abc import Iterable, Iterator
from math import ceil
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.utils import logging

from ...generation.special_cases.forward_check import is_quantized
from ...generation.special_cases.packed_products import sums_of
from .low_bit_products import GROUP, INNER_TILES, Int4Product, Int8Product, LowBitProduct, chosen_products

logger = logging.get_logger(__name__)

BITS = {"int8": 8, "int4": 4}
# Attributes of a module that hold its hooks around forwards.
HOOKS = [f"_forward_{when}hooks{how}" for when in ("", "pre_") for how in ("", "_with_kwargs")]
HOOKS.append("_forward_hooks_always_called")
# Multiples of rows and columns that the kernels for 4 bits take, and of columns that those for 8 bits take: on a CPU
# the latter read beyond the end of other rows, without an error.
ROWS, CPU_COLUMNS, GPU_COLUMNS, COLUMNS_OF_8 = 64, GROUP, 16 * INNER_TILES, 16
# A message names so many kinds of weights that are not rounded.
MOST_NAMED = 4


class LowBitLinear(nn.Module):
    """A linear layer whose weights are rounded to multiples of their scale, that of their absolute maximum.

    Products are computed in bfloat16, by kernels for packed weights. Those for 4 bits take multiples of 64 rows and 64
    columns (128 on a GPU), those for 8 bits multiples of 16 columns. Zeros are added to other matrices, and to the
    vectors that they multiply.

    Args:
        linear (`nn.Linear`): The layer.
        bits (`int`): Bits of a weight, 8 or 4.
        kind (`type[LowBitProduct]`, *optional*): What multiplies; by default torch's kernels.
    """

    def __init__(self, linear: nn.Linear, bits: int, kind: type[LowBitProduct] | None = None):
        super().__init__()
        weight = linear.weight.detach()
        self.bits, self.dtype, self.bias = bits, weight.dtype, linear.bias
        self.out_features, self.in_features = weight.shape
        rows, self.columns = padded_size(weight, bits)
        weight = pad(weight, (0, self.columns - self.in_features, 0, rows - self.out_features))
        rounded, scales = rounded_groups(weight, bits, self.columns if bits == 8 else GROUP)
        kind = kind or (Int8Product if bits == 8 else Int4Product)
        self.product = kind(rounded.view_as(weight), scales.squeeze(-1))

    @staticmethod
    def takes(module: nn.Module, bits: int) -> bool:
        """Return whether a module is a linear layer that is smaller in these bits, zeros included."""
        if type(module) is not nn.Linear or not module.weight.is_floating_point():
            return False
        rows, columns = padded_size(module.weight, bits)
        return rows * columns * bits < module.weight.nbytes * 8

    @property
    def packed(self) -> torch.Tensor:
        """The packed weights."""
        return self.product.packed

    @property
    def weight(self) -> torch.Tensor:
        """The rounded weights, for models that multiply with them in other ways."""
        return self.product.weight()[: self.out_features, : self.in_features].to(self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vectors = x.reshape(-1, self.in_features).to(torch.bfloat16)
        product = self.product(pad(vectors, (0, self.columns - self.in_features)).contiguous())
        out = product[:, : self.out_features].to(x.dtype).view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def padded_size(weight: torch.Tensor, bits: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of a matrix with the zeros that the kernels need."""
    if bits == 8:
        multiples = 1, COLUMNS_OF_8
    else:
        multiples = ROWS, CPU_COLUMNS if weight.device.type == "cpu" else GPU_COLUMNS
    rows, columns = (ceil(size / multiple) * multiple for size, multiple in zip(weight.shape, multiples, strict=True))
    return rows, columns


def rounded_groups(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights `(rows, columns)` as multiples `(rows, groups, group)` of their scales `(rows, groups, 1)`."""
    groups = weight.float().view(len(weight), -1, group)
    most = 2 ** (bits - 1) - 1
    scales = groups.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / most
    return (groups / scales).round(), scales


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
        remedy = "Set draft_weights=None"
        if any(type(module).__name__.startswith("Gguf") for module in target.modules()):
            remedy += ", or load the target with quantization_config=GgufConfig(dequantize=True)"
        return f"{rule}: the weights of this target are quantized already. {remedy}."
    layers = [layer for _, layer in rounded_layers(target, BITS[weights])]
    if not layers:
        return (
            f"{rule}: {type(target).__name__} has no linear layer but the head that would be smaller. Set "
            "draft_weights=None, or pass a copy of the target that transformers has loaded in fewer bits."
        )
    if devices := {layer.weight.device.type for layer in layers} - {"cpu", "cuda"}:
        return f"{rule}: weights on {', '.join(sorted(devices))} cannot be rounded. Set draft_weights=None."
    return None


def described_copy(target: PreTrainedModel, weights: str, layers: dict[str, nn.Linear]) -> str:
    """Describe a copy that rounds these layers: its size, and which weights of a drafting step it leaves, by share.

    Vectors are not counted, nor is the table of embeddings, of which a step reads a row, unless it is the head too.
    """
    head, embeddings = target.get_output_embeddings(), target.get_input_embeddings()
    is_tied = head is not None and head.weight is embeddings.weight
    rounded, left = {id(layer.weight) for layer in layers.values()}, dict[str, int]()
    of_step = {id(x): (name, x) for name, x in target.named_parameters(remove_duplicate=False) if x.dim() > 1}
    if not is_tied:
        of_step.pop(id(embeddings.weight), None)
    for name, weight in of_step.values():
        if id(weight) not in rounded:
            name = re.sub(r"\.\d+\.", ".*.", name).removesuffix(".weight")
            left[name] = left.get(name, 0) + weight.numel()
    total = sum(weight.numel() for _, weight in of_step.values())
    size = sum(rows * columns for rows, columns in (padded_size(x.weight, BITS[weights]) for x in layers.values()))
    text = f"draft_weights={weights!r}: a copy of {len(layers)} linear layers takes "
    text += f"{size * BITS[weights] / 8 / 2**20:,.0f} MiB."
    if left:
        largest = sorted(left, key=left.__getitem__, reverse=True)
        names = [f"{name} ({left[name] / total:.1%})" for name in largest[:MOST_NAMED]]
        more = [f"{len(left) - MOST_NAMED} more"] if len(left) > MOST_NAMED else []
        text += f" {sum(left.values()) / total:.1%} of the weights are not rounded: {', '.join([*names, *more])}."
    if 2 * sum(left.values()) > total:
        text += " As these are more than half, drafting will hardly be faster: draft_weights=None needs no copy."
    return text


Products = dict[torch.device, dict[tuple[int, int], type[LowBitProduct]]]


def products_of(target: PreTrainedModel, weights: str, occurred: Iterable[tuple[int, bool]]) -> Products:
    """Return what multiplies the layers of a copy in 4 bits, by device, and by rows and columns; nothing for 8 bits.

    Args:
        target (`PreTrainedModel`): The target.
        weights (`str`): Name of the bits.
        occurred (`Iterable[tuple[int, bool]]`): Numbers of vectors of a drafting step, and whether steps are captured.
    """
    shapes = dict[torch.device, list[tuple[int, int]]]()
    if BITS[weights] == 4:
        for _, layer in rounded_layers(target, 4):
            shapes.setdefault(layer.weight.device, []).append(padded_size(layer.weight, 4))
    return {device: chosen_products(of_device, occurred, device) for device, of_device in shapes.items()}


def rounded_copy(target: PreTrainedModel, weights: str, products: Products | None = None) -> PreTrainedModel:
    """Return a copy of a target in eval mode that shares hooks, and all but the weights of `rounded_layers`.

    Layers are multiplied by `products`, see `products_of`, or by torch's kernels.
    """
    layers, bits = dict(rounded_layers(target, BITS[weights])), BITS[weights]

    def rounded(layer: nn.Linear) -> LowBitLinear:
        kinds = (products or {}).get(layer.weight.device, {})
        return LowBitLinear(layer, bits, kinds.get(padded_size(layer.weight, bits)))

    logger.warning_once(described_copy(target, weights, layers))
    # what the copy of an object is, by the address of the object
    copies: dict[int, Any] = {id(x): x for x in (*target.parameters(), *target.buffers())}
    copies |= {id(layer): rounded(layer) for layer in layers.values()}
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
        state += [x.data_ptr() for x in module.parameters(recurse=False)]
    sums = dict[torch.device, list[torch.Tensor]]()  # as fused optimizers count no versions of a tensor
    for weight in target.parameters():
        if weight.is_floating_point() and weight.element_size() > 1 and not weight.is_meta:
            sums.setdefault(weight.device, []).append(sums_of(weight).sum())
    return state + [torch.stack(of_device).tolist() for of_device in sums.values()]
