"""Statistics of speculation in one call of `generate`, and the decisions of the gate."""

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True)
class GateDecision:
    """A decision of the gate, recorded when it differs from the one before.

    Args:
        choice (`str`): The fastest choice: `plain` or `draft`.
        length (`int`): Tokens of the longest row at that time, prompt included.
        plain_tokens_per_second (`float`): Speed of steps without drafting, all growing rows together.
        draft_tokens_per_second (`float`): Speed of speculation.
        tau (`float`): Tokens per verification and row in the steps that this speed was measured on. 0 if speculation
            was not tried. The speed then is the bound that holds if every draft is accepted.
    """

    choice: str
    length: int
    plain_tokens_per_second: float
    draft_tokens_per_second: float
    tau: float


@dataclass
class SpeculationStats:
    """Counts and times of one call, summed over the rows of the batch. They are complete when the call has returned.

    The first token comes from the forward of the prompt and belongs to the prefill. All later tokens are counted here.
    A *row-step* is one row of one verification in which the row was still growing. It is *plain* if the gate had the
    root alone verified; such a step emits one token and is counted in `num_plain_steps` only.

    Args:
        method (`str`): `model_type` of the draft.
        reason (`str`, *optional*): Why the call was decoded without the draft, see `on_unsupported`. All counts are 0.
        num_spec_steps (`int`): Number of row-steps, without plain ones.
        num_plain_steps (`int`): Number of plain row-steps.
        num_forwards (`int`): Number of verification forwards of the target, plain ones included. One serves all rows.
        num_draft_tokens (`int`): Number of drafted tokens that were verified, padding excluded.
        num_accepted_draft_tokens (`int`): Number of drafted tokens that were emitted.
        num_accepted_ngram_tokens (`int`): Number of these that only n-grams proposed. TokenSwift's beta also credits
            n-grams with tokens that another candidate proposed too.
        num_out_of_draft_vocabulary (`int`): Number of tokens of the text that the draft cannot propose, because its
            vocabulary is smaller than the target's.
        num_emitted_tokens (`int`): Number of tokens that verifications emitted, bonus tokens included, without those
            of plain steps. Tokens of earlier steps that a stopping criterion cut off are included.
        acceptance_histogram (`list[int]`): Entry k is the number of row-steps that emitted k drafted tokens.
        prefill_seconds (`float`): Time to the first token.
        draft_seconds (`float`): Time in the drafter, its update after each verification included.
        verify_seconds (`float`): Time in verification forwards. On a GPU these return before their kernels have
            finished, and the wait for the kernels is part of `rest_seconds`.
        decode_seconds (`float`): Time after the first token.
        draft_state_bytes (`int`): Bytes that the drafter kept besides the target's cache.
        gate_decisions (`list[GateDecision]`): Decisions of the gate, one for each change.
        interrupted (`bool`): Whether Ctrl-C, or a stopping criterion that raised StopIteration, ended the call.
        partial_sequences (`torch.LongTensor` of shape `(batch, length)`, *optional*): After Ctrl-C, prompts and
            generated tokens, as `generate` would have returned them. `None` if no token was generated.
        emitted_per_step (`list[array]`): For each row of the batch, the number of tokens that each of its row-steps
            emitted. The last token of a step is the target's own, those before it were drafted. Rows after the last
            one that had a row-step are missing.
        drafted_per_step (`list[array]`): Likewise, the number of drafted tokens that were verified.
    """

    method: str = ""
    reason: str | None = None
    num_spec_steps: int = 0
    num_plain_steps: int = 0
    num_forwards: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_accepted_ngram_tokens: int = 0
    num_out_of_draft_vocabulary: int = 0
    num_emitted_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_state_bytes: int = 0
    gate_decisions: list[GateDecision] = field(default_factory=list)
    interrupted: bool = False
    partial_sequences: torch.Tensor | None = field(default=None, repr=False, compare=False)
    # 2 bytes per step each: 0.4 MB for 100,000 steps
    emitted_per_step: list["array[int]"] = field(default_factory=list, repr=False)
    drafted_per_step: list["array[int]"] = field(default_factory=list, repr=False)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per row-step (tau), the bonus token included; 0 before the first verification."""
        return self.num_emitted_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of the drafted tokens that were emitted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def rest_seconds(self) -> float:
        """Decoding time outside of drafting and verification: acceptance, commit, stopping, streaming."""
        return max(0.0, self.decode_seconds - self.draft_seconds - self.verify_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted per second of decoding, all rows together, without prefill and first token."""
        tokens = self.num_emitted_tokens + self.num_plain_steps
        return tokens / self.decode_seconds if self.decode_seconds else 0.0

    def record(self, emitted: Sequence[int], drafted: Sequence[int] | None, ngrams: Sequence[int]) -> None:
        """Count one verification. All lists have one entry per row.

        Args:
            emitted (`Sequence[int]`): Number of tokens that each row emitted; 0 in rows that took no part.
            drafted (`Sequence[int]`, *optional*): Number of drafted tokens that were verified; `None` for a plain step.
            ngrams (`Sequence[int]`): Number of emitted tokens that only n-grams had proposed.
        """
        self.num_forwards += 1
        while len(self.emitted_per_step) < max((row + 1 for row, count in enumerate(emitted) if count), default=0):
            self.emitted_per_step.append(array("H"))
            self.drafted_per_step.append(array("H"))
        for row, count in enumerate(emitted):
            if not count:
                continue
            self.emitted_per_step[row].append(count)
            self.drafted_per_step[row].append(0 if drafted is None else drafted[row])
            if drafted is None:
                self.num_plain_steps += 1
                continue
            accepted = count - 1
            self.num_spec_steps += 1
            self.num_draft_tokens += drafted[row]
            self.num_emitted_tokens += count
            self.num_accepted_draft_tokens += accepted
            self.num_accepted_ngram_tokens += ngrams[row]
            self.acceptance_histogram += [0] * (accepted + 1 - len(self.acceptance_histogram))
            self.acceptance_histogram[accepted] += 1

    def to_dict(self) -> dict[str, Any]:
        """Return all counts, times and ratios for JSON, without single steps and text."""
        counts = replace(self, partial_sequences=None, emitted_per_step=[], drafted_per_step=[])
        left_out = ("partial_sequences", "emitted_per_step", "drafted_per_step")
        ratios = ("mean_acceptance_length", "draft_acceptance_rate", "rest_seconds", "tokens_per_second")
        sums = {name: value for name, value in asdict(counts).items() if name not in left_out}
        return sums | {name: getattr(self, name) for name in ratios}

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.method}: decoded without the draft, as {self.reason}"
        return (
            f"{self.method}: tau {self.mean_acceptance_length:.2f} over {self.num_spec_steps} verifications, "
            f"{self.num_accepted_draft_tokens}/{self.num_draft_tokens} drafted tokens accepted, "
            f"{f'{self.num_plain_steps} plain steps, ' if self.num_plain_steps else ''}"
            f"{self.tokens_per_second:.1f} tokens/s after {self.prefill_seconds:.2f} s of prefill"
            f"{', interrupted' if self.interrupted else ''}"
        )
