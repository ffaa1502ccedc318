"""Token streams on disk, as `train_tiny_target.py` and `write_target_texts.py` leave them: `*.npy` in a folder."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch.utils.data import ConcatDataset

from hf_longspec.training import TokenWindows

ROOT = Path(__file__).resolve().parents[1]


def load_streams(folder: Path) -> list[np.ndarray]:
    """All streams of a folder, memory-mapped."""
    streams = [np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))]
    if not streams:
        raise SystemExit(f"{folder} has no *.npy: run examples/train_tiny_target.py with this --output first")
    return streams


def cut_rows(streams: Sequence[np.ndarray], length: int) -> ConcatDataset:
    """Streams cut into rows; one that is much shorter than the longest is repeated until it has half its length."""
    longest = max(map(len, streams))
    repeated = [stream for stream in streams for _ in range(max(1, round(longest / 2 / len(stream))))]
    return ConcatDataset([TokenWindows(stream, length) for stream in repeated])


def folder_name(path: Path) -> str:
    """A folder of this repository from its root, any other as if below `runs`."""
    path = path.resolve()
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return f"runs/{path.parent.name}/final" if path.name == "final" else f"runs/{path.name}"
