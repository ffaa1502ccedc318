"""What forwards over whole texts share, by which drafts are trained and compared."""

from types import SimpleNamespace
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")


def up_to(step: int, kept: list[T], new: T) -> list[T]:
    """Return what was kept of the steps before, and this step's, which is kept the first time."""
    if len(kept) == step:
        kept.append(new)
    return [*kept[:step], new]


def ends_of(embed_tokens: Any, lm_head: Any) -> Any:
    """Return what stands for a target in `embed` and `logits`, made of weights `(vocab, hidden)` or of modules."""
    embedding, head = (getattr(part, "weight", part) for part in (embed_tokens, lm_head))
    return SimpleNamespace(
        get_input_embeddings=lambda: None if embedding is None else nn.Embedding.from_pretrained(embedding.detach()),
        get_output_embeddings=lambda: None if head is None else lambda outputs: nn.functional.linear(outputs, head),
    )
