"""Repetition penalty over a window: only tokens that occur among the last ones are penalised.

TokenSwift's contextual penalty, https://huggingface.co/papers/2502.18890, section 3.4 and Eq. 3. In a text of 100,000
tokens nearly every token has occurred, so a penalty on all of them has no effect.
"""

import math

import torch
from transformers.generation.logits_process import LogitsProcessor


class ContextualPenaltyLogitsProcessor(LogitsProcessor):
    """Repetition penalty over the last `window` tokens, prompt included. A repeated id is penalised only once.

    A positive score is divided by the penalty and a negative one multiplied, as in transformers'
    `RepetitionPenaltyLogitsProcessor` (CTRL, https://huggingface.co/papers/1909.05858). A call touches at most `window`
    scores of each row. With a draft, every node of the tree is penalised by the window that ends at that node.

    The window is a part of the `input_ids` of `generate`, which contain the left padding of a batch. While padding is
    in the window, the padding id is penalised. Pass `pad_token_id` if the padding id is a token that the model may
    emit, such as the end of the text.

    Args:
        penalty (`float`):
            Values above 1 make repetition less likely, values below 1 more likely.
        window (`int`):
            Number of last tokens in which a repetition counts, at least 1.
        pad_token_id (`int`, *optional*):
            Id that is never penalised. If it is the padding id, a row's scores do not depend on its padding.

    Raises:
        ValueError: If an argument is out of range.

    >>> processor = ContextualPenaltyLogitsProcessor(penalty=2.0, window=2)
    >>> processor(torch.tensor([[0, 1, 2]]), torch.tensor([[8.0, 8.0, -8.0, 8.0]])).tolist()
    [[8.0, 4.0, -16.0, 8.0]]
    """

    def __init__(self, penalty: float, window: int, pad_token_id: int | None = None):
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not 0 < penalty < math.inf:
            raise ValueError(f"penalty={penalty!r}: expected a number above 0. 1.0 means no penalty; 1.2 is usual.")
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(
                f"window={window!r}: expected a number of tokens of at least 1. To penalise the whole text, use "
                "generate(repetition_penalty=...)."
            )
        if pad_token_id is not None and (not isinstance(pad_token_id, int) or pad_token_id < 0):
            raise ValueError(f"pad_token_id={pad_token_id!r}: expected a token id, or None to penalise every token.")
        self.penalty = penalty
        self.window = window
        self.pad_token_id = pad_token_id

    @property
    def history_window(self) -> int:
        """Number of last tokens that a call needs; the decoding loop passes only these."""
        return self.window

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return a penalised copy of `scores` `(batch, vocab)` that follow `input_ids` `(batch, length)`."""
        # one extra column for ids without a logit, as some embeddings are larger than the head
        copy = torch.nn.functional.pad(scores, (0, 1))
        recent = input_ids[:, -self.window :].clamp_max(scores.shape[1])
        seen = copy.gather(1, recent)
        penalised = torch.where(seen < 0, seen * self.penalty, seen / self.penalty)
        if self.pad_token_id is not None:
            penalised = torch.where(recent == self.pad_token_id, seen, penalised)
        # an id that occurs twice is written twice with the same value
        return copy.scatter_(1, recent, penalised)[:, :-1]
