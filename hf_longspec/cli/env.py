"""`hf-longspec env`: versions, machine and backends for a bug report, without paths and user names."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

from hf_longspec import __version__

from ..attention_backends import registry
from ..bench.machine import environment, versions
from ..generation.route import is_installed

# Named in a report when they are installed.
PACKAGES = [
    *("transformers", "huggingface_hub", "safetensors", "tokenizers", "accelerate", "peft", "datasets"),
    *("triton", "flash_attn", "kernels", "typer", "rich", "numpy"),
]
# Settings that change what is computed, and hold numbers or switches: other values are not shown.
VARIABLES = [
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "HF_HUB_OFFLINE"),
    *("TRANSFORMERS_OFFLINE", "TRITON_INTERPRET", "PYTORCH_ENABLE_MPS_FALLBACK", "TORCH_COMPILE_DISABLE"),
]
# The backends are checked with the most common head size and these types.
HEAD_DIM = 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def system_report() -> dict[str, Any]:
    """The whole report, ready for JSON."""
    found = environment()
    machine = ("cpu", "cores", "usable_cores", "threads", "simd", "native_bfloat16", "memory_gib")
    return {
        "hf_longspec": __version__,
        # not that of another repository, which this environment may lie in
        "commit": found["commit"] if (Path(__file__).resolve().parents[2] / ".git").exists() else None,
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": found["python"],
        "torch": found["torch"],
        "packages": {name: version for name, version in versions(*PACKAGES).items() if version is not None},
        "machine": {name: found[name] for name in machine} | {"interop_threads": torch.get_num_interop_threads()},
        "cuda": {"built": torch.version.cuda, "hip": torch.version.hip, "cudnn": torch.backends.cudnn.version()},
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
        "backends": _backends(),
        "generate_patched": is_installed(),
        "variables": {name: os.environ[name] for name in VARIABLES if _is_plain(os.environ.get(name))},
    }


def describe(report: dict[str, Any]) -> str:
    """The report as a block of text.

    >>> print(describe({"python": "3.12.1", "gpus": [], "machine": {"cores": 2}}))
    python: 3.12.1
    gpus: none
    machine:
      cores: 2
    """
    lines = []
    for name, value in report.items():
        if isinstance(value, dict) and value:
            lines += [f"{name}:", *(f"  {key}: {_shown(entry)}" for key, entry in value.items())]
        elif isinstance(value, list) and value:
            lines += [f"{name}:", *(f"  {_shown(entry)}" for entry in value)]
        else:
            lines.append(f"{name}: {_shown(value)}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, dict) and value:
        return ", ".join(f"{key} {entry}" for key, entry in value.items())
    return str(value) if value not in (None, [], {}) else "none"


def _gpu(index: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(index)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_gib": round(found.total_memory / 2**30, 1),
        "multiprocessors": found.multi_processor_count,
    }


def _backends() -> dict[str, dict[str, str]]:
    """For every backend, preferred ones first, and every type: `yes`, or the reason why not on this machine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    answers: dict[str, dict[str, str]] = {}
    for name in registry.backend_names():
        for dtype in DTYPES:
            reason = registry.why_not(name, registry.AttentionCall(device, dtype, HEAD_DIM, HEAD_DIM))
            answers.setdefault(name, {})[str(dtype).removeprefix("torch.")] = _without_paths(reason or "yes")
    return answers


def _without_paths(text: str) -> str:
    """A reason may quote the error of an import, which names a file."""
    return " ".join("..." if os.sep in word and not word.startswith("http") else word for word in text.split())


def _is_plain(value: str | None) -> bool:
    return value is not None and value.replace(",", "").replace("-", "").replace(".", "").isalnum() and len(value) < 40
