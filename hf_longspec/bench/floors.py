"""The least time of a decoding step on this machine, from a measured bandwidth."""

import time

import torch
from transformers import PreTrainedModel

from ..generation.target import TargetView
from .ceilings import read_gb_per_second, step_bytes

CUDA_BYTES = 2**30
SECONDS = 0.5
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def bandwidth(device: torch.device) -> float | None:
    """10^9 bytes per second that a large sum reads; None where that is not measured."""
    if device.type == "cpu":
        return read_gb_per_second()
    if device.type != "cuda":
        return None
    try:
        buffer = torch.ones(CUDA_BYTES // 4, device=device)
    except torch.OutOfMemoryError:
        return None
    best, until = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        buffer.sum()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return CUDA_BYTES / best / 1e9


def floor_seconds(model: PreTrainedModel, context: int, batch: int, gb_per_second: float) -> float | None:
    """Seconds to read weights and cache once; None for targets that do not read all of both in every step."""
    target = TargetView(model)
    config = model.config.get_text_config(decoder=True)
    if target.sliding_layers or target.has_latent_cache or any(getattr(config, name, None) for name in EXPERTS):
        return None
    return step_bytes(model, context, batch) / (gb_per_second * 1e9)
