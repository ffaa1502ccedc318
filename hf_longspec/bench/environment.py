"""Where and how a number was measured: machine, versions, commit, command."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers

# Names in /proc/cpuinfo of instructions that multiply bfloat16 numbers: x86 and ARM.
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def environment() -> dict[str, Any]:
    """Everything a reader needs to repeat a measurement, ready for JSON. Set the number of threads first."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command(),
        "commit": git_commit(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "native_bfloat16": native_bfloat16(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": memory_gib(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def gpu_environment(device: torch.device) -> dict[str, Any]:
    """The GPU with its memory and the versions that its kernels depend on; on a CPU the versions only."""
    found: dict[str, Any] = {"device": device.type, "cuda": torch.version.cuda}
    for package in ("triton", "flash_attn", "flashinfer-python", "xformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"], found["memory_gb"] = properties.name, round(properties.total_memory / 1e9, 1)
        found["capability"] = f"{properties.major}.{properties.minor}"
    return found


def command() -> str:
    """The command line of this process as one would type it in its folder: absolute paths become relative ones."""
    arguments = [os.path.relpath(part) if os.path.isabs(part) else part for part in sys.argv]
    return shlex.join(["python", *arguments])


def git_commit(folder: Path | None = None) -> str | None:
    """Commit of the checkout that holds `folder` (this package), `+` behind it when tracked files were changed."""
    folder = folder or Path(__file__).resolve().parent
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    # the results themselves are files of the repository: writing them changes nothing that was measured
    paths = [":/", ":(top,exclude)benchmarks/results"]
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", *paths)
    return commit + ("+" if changed else "")


def cpu_name() -> str:
    """Name of the processor, with family and model where the name alone says little."""
    info = _cpuinfo()
    name = info.get("model name") or platform.processor() or platform.machine()
    family = ", ".join(f"{key} {info[key]}" for key in ("cpu family", "model") if key in info)
    return f"{name} ({family})" if family else name


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def native_bfloat16() -> bool | None:
    """Whether the processor multiplies bfloat16 numbers itself; `None` where nobody says."""
    flags = _cpuinfo().get("flags") or _cpuinfo().get("Features")
    return None if flags is None else bool(BFLOAT16_FLAGS & set(flags.split()))


def memory_gib() -> float | None:
    """Memory of the machine."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
