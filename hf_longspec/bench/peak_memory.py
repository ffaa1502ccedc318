"""Peak memory of a call, as far as the device can tell."""

import re
from pathlib import Path

import torch

_PROC = Path("/proc/self")


class PeakMemory:
    """Highest memory in use between [`reset`] and [`read`], weights and cache included.

    On CUDA devices it is what PyTorch's allocator handed out, summed over the devices. On Linux CPUs it is the
    high-water mark of the process's resident memory, which holds the interpreter and its libraries too; the kernel
    lets a process set its own mark back. Elsewhere nothing is measured.

    Args:
        device (`torch.device`): Of the target.
    """

    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.how = "not measured on this device"
        if self.on_cuda:
            self.how = "peak of PyTorch's CUDA allocator, all devices together"
        elif device.type == "cpu" and self._reset_resident():
            self.how = "high-water mark of the process's resident memory (VmHWM), interpreter included"

    def reset(self) -> None:
        """Begin anew."""
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
        found = re.search(r"VmHWM:\s+(\d+) kB", (_PROC / "status").read_text(encoding="ascii"))
        return int(found[1]) * 1024 if found else None

    def _reset_resident(self) -> bool:
        try:
            (_PROC / "clear_refs").write_text("5", encoding="ascii")  # proc(5): 5 resets the high-water mark
        except OSError:
            return False
        return True
