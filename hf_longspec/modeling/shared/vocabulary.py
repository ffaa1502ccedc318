"""Drafts that propose some of the target's tokens, such as the most frequent ones, through a smaller head."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from ...generation.drafter import Binding
from ...generation.target_modules import PartOfHead, TargetEnds
from ..base import DraftModel
from ..configuration_base import DraftConfig


class VocabularyConfig(DraftConfig):
    """Configuration of a draft whose vocabulary may be reduced."""

    model_type = "longspec_vocabulary"
    sizes: ClassVar[dict[str, tuple[int, int]]] = {"draft_vocab_size": (0, 2**24)}

    draft_vocab_size: int | None = None  # number of tokens that can be drafted; by default all of the vocabulary

    def contradictions(self) -> Iterator[str]:
        if (self.draft_vocab_size or 0) > self.vocab_size:
            yield f"draft_vocab_size={self.draft_vocab_size}: expected at most vocab_size={self.vocab_size}"


class VocabularyDraftModel(DraftModel):
    """Base of the drafts whose vocabulary may be reduced. Subclasses call `add_vocabulary`."""

    sized_by_vocabulary: ClassVar[bool] = True  # whether weights have a row for each token of a reduced vocabulary
    d2t: torch.Tensor | None

    def add_vocabulary(self, config: Any) -> None:
        """Add the map of a reduced vocabulary, at first of the first tokens. Target id of token i is i + d2t[i]."""
        size = config.draft_vocab_size
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.long) if size else None)

    @property
    def token_ids(self) -> torch.Tensor:
        """Target ids `(draft vocabulary,)` of the draft's tokens, in increasing order in all published drafts."""
        if self.d2t is None:
            return torch.arange(self.config.vocab_size, device=self.device)
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_vocabulary(self, token_ids: Sequence[int], target: PreTrainedModel | None = None) -> None:
        """Choose the tokens that the draft proposes, such as the most frequent ones.

        Args:
            token_ids (`Sequence[int]`): Different ids, as many as `draft_vocab_size` if weights depend on their number.
            target (`PreTrainedModel`, *optional*): The target, whose rows are copied into a head of the draft's own.

        Raises:
            ValueError: If the number of ids is another one, or an id is outside of the vocabulary or repeated.
        """
        if not self.sized_by_vocabulary and self.config.draft_vocab_size != len(token_ids):
            self.config.draft_vocab_size = len(token_ids)
            self.d2t = torch.zeros(len(token_ids), dtype=torch.long, device=self.device)
        ids = sorted({int(token) for token in token_ids})
        size = self.config.draft_vocab_size
        if len(ids) != size or len(ids) != len(token_ids) or ids[0] < 0 or ids[-1] >= self.config.vocab_size:
            raise ValueError(
                f"{len(token_ids)} token ids, {len(ids)} of them distinct: expected draft_vocab_size={size} distinct "
                f"ids from 0 to {self.config.vocab_size - 1}."
            )
        assert self.d2t is not None
        # another tensor, as graphs hold the rows of the head by its address
        self.d2t = (torch.tensor(ids) - torch.arange(len(ids))).to(self.d2t.device)
        if target is not None:
            self.copy_from(target)

    def copy_from(self, target: PreTrainedModel) -> None:
        """Copy what the draft has of its own in place of the target's; nothing by default."""

    def num_out_of_vocabulary(self, rows: Sequence[Sequence[int]]) -> int:
        if self.d2t is None:
            return 0
        vocabulary = set(self.token_ids.tolist())
        return sum(token not in vocabulary for row in rows for token in row)


def part_of_head(draft: Any, ends: TargetEnds, binding: Binding) -> PartOfHead:
    """Return the target's head for the tokens of a draft. The copy of their rows is kept for later calls."""
    made: list[PartOfHead] = []

    def make() -> PartOfHead:
        made.append(PartOfHead(ends, draft.token_ids))
        return made[0]

    part: PartOfHead = binding.part((PartOfHead, draft.device), make)
    if not made:
        part.renew()
    return part


def of_all_tokens(logits: torch.Tensor, token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return logits `(..., vocab_size)` of the target's tokens from `(..., draft vocabulary)`; others have -inf."""
    everywhere = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return everywhere.index_copy(-1, token_ids, logits)
