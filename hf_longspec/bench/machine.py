"""The machine: its description for result files, peak memory of a call, bandwidth, and the least time of a step."""

import os
import platform
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ..generation.target import TargetView

# Names in /proc/cpuinfo of instructions that multiply bfloat16 numbers, on x86 and ARM.
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
READ_BYTES = 2**29  # far above any last-level cache
READ_SECONDS = 1.0
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PROC = Path("/proc/self")
_ABSOLUTE = re.compile(r"(?<![\w.~/-])~?/[^\s'\",]+")


def environment() -> dict[str, Any]:
    """All facts that are needed to repeat a measurement, ready for JSON. Set the number of threads first."""
    info = _cpuinfo()
    name = info.get("model name") or platform.processor() or platform.machine()
    family = ", ".join(f"{key} {info[key]}" for key in ("cpu family", "model") if key in info)  # names are not specific
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command(),
        "commit": git_commit(),
        "cpu": f"{name} ({family})" if family else name,
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "native_bfloat16": native_bfloat16(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": memory_gib(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def command() -> str:
    """The command line of this process as one would type it, without the folders of this machine.

    Paths below the current folder become relative to it, and other absolute paths are cut to their name.
    """
    script, *arguments = sys.argv
    module = getattr(sys.modules["__main__"], "__spec__", None)  # of `python -m`
    if Path(script).name == "app.py" or Path(script).stem == "hf-longspec":
        program = ["hf-longspec"]
    else:
        program = ["python", *([script] if module is None else ["-m", module.name])]
    return shlex.join(map(without_folders, [*program, *arguments]))


def without_folders(text: str) -> str:
    """A text in which absolute paths are shortened.

    >>> without_folders("--data=/home/me/novels"), without_folders("org/model")
    ('--data=novels', 'org/model')
    """

    def shortened(match: re.Match[str]) -> str:
        relative = os.path.relpath(os.path.expanduser(match[0]))
        return Path(match[0]).name if relative.startswith("..") else relative

    return _ABSOLUTE.sub(shortened, text)


def git_commit(folder: Path | None = None) -> str | None:
    """Commit of the checkout that holds `folder` (this package), `+` after it if tracked files were changed."""
    folder = folder or Path(__file__).resolve().parent
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    # the results themselves are files of the repository: writing them changes nothing that was measured
    paths = [":/", ":(top,exclude)benchmarks/results"]
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", *paths)
    return commit + ("+" if changed else "")


def native_bfloat16(device: torch.device | None = None) -> bool | None:
    """Whether the device, by default the processor, multiplies bfloat16 numbers itself; `None` if that is unknown."""
    if device is not None and device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    flags = _cpuinfo().get("flags") or _cpuinfo().get("Features")
    return None if flags is None else bool(BFLOAT16_FLAGS & set(flags.split()))


def memory_gib() -> float | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of packages; `None` for one that is not installed."""
    installed: dict[str, str | None] = dict.fromkeys(packages)
    for package in packages:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


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


class PeakMemory:
    """Highest memory in use between `reset` and `read`, weights and cache included.

    On CUDA devices it is what PyTorch's allocator handed out, summed over the devices. On Linux CPUs it is the
    high-water mark of the process's resident memory, which includes the interpreter and its libraries; the process
    resets the mark. On other devices nothing is measured.
    """

    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.how = "not measured on this device"
        if self.on_cuda:
            self.how = "peak of PyTorch's CUDA allocator, all devices together"
        elif device.type == "cpu" and self._reset_resident():
            self.how = "high-water mark of the process's resident memory (VmHWM), interpreter included"

    def reset(self) -> None:
        if self.on_cuda:
            for index in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(index)
        else:
            self._reset_resident()

    def read(self) -> int | None:
        """Bytes, or None where nothing is measured."""
        if self.on_cuda:
            return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
        if self.how.startswith("not"):
            return None
        match = re.search(r"VmHWM:\s+(\d+) kB", (_PROC / "status").read_text(encoding="ascii"))
        return int(match[1]) * 1024 if match else None

    def _reset_resident(self) -> bool:
        try:
            (_PROC / "clear_refs").write_text("5", encoding="ascii")  # proc(5): 5 resets the high-water mark
        except OSError:
            return False
        return True


def read_gb_per_second(device: torch.device | str = "cpu") -> float | None:
    """Measure the rate at which a large sum reads memory, in 10^9 bytes per second: the best pass within a second."""
    from torch.utils.benchmark import Timer  # it needs 0.2 s, which most commands have no use for

    if torch.device(device).type not in ("cpu", "cuda"):
        return None
    try:
        buffer = torch.ones(READ_BYTES // 4, device=device)
    except torch.OutOfMemoryError:
        return None
    # threads named: Timer runs with one otherwise
    timer = Timer("buffer.sum()", globals={"buffer": buffer}, num_threads=torch.get_num_threads())
    return READ_BYTES / min(timer.blocked_autorange(min_run_time=READ_SECONDS).times) / 1e9


def step_bytes(model: PreTrainedModel, context: int, batch: int) -> int:
    """Bytes that one decoding step has to read: every weight once, the cached keys and values of all rows."""
    config = model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * context * batch
    weights = sum(parameter.numel() for parameter in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding is not head:  # an embedding table that is only looked up: a step reads one row of it
        weights -= embedding.numel()
    return (numbers + weights) * head.element_size()


def floor_seconds(model: PreTrainedModel, context: int, batch: int, gb_per_second: float) -> float | None:
    """Seconds to read weights and cache once; `None` for targets that do not read all of both in every step."""
    target = TargetView(model)
    config = model.config.get_text_config(decoder=True)
    if config.is_heterogeneous or target.sliding_layers or target.has_latent_cache:
        return None
    if any(getattr(config, name, None) for name in EXPERTS):
        return None
    return step_bytes(model, context, batch) / (gb_per_second * 1e9)
