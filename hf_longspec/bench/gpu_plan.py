"""What the GPU benchmark runs: sizes, cases and the seconds that each section may take."""

from dataclasses import dataclass, field

from .verification_inputs import Shape

LLAMA_8B = Shape(layers=32, vocab=128256)
TINY = Shape(layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=16, vocab=64)

# In the order in which they run. What a section leaves over, the later ones may use; the sum is within 9 minutes.
SECONDS = {
    "ceilings": 10.0,
    "correctness": 40.0,
    "kernels": 90.0,
    "baselines": 70.0,
    "forwards": 80.0,
    "iterations": 70.0,
    "profile": 15.0,
    "batches": 35.0,
    "quantised": 20.0,
    "long": 90.0,
}


@dataclass(frozen=True)
class Plan:
    """One run.

    Args:
        shape ([`Shape`]): Of the random target.
        lengths (`tuple[int, ...]`): Prefix lengths that are checked for correctness.
        points (`tuple[tuple[int, int], ...]`): Batch and context of the attention cases, most telling first.
        contexts (`tuple[int, ...]`): Contexts of whole forwards and iterations.
        long_context (`int`): What comes last, and only if there is time.
        nodes (`tuple[int, ...]`): Nodes of a verification.
        rotating (`int`): Layers that a timed pass goes through, so that no cache level holds what is read.
        matrix (`int`): Rows and columns of the matrix product whose rate is the ceiling.
        batches (`tuple[int, ...]`): Batch sizes at `batch_context` tokens.
        batch_context (`int`): Tokens per row in them.
        tokens (`int`): Iterations of a drafter that are timed at a time.
        gamma (`int`): Drafted tokens of SpecAttn.
        trees (`tuple[tuple[int, ...], ...]`): Widths of LongSpec's trees.
        prompt_seed (`int`): Tokens of the random prompts.
        repeats (`int`): Of every timing.
        seconds (`dict[str, float]`): Of every section.
    """

    shape: Shape
    lengths: tuple[int, ...]
    points: tuple[tuple[int, int], ...]
    contexts: tuple[int, ...]
    long_context: int
    nodes: tuple[int, ...]
    rotating: int
    matrix: int
    batches: tuple[int, ...]
    batch_context: int
    tokens: int
    gamma: int = 7
    trees: tuple[tuple[int, ...], ...] = ((4, 16, 16, 16, 16), (4, 4, 4, 4))
    prompt_seed: int = 0
    repeats: int = 20
    seconds: dict[str, float] = field(default_factory=lambda: dict(SECONDS))


PLANS = {
    "llama-3.1-8b": Plan(
        shape=LLAMA_8B,
        lengths=(1, 17, 4095, 5000, 33000),
        points=((1, 32768), (1, 8192), (4, 32768)),
        contexts=(8192, 32768),
        long_context=131072,
        nodes=(1, 7, 17, 69),
        rotating=8,
        matrix=8192,
        batches=(4, 16, 32, 64, 128),
        batch_context=2048,
        tokens=16,
    ),
    # every path of the above in seconds on a CPU; its numbers say nothing
    "tiny": Plan(
        shape=TINY,
        lengths=(1, 17, 65),
        points=((1, 64), (2, 48)),
        contexts=(48, 96),
        long_context=160,
        nodes=(1, 5, 9),
        rotating=2,
        matrix=64,
        batches=(2, 3),
        batch_context=24,
        tokens=3,
        gamma=2,
        trees=((2, 2),),
        repeats=5,
    ),
}
