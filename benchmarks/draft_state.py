"""The state of a LongSpec draft, and the time of one draft, from 1K to 64K tokens of context.

A random Llama with 65,536 positions and a cache filled with random numbers: neither bytes nor times depend on their
values, and prefilling 64K tokens would take most of the run.

    python -m benchmarks.draft_state
"""

import torch

import hf_longspec
from benchmarks.harness import parser, start, time_call
from benchmarks.random_inputs import full_cache
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.generation.drafter import Binding, Verification
from hf_longspec.generation.target import TargetView
from hf_longspec.testing import tiny_target

CONTEXTS = (1024, 4096, 16384, 65536)


def main(arguments: list[str] | None = None) -> None:
    args = parser(__doc__, "draft_state", minutes=5).parse_args(arguments)
    target = tiny_target("llama", max_position_embeddings=max(CONTEXTS) + 64, vocab_size=4096, hidden_size=256)
    draft = hf_longspec.LongSpecDraftModel.from_target(target)
    settings = {"widths": draft.setting("tree_widths"), "window": draft.config.window}
    with start(args, "draft_state", settings) as results:
        for context in CONTEXTS:
            results.write("draft_state", context=context, **measure(target, draft, context))


@torch.no_grad()
def measure(target: torch.nn.Module, draft: hf_longspec.LongSpecDraftModel, context: int) -> dict:
    """Bytes of the draft's state and of the target's cache, and milliseconds per draft tree."""
    view = TargetView(target)
    nodes = draft.num_tree_nodes(view)
    cache = full_cache(target, 1, context, nodes, nodes)
    drafter = draft.drafter(Binding(view, cache, None, context + nodes))
    text = torch.randint(3, target.config.vocab_size, (context,), generator=torch.Generator().manual_seed(0))
    drafter.start([text], Verification(torch.zeros(1, 1, dtype=torch.long), SeqLens([1]), SeqLens([context - 1])))
    return {
        "draft_state_bytes": drafter.state_bytes,
        "target_cache_bytes": cache.nbytes,
        "draft_ms": round(time_call(lambda: drafter.propose(text[-1:]), target.device).median, 2),
    }


if __name__ == "__main__":
    main()
