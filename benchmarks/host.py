"""The time of the host for a step that is not captured: our loop beside transformers' own step.

A random Llama of 32 layers of width 64, whose arithmetic takes no time to speak of, runs one token after a short
prefix. The launches of the Triton kernels do nothing. What is left is the work of Python and of torch's dispatcher, in
the processor time of one thread, which is what a GPU waits for where a step is launched kernel by kernel.

Each turn runs two steps after the prefix and measures the second. The first one comes after a switch of the model's
attention, which reads all modules and displaces what a step needs from the processor's caches. A call of `generate`
switches once.

    python -m benchmarks.host
"""

import os
import time
from unittest import mock

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are defined, which take tensors of the CPU then

import torch
from transformers import LlamaConfig

from benchmarks.harness import MIN_REPEATS, Run, parser, ratios, start, time_in_turns
from benchmarks.random_inputs import BothCaches
from hf_longspec.attention_backends import registry
from hf_longspec.attention_backends.triton import launch
from hf_longspec.cli.measuring import summarize
from hf_longspec.generation.draft_tree import DraftTree

PREFIX, ROOM = 64, 512
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 1024,
}
KERNELS = ("attention_kernel", "combine_kernel")
BACKEND = "hf_longspec_triton"
STEPS = 2  # of one turn


class NoKernel:
    """A Triton kernel whose launches do nothing; `launches` counts them."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> "NoKernel":
        return self

    def __call__(self, *arguments: object, **constants: object) -> None:
        self.launches += 1


class HostCase(BothCaches):
    """A model after a prefix."""

    def __init__(self, shape: dict[str, int]):
        super().__init__(LlamaConfig(**shape), PREFIX, PREFIX + ROOM)
        self.layers = len(self.stock.layers)
        self.stored = [(layer.keys, layer.values) for layer in self.stock.layers]

    def steps(self) -> float:
        """Return the seconds of a verification of the root, which is a plain step of our loop, after another one."""
        with self.target.attention():
            return [self._step() for _ in range(STEPS)][-1]

    def forwards(self) -> float:
        return [self.forward() for _ in range(STEPS)][-1]

    def _step(self) -> float:
        self.cache.set_lengths([PREFIX])
        started = time.process_time()
        self.target.verify(DraftTree.root_only(self.token[0]), self.cache)
        return time.process_time() - started

    def forward(self) -> float:
        for layer, stored in zip(self.stock.layers, self.stored, strict=True):
            layer.keys, layer.values = stored
        return super().forward()


@torch.no_grad()
def measure(results: Run, shape: dict[str, int], repeats: int) -> None:
    kernels = {name: NoKernel() for name in KERNELS}
    with mock.patch.multiple(launch, **kernels), mock.patch.dict(registry._priorities, {BACKEND: 20}):
        registry.select.cache_clear()
        case = HostCase(shape)
        functions = {"loop": case.steps, "stock": case.forwards}
        for function in functions.values():
            function()
        before = kernels["attention_kernel"].launches
        seconds = time_in_turns(functions, repeats)
        launches = kernels["attention_kernel"].launches - before
    registry.select.cache_clear()
    results.write(
        "host",
        layers=case.layers,
        launches_per_step=launches / len(seconds["loop"]) / STEPS,
        loop_us=summarize([value / case.layers * 1e6 for value in seconds["loop"]]),
        stock_us=summarize([value / case.layers * 1e6 for value in seconds["stock"]]),
        ratio=ratios(seconds["loop"], seconds["stock"]),
    )


def main(arguments: list[str] | None = None) -> None:
    args = parser(__doc__, "host", minutes=5, repeats=20 * MIN_REPEATS).parse_args(arguments)
    args.threads = 1
    torch.manual_seed(0)
    with start(args, "host", {"shape": SHAPE, "prefix": PREFIX, "repeats": args.repeats}) as results:
        measure(results, SHAPE, args.repeats)


if __name__ == "__main__":
    main()
