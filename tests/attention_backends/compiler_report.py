"""What the compiler reports of a kernel. For processes that compile, which import nothing else of the tests."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def usage(compiled):
    """Registers, and bytes of stack and local memory (where spilled registers go), per thread; shared memory."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        report = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return found | {"SHARED": compiled.metadata.shared}
