"""What speculation achieved in one call of `generate`, and what the gate found out."""

from array import array
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True)
class GateDecision:
    """What the gate found out, when that changed.

    Args:
        choice (`str`): The fastest one: `plain` or `draft`; with `tree_choices`, instead of `draft`, the tree.
        length (`int`): Tokens of the longest row by then, prompt included.
        plain_tokens_per_second (`float`): Of steps without drafting, all growing rows together.
        draft_tokens_per_second (`float`): Of steps that speculate, with the fastest tree.
        tau (`float`): Tokens per verification and row of the steps that this speed was taken from. 0 if nothing was
            tried: the speed then is what speculation could reach if every draft were accepted.
    """

    choice: str
    length: int
    plain_tokens_per_second: float
    draft_tokens_per_second: float
    tau: float


@dataclass
class SpeculationStats:
    """Counts and times of one call, summed over the rows of the batch. Complete when the call has returned.

    The first token comes from the prompt's own forward and belongs to the prefill; everything else is counted here.
    A *row-step* is one row of one verification in which the row was still growing. Where the gate had the root alone
    verified, it is a *plain* one, which emits one token and counts for nothing else.

    Args:
        method (`str`): `model_type` of the draft.
        num_spec_steps (`int`): Row-steps, plain ones apart.
        num_plain_steps (`int`): Plain row-steps.
        num_forwards (`int`): Verification forwards of the target, plain ones included (one serves all rows).
        num_draft_tokens (`int`): Drafted tokens that were verified, padding excluded.
        num_accepted_draft_tokens (`int`): Drafted tokens that were emitted.
        num_accepted_ngram_tokens (`int`): Those of them that n-grams alone proposed. TokenSwift's beta also credits
            n-grams with what another candidate proposed as well.
        num_emitted_tokens (`int`): Tokens emitted by verifications, bonus tokens included, those of plain steps apart.
        acceptance_histogram (`list[int]`): Entry k counts the row-steps that emitted k drafted tokens.
        prefill_seconds (`float`): Until the first token (time to first token).
        draft_seconds (`float`): In the drafter, with what it does to catch up after a verification.
        verify_seconds (`float`): In verification forwards. Steps on a GPU run on after the call has returned, and the
            wait for them falls into the rest.
        decode_seconds (`float`): Everything after the first token.
        draft_state_bytes (`int`): What the drafter kept beside the target's cache.
        gate_decisions (`list[GateDecision]`): What the gate found out, each time that it changed.
        interrupted (`bool`): Whether Ctrl-C, or a stopping criterion that raised StopIteration, ended the call.
        partial_sequences (`torch.LongTensor` of shape `(batch, length)`, *optional*): After Ctrl-C, the prompts
            and what was generated, as `generate` would have returned them; None if nothing was.
        emitted_per_step (`list[array]`): For each row of the batch, the tokens that each of its row-steps emitted: the
            last of them is the target's own, those before it were drafted. Together with the first token they are the
            row's text. Rows behind the last one that had a row-step are missing.
        drafted_per_step (`list[array]`): Likewise, the drafted tokens that were verified.
    """

    method: str = ""
    num_spec_steps: int = 0
    num_plain_steps: int = 0
    num_forwards: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_accepted_ngram_tokens: int = 0
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
        """tau: tokens emitted per row-step, the bonus token included; 0 before the first verification."""
        return self.num_emitted_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of the drafted tokens that were emitted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def rest_seconds(self) -> float:
        """Decoding time outside of drafting and verification forwards: acceptance, commit, stopping, streaming."""
        return max(0.0, self.decode_seconds - self.draft_seconds - self.verify_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted per second of decoding, all rows together, prefill and first token apart."""
        tokens = self.num_emitted_tokens + self.num_plain_steps
        return tokens / self.decode_seconds if self.decode_seconds else 0.0

    def record_forward(self, emitted: list[int], drafted: list[int] | None, ngrams: list[int]) -> None:
        """Count one verification; all lists have an entry per row.

        Args:
            emitted (`list[int]`): Tokens that each row emitted; 0 in rows that took no part.
            drafted (`list[int]`, *optional*): Drafted tokens that were verified; None for a plain step.
            ngrams (`list[int]`): Emitted tokens that n-grams alone had proposed.
        """
        self.num_forwards += 1
        for row, count in enumerate(emitted):
            if count and drafted is None:
                self.record_plain(row)
            elif count and drafted is not None:
                self.record(count, drafted[row], count - 1, ngrams[row], row)

    def record(self, emitted: int, drafted: int, accepted: int, ngrams: int = 0, row: int = 0) -> None:
        """Count one step of `row` that emitted `emitted` tokens, `accepted` of them drafted, out of `drafted` proposed.

        `ngrams` of the accepted ones were proposed by n-grams alone.
        """
        self._note(row, emitted, drafted)
        self.num_spec_steps += 1
        self.num_draft_tokens += drafted
        self.num_emitted_tokens += emitted
        self.num_accepted_draft_tokens += accepted
        self.num_accepted_ngram_tokens += ngrams
        self.acceptance_histogram += [0] * (accepted + 1 - len(self.acceptance_histogram))
        self.acceptance_histogram[accepted] += 1

    def record_plain(self, row: int = 0) -> None:
        """Count one step of `row` in which the root alone was verified, and one token emitted."""
        self._note(row, 1, 0)
        self.num_plain_steps += 1

    def _note(self, row: int, emitted: int, drafted: int) -> None:
        while len(self.emitted_per_step) <= row:
            self.emitted_per_step.append(array("H"))
            self.drafted_per_step.append(array("H"))
        self.emitted_per_step[row].append(emitted)
        self.drafted_per_step[row].append(drafted)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the single steps and the text, ratios included, for JSON."""
        counts = replace(self, partial_sequences=None, emitted_per_step=[], drafted_per_step=[])
        left_out = ("partial_sequences", "emitted_per_step", "drafted_per_step")
        sums = {name: value for name, value in asdict(counts).items() if name not in left_out}
        return {
            **sums,
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "rest_seconds": self.rest_seconds,
            "tokens_per_second": self.tokens_per_second,
        }

    def __str__(self) -> str:
        return (
            f"{self.method}: tau {self.mean_acceptance_length:.2f} over {self.num_spec_steps} verifications, "
            f"{self.num_accepted_draft_tokens}/{self.num_draft_tokens} drafted tokens accepted, "
            f"{f'{self.num_plain_steps} plain steps, ' if self.num_plain_steps else ''}"
            f"{self.tokens_per_second:.1f} tokens/s after {self.prefill_seconds:.2f} s of prefill"
            f"{', interrupted' if self.interrupted else ''}"
        )
