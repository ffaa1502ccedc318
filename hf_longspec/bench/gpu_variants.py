"""Larger batches, and a target whose matrix products run in FP8: how far the picture holds."""

from functools import partial
from typing import Any

import torch
from torch import nn

from ..generation.cache import SpeculativeCache
from .gpu_device import Skip
from .gpu_forward import ForwardSections, running_on
from .gpu_run import GpuRun

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
FP8_CAPABILITY = (8, 9)  # Ada and Hopper on


class Fp8Linear(nn.Module):
    """A linear layer without bias in FP8, with one scale per tensor, that of the input found in every call.

    Args:
        linear (`nn.Linear`): Its weights are rounded.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.scale = linear.weight.abs().max().float() / LARGEST
        self.weight = nn.Parameter((linear.weight / self.scale).to(FP8), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`(..., in)` to `(..., out)` in the dtype of `hidden`."""
        rows = hidden.flatten(0, -2)
        scale = (rows.abs().max().float() / LARGEST).clamp_min(1e-12)
        rounded = (rows / scale).clamp(-LARGEST, LARGEST).to(FP8)
        out = torch._scaled_mm(rounded, self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=hidden.dtype)
        return out.unflatten(0, hidden.shape[:-1])


def quantise(model: nn.Module) -> int:
    """Replace every linear layer, the language-model head included; returns how many there were."""
    replaced = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Fp8Linear(child))
                replaced += 1
    return replaced


class VariantSections:
    """Batches and FP8.

    Args:
        run ([`GpuRun`]): The run.
        forwards ([`ForwardSections`]): Has the target and makes caches.
    """

    def __init__(self, run: GpuRun, forwards: ForwardSections):
        self.run = run
        self.forwards = forwards

    @torch.no_grad()
    def batches(self) -> None:
        """Our step and our verification at every batch size, as far as memory goes."""
        plan = self.run.plan
        for batch in plan.batches:
            what = {"batch": batch, "context": plan.batch_context}
            self.run.attempt(partial(self._time, "batch", plan.nodes, **what), **what)

    @torch.no_grad()
    def quantised(self) -> None:
        """The same in FP8. The target stays so: nothing that needs its own weights may come later."""
        run, context = self.run, self.run.plan.contexts[0]
        if run.device.is_cuda and torch.cuda.get_device_capability() < FP8_CAPABILITY:
            raise Skip(f"FP8 products need compute capability {FP8_CAPABILITY}")
        if run.dtype != torch.bfloat16:
            raise Skip(f"FP8 products give bfloat16, and the run has {run.dtype}")
        quantise(self.forwards.model)
        self._time("fp8", run.plan.nodes, 1, context, weight_bytes=1)

    def _time(self, kind: str, nodes: tuple[int, ...], batch: int, context: int, **floor: int) -> None:
        cache = self.forwards.cache(batch, context, max(nodes))
        at = self.run.roofline(batch, context, **floor)
        for count in nodes:
            for name in self.run.usable:
                what = {"backend": name, "nodes": count, "batch": batch, "context": context}
                self.run.attempt(partial(self._verify, kind, cache, at.verify_ms(count), what), **what)

    def _verify(self, kind: str, cache: SpeculativeCache, floor_ms: float, what: dict[str, Any]) -> None:
        with running_on(self.forwards.model, what["backend"]):
            verify = self.forwards.verification(cache, self.forwards.tree(what["nodes"], what["batch"]))
            if not bool(torch.isfinite(verify()).all()):
                raise Skip("not timed: its logits are not finite")
            self.run.write_timing(kind, self.run.time(verify), floor_ms, **what)
