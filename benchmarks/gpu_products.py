"""Products with weights of 4 bits on a GPU: torch's kernels and gemlite's, alone and in SpecAttn's drafting steps."""

import math
from itertools import product
from typing import Any
from unittest import mock

import torch

import hf_longspec
from benchmarks.gpu_run import GpuRun, Plan
from benchmarks.harness import Skip
from benchmarks.random_inputs import relative_error
from hf_longspec.cli.measuring import PLAIN
from hf_longspec.modeling.shared import low_bit_products
from hf_longspec.modeling.shared.low_bit_products import GROUP, TOLERANCE, GemliteProduct, Int4Product

KERNELS = {"torch": Int4Product, "gemlite": GemliteProduct}


def require(kernel: str, device: torch.device) -> None:
    """Raise [`Skip`] if a kernel cannot run on the device."""
    if kernel == "gemlite" and (reason := low_bit_products.why_not_gemlite(device)) is not None:
        raise Skip(reason)


@torch.no_grad()
def products(run: GpuRun) -> None:
    """Time per matrix of every size of the plan, over so many matrices that no cache holds them.

    The floor is that of half a byte for a weight and two bytes for a group. Both kernels multiply the same numbers.
    """
    for vectors, (rows, columns) in product(run.plan.vectors, run.plan.matrices):
        for kernel, kind in KERNELS.items():
            what = {"kernel": kernel, "rows": rows, "columns": columns, "vectors": vectors}
            with run.attempt(**what):
                require(kernel, run.device)
                if run.machine is None:
                    raise Skip("the ceilings were not measured, and there is no floor without them")
                rounded, scales = low_bit_products.random_weights(rows, columns, run.device)
                x = low_bit_products.random_vectors(vectors, columns, run.device)
                exact = x.double() @ (rounded * scales.bfloat16().double().repeat_interleave(GROUP, 1)).T
                one = kind(rounded, scales)
                if not (error := relative_error(one(x), exact)) <= TOLERANCE:
                    raise Skip(f"not timed: its error is {error:.1e}, over {TOLERANCE:.1e}")
                many = low_bit_products.rotated(one) if run.is_cuda else [one] * run.plan.rotating
                timing = run.time(lambda many=many, x=x: [one(x).to(x.dtype) for one in many]).scaled(len(many))
                read = rows * columns * (0.5 + 2 / GROUP)
                values = {"error": error, "tb_per_second": read / timing.median / 1e9}
                run.write_timing("product", timing, read / run.machine.tb_per_second / 1e9, **what, **values)


def few_bit_drafts(target: Any, plan: Plan) -> dict[str, Any]:
    """No draft, and SpecAttn whose steps read weights of 4 bits by one of the kernels."""
    drafts: dict[str, Any] = {PLAIN: hf_longspec.PlainDraftModel.from_target(target)}
    settings = {"num_assistant_tokens": plan.gamma, "draft_weights": "int4"}
    for kernel in KERNELS:
        draft = hf_longspec.SpecAttnDraftModel.from_target(target, **settings)
        _use(draft, kernel)
        drafts[f"SpecAttn, int4 by {kernel}, gamma {plan.gamma}"] = draft
    return drafts


def _use(draft: Any, kernel: str) -> None:
    """Let a draft multiply by one kernel, whatever is faster."""
    weights_for, ratio = draft.weights_for, 0.0 if kernel == "gemlite" else math.inf

    def weights_by_kernel(target: Any, *args: Any) -> Any:
        require(kernel, target.device)
        with mock.patch.object(low_bit_products, "ratio", return_value=ratio):
            return weights_for(target, *args)

    draft.weights_for = weights_by_kernel
