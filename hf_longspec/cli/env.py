"""`hf-longspec env`: versions, machine and backends for a bug report, without paths and user names.

Result files name the machine and the program with the same facts.
"""

import json
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
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import yaml

from hf_longspec import __version__

from ..attention_backends import registry

# Named in a report when they are installed.
PACKAGES = [
    *("transformers", "huggingface_hub", "safetensors", "tokenizers", "accelerate", "peft", "datasets"),
    *("triton", "flash_attn", "kernels"),
]
# Names in /proc/cpuinfo of instructions that multiply bfloat16 numbers, on x86 and ARM.
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
_ABSOLUTE = re.compile(r"(?<![\w.~/-])~?/[^\s'\",]+")


def run(args: SimpleNamespace) -> None:
    facts, in_checkout = environment(), (Path(__file__).resolve().parents[2] / ".git").exists()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count() * torch.cuda.is_available())]
    report = {
        "hf_longspec": __version__,
        "commit": facts["commit"] if in_checkout else None,  # not that of a repository around the environment
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        **{name: facts[name] for name in ("python", "torch", "cpu", "usable_cores", "threads", "memory_gib")},
        "packages": {name: found for name, found in versions(*PACKAGES).items() if found is not None},
        "gpus": [f"{p.name}, capability {p.major}.{p.minor}, {p.total_memory / 2**30:.1f} GiB" for p in gpus],
        "backends": _backends("cuda" if gpus else "cpu"),
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


def native_bfloat16() -> bool | None:
    """Whether the processor multiplies bfloat16 numbers itself; `None` if that is unknown."""
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
