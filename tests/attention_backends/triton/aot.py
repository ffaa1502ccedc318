"""Compile the Triton kernels for a GPU that need not be there; one line of JSON per kernel, with what it uses.

    python aot.py CAPABILITY short|all

Every kernel is compiled with the arguments that its operator launches it with. It has to be a process of its own,
without TRITON_INTERPRET: where triton was imported for interpretation, its own library of functions is interpreted as
well, and nothing can be compiled any more. The kernel files are imported as modules of an empty package, because the
whole package takes several times as long as a kernel.
"""

import json
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
import triton
from triton.backends.compiler import GPUTarget

ROOT = Path(__file__).resolve().parents[3]
sys.modules["kernels"] = ModuleType("kernels")
sys.modules["kernels"].__path__ = [str(ROOT / "hf_longspec" / "attention_backends" / "triton")]
commit, launch, layers, tiles = (import_module(f"kernels.{name}") for name in ("commit", "launch", "layers", "config"))

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# Shared memory that one program may use, in bytes (CUDA programming guide, compute capabilities).
GPUS = {
    80: tiles.Gpu(163 * 1024, warpgroups=False),
    89: tiles.Gpu(99 * 1024, warpgroups=False),
    90: tiles.Gpu(227 * 1024, warpgroups=True),
    100: tiles.Gpu(227 * 1024, warpgroups=True),
}
GROUPS = 4
# Features by rows in `short`.
SHORT = {16: ("plain",), 32: (), 64: ("all",)}
# dtype, sizes of keys and values, size of a hidden state: those of an 8B model; small, wide and odd ones.
LAYERS = (
    (torch.bfloat16, 128, 128, 4096),
    (torch.float16, 64, 64, 896),
    (torch.float32, 128, 128, 16384),
    (torch.bfloat16, 80, 72, 2560),
)


