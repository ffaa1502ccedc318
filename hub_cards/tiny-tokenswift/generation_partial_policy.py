# Published with a draft by hf_longspec, Apache-2.0.
"""Which entries of a growing context a buffer of fixed size holds (TokenSwift, section 3.3)."""

from dataclasses import dataclass

import torch

from .generation_selection import SINK_TOKENS

POLICIES = ("dynamic", "static", "full")


@dataclass(frozen=True)
class PartialKVPolicy:
    """The slots of one layer's buffer, for one row and KV head.

    A build orders entries by importance: the sinks, then the newest, then the others by falling score. Tokens that
    come later take the free slots, and then the slots of the least important entries. When nothing but the sinks is
    left to replace, the next build is due. So the buffer always holds the last `recent` tokens, and every token since
    the build.

    Source: https://huggingface.co/papers/2502.18890, section 3.3. The guaranteed recent tokens are ours.

    Args:
        budget (`int`): Entries the buffer holds.
        recent (`int`): Newest entries that a build keeps whatever their score.
        dynamic (`bool`): Whether tokens that come after the first build enter the buffer at all.
    """

    budget: int
    recent: int
    dynamic: bool = True

    def size(self, built: int) -> int:
        """Entries that a build of the first `built` tokens keeps."""
        return min(built, self.budget)

    def room(self, built: int) -> int:
        """Tokens that fit in behind a build of `built` tokens."""
        return self.budget - min(self.size(built), SINK_TOKENS) if self.dynamic else 0

    def used(self, built: int, length: int) -> int:
        """Slots in use when `length` tokens are committed, `built` of which were there at the build."""
        return min(self.budget, self.size(built) + (length - built)) if self.dynamic else self.size(built)

    def is_due(self, built: int | None, length: int) -> bool:
        """Whether a row needs a build before it can hold `length` tokens; `built` is `None` before the first one."""
        return built is None or (self.dynamic and length - built > self.room(built))

    def slot(self, built: int, token: int) -> int:
        """Where token number `token` goes after a build of the first `built` ones."""
        free = self.size(built) + token - built
        return free if free < self.budget else self.budget - 1 - (token - built)

    def select(self, scores: torch.Tensor) -> torch.Tensor:
        """What a build keeps, the most important first.

        Args:
            scores (`torch.Tensor` of shape `(K, built)`): Of every token, per KV head.

        Returns:
            `torch.LongTensor` of shape `(K, size(built))`: their numbers.
        """
        heads, built = scores.shape
        size = self.size(built)
        sinks = min(SINK_TOKENS, size)
        recent = min(self.recent, size - sinks)
        # newest first: a replacement in this part takes the oldest, in exchange for one that is newer than all
        numbers = torch.arange(built, device=scores.device)
        certain = torch.cat([numbers[:sinks], numbers[built - recent :].flip(0)])
        best = scores[:, sinks : built - recent].topk(size - sinks - recent, dim=-1).indices + sinks
        return torch.cat([certain.expand(heads, -1), best], dim=-1)
