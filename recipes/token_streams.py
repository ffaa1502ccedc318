"""Token streams on disk, as written by `train_tiny_target.py` and `write_target_texts.py`: `*.npy` in a folder."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch.utils.data import ConcatDataset

from hf_longspec.training import TokenWindows

ROOT = Path(__file__).resolve().parents[1]


def load_streams(*folders: Path) -> list[np.ndarray]:
    streams = []
    for folder in folders:
        if not (paths := sorted(folder.glob("*.npy"))):
            raise SystemExit(f"{folder} has no *.npy: run recipes/train_tiny_target.py with this --output first")
        streams += [np.load(path, mmap_mode="r") for path in paths]
    return streams


def add_streams(parser: argparse.ArgumentParser) -> None:
    """Add the option `--streams`, which may be given more than once."""
    parser.add_argument(
        "--streams", type=Path, action="append", required=True, help="folder with token streams; repeatable"
    )


def streams_command(folders: Sequence[Path]) -> str:
    """Return the option `--streams` as given, without the folders of this machine."""
    return " ".join(f"--streams {folder_name(folder)}" for folder in folders)


def cut_rows(streams: Sequence[np.ndarray], length: int) -> ConcatDataset:
    """Cut streams into rows; a stream much shorter than the longest is repeated until it has half its length."""
    longest = max(map(len, streams))
    repeated = [stream for stream in streams for _ in range(max(1, round(longest / 2 / len(stream))))]
    return ConcatDataset([TokenWindows(stream, length) for stream in repeated])


def folder_name(path: Path) -> str:
    """Return the path of a folder from the root of this repository; any other folder gets a path below `runs`."""
    path = path.resolve()
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return f"runs/{path.parent.name}/final" if path.name == "final" else f"runs/{path.name}"