class AbsentGpu:
    """The answers that Triton needs from its driver before a launch."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch

    def get_current_stream(self, device):
        return 0


def hybrid(size, rows, dtype, features):
    """Launch attention to the prefix: "plain" with a tree, "all" with a window, a softcap and scores too, or a part."""
    nodes = rows // GROUPS
    query, key = torch.empty(1, 2 * GROUPS, nodes, size, dtype=dtype), torch.empty(1, 2, 2000, size, dtype=dtype)
    numbers, sinks = torch.zeros(1, nodes, dtype=torch.long), torch.zeros(2 * GROUPS)
    lengths, mask = numbers[:, 0].contiguous(), torch.ones(1, nodes, nodes, dtype=torch.bool)
    op, *options = {
        "plain": (launch.hybrid_op, None, mask, sinks, 0.1, None, None),
        "scores": (launch.scored_op, None, mask, sinks, lengths, 0.1, None, None, False, True),
        "all": (launch.scored_op, numbers, mask, sinks, lengths, 0.1, 100, 3.0, True, True),
        "none": (launch.hybrid_op, None, None, sinks, 0.1, None, None),
    }[features]
    op(query, key, key, lengths, *options)


def tree(size, rows, dtype):
    """Launch attention under an additive mask, with a softcap."""
    nodes = rows // GROUPS
    query, key = torch.empty(1, 2 * GROUPS, nodes, size, dtype=dtype), torch.empty(1, 2, 70, size, dtype=dtype)
    launch.tree_op(query, key, key, torch.zeros(1, nodes, 70), 0.1, 3.0)


def spilling():
    """Launch a tile that is too large for the registers of one warp."""
    chosen, launch.tree_config = launch.tree_config, lambda *args: tiles.tree_config(*args)._replace(num_warps=1)
    tree(128, 32, torch.bfloat16)
    launch.tree_config = chosen


def move(dtype, size):
    """Launch the kernel that moves accepted nodes."""
    buffers = [torch.empty(2, 2, 50, size, dtype=dtype) for _ in range(4)]
    path, lengths = torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    commit.move_nodes._init_fn(buffers, path, lengths, lengths)


def layer(dtype, size, value_size, hidden, most=None):
    """Launch the kernels between attention and matrix products, in all their forms or in the first ones."""
    row, weight = torch.empty(1, 3, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
    for form in layers.NORM_FORMS[:most]:
        layers.add_norm(row, weight, 1e-5, form, row, row)
        layers.add_norm(row, weight, 1e-5, form)
    for activation in [*layers.ACTIVATIONS][:most]:
        layers.gated(activation, row, row)
    query, key = (torch.empty(1, heads, 3, size, dtype=dtype) for heads in (2 * GROUPS, 2))
    value = torch.empty(1, 2, 3, value_size, dtype=dtype)
    keys, values = (torch.empty(1, 2, 70, numbers, dtype=dtype) for numbers in (size, value_size))
    for form in layers.ROTARY_FORMS[:most]:
        for written in (None, (value, values, torch.arange(3))):
            factors = torch.empty(1, 3, size // 2 // form.numbers, dtype=dtype)  # of a part of every vector
            layers.rotate(query, key, factors, factors, form, query, key if written is None else keys, written)
    state, step = torch.empty(1, 2 * GROUPS, size, value_size), torch.empty(1, 1, 2 * GROUPS, size)
    vectors = [
        x[:, :, :1].transpose(1, 2) for x in (query[:, :GROUPS], query[:, :GROUPS], value.repeat(1, GROUPS, 1, 1))
    ]
    for decay in (step[..., 0], step)[:most]:
        layers.delta_rule(state, *vectors, decay, step[..., 0].to(dtype), 1e-6)


def calls(everything, gpu):
    """`(label, function, arguments)` of every launch."""
    for size in (64, 128, 256) if everything else (128,):
        for dtype in (torch.bfloat16, torch.float16, torch.float32) if everything else (torch.bfloat16,):
            most = tiles.largest_rows(size, size, dtype.itemsize, gpu)
            all_rows = [rows for rows in (16, 32, 64, 128) if rows <= most]
            for rows in all_rows:
                for features in ("plain", "all", "none", "scores") if everything else SHORT[rows]:
                    yield "hybrid", hybrid, (size, rows, dtype, features)
            for rows in all_rows[: 2 if everything else 1]:
                yield "tree", tree, (size, rows, dtype)
    for case in ((torch.bfloat16, 128), (torch.float32, 3), (torch.float16, 5), (torch.int8, 7)):
        yield "move", move, case  # words of 8, 4, 2 and 1 bytes
    for case in LAYERS if everything else [(*LAYERS[0], 1)]:
        yield "layer", layer, case
    if everything:
        yield "spilling", spilling, ()


def usage(compiled):
    """Registers, and bytes of stack and local memory (where spilled registers go), per thread; shared memory."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        report = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return found | {"SHARED": compiled.metadata.shared}


def has_barrier(compiled):
    """Whether a barrier stands between the last load and the first store after it."""
    accesses = re.findall(r"\b(ld\.global|bar\.sync|st\.global)", compiled.asm["ptx"])
    last_load = max((place for place, access in enumerate(accesses) if access == "ld.global"), default=-1)
    return accesses[last_load + 1 :][:1] == ["bar.sync"]


def main(capability, everything):
    run, compiled = triton.runtime.JITFunction.run, {}

    def compile_only(self, *args, **kwargs):
        kernel = run(self, *args, **kwargs | {"warmup": True})
        compiled.setdefault(kernel.hash, (self.__name__, kernel))

    triton.runtime.JITFunction.run = compile_only
    triton.runtime.driver.set_active(AbsentGpu(capability))
    launch.gpu_of = lambda device: GPUS[capability]
    reported = set()
    for label, function, arguments in calls(everything, GPUS[capability]):
        function(*arguments)
        for key in compiled.keys() - reported:
            name, kernel = compiled[key]
            line = {"call": label, "arguments": str(arguments), "kernel": name, "BARRIER": has_barrier(kernel)}
            print(json.dumps(line | usage(kernel)), flush=True)
        reported |= compiled.keys()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "all")
