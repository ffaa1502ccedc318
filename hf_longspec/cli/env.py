"""`hf-longspec env`: versions, machine and backends for a bug report, without paths and user names."""

import json
import os
import platform
import re
from pathlib import Path
from types import SimpleNamespace

import torch
import yaml

from hf_longspec import __version__

from ..attention_backends import registry
from ..generation.route import is_installed
from .machine import environment, versions

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
MACHINE = ("python", "torch", "cpu", "cores", "usable_cores", "threads", "simd", "native_bfloat16", "memory_gib")


def run(args: SimpleNamespace) -> None:
    facts, in_checkout = environment(), (Path(__file__).resolve().parents[2] / ".git").exists()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count() * torch.cuda.is_available())]
    report = {
        "hf_longspec": __version__,
        "commit": facts["commit"] if in_checkout else None,  # not that of a repository around the environment
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        **{name: facts[name] for name in MACHINE},
        "packages": {name: version for name, version in versions(*PACKAGES).items() if version is not None},
        "cuda": {"built": torch.version.cuda, "hip": torch.version.hip, "cudnn": torch.backends.cudnn.version()},
        "gpus": [f"{p.name}, capability {p.major}.{p.minor}, {p.total_memory / 2**30:.1f} GiB" for p in gpus],
        "backends": _backends("cuda" if gpus else "cpu"),
        "generate_patched": is_installed(),
        "variables": {
            name: value for name in VARIABLES if re.fullmatch(r"[\w,.-]+", value := os.environ.get(name, ""))
        },
    }
    text = json.dumps(report, indent=2)  # torch's version is no plain text, which YAML refuses
    print(text if args.as_json else yaml.safe_dump(json.loads(text), sort_keys=False, width=1000).rstrip())


def _backends(device: str) -> dict[str, dict[str, str]]:
    """For every backend, preferred ones first, and every type: `available`, or the reason against it."""
    answers: dict[str, dict[str, str]] = {name: {} for name in registry.backend_names()}
    for name, of_types in answers.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            call = registry.AttentionCall(torch.device(device), dtype, 128, 128)  # the most common head size
            words = (registry.why_not(name, call) or "available").split()
            # a reason may quote the error of an import, which names a file
            shown = ("..." if os.sep in word and not word.startswith("http") else word for word in words)
            of_types[str(dtype).removeprefix("torch.")] = " ".join(shown)
    return answers
