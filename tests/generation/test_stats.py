"""Statistics: their definitions, and their agreement with what was really emitted."""

import json
import os

import pytest
import torch

from hf_longspec import SpeculationStats
from hf_longspec.generation import sequences

pytestmark = pytest.mark.usefixtures("every_step_speculates")


def test_definitions():
    stats = SpeculationStats(method="mine")
    for emitted, drafted in ((3, 4), (1, 4), (1, 2), (5, 4)):
        stats.record([emitted], [drafted], [0])
    stats.decode_seconds = 2.0
    assert stats.mean_acceptance_length == 10 / 4
    assert stats.draft_acceptance_rate == 6 / 14
    assert stats.tokens_per_second == 5.0
    assert stats.acceptance_histogram == [2, 0, 1, 0, 1]
    assert (stats.num_spec_steps, stats.num_emitted_tokens, stats.num_accepted_draft_tokens) == (4, 10, 6)
    assert json.loads(json.dumps(stats.to_dict()))["mean_acceptance_length"] == 2.5
    assert "mine: tau 2.50 over 4 verifications, 6/14 drafted tokens accepted, 5.0 tokens/s" in str(stats)


@pytest.mark.parametrize(
    ("load", "processor_seconds", "busy"),
    [(2.4, 7.1, None), (2.6, 20.0, "load 2.6 on 2 cores"), (0.1, 6.9, "69% of one core's time"), (0.1, 19.0, None)],
)
def test_a_call_on_a_busy_machine_says_so(plain_run, monkeypatch, load, processor_seconds, busy):
    monkeypatch.setattr(sequences, "MOST_LOAD", 1.25)
    monkeypatch.setattr(sequences, "LEAST_SHARE", 0.7)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 9.0, 9.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert sequences.busy_machine(10.0, processor_seconds) == busy
    run = plain_run("llama", (9,), max_new_tokens=3)  # too short for a share of the processor's time
    stats = run.again(run.draft("plain"), return_dict_in_generate=True).speculation
    assert stats.busy == (busy if load > 2.5 else None)
    assert str(stats).endswith(f", on a busy machine ({busy})" if load > 2.5 else " s of prefill")


@pytest.mark.parametrize("kind", ["tree", "specattn"])
def test_counts_agree_with_the_text(plain_run, kind):
    """Three rows, of which one ends at its first token and another early."""
    lengths = (33, 3, 13)
    free = plain_run("llama", lengths, max_new_tokens=14)
    ends = [free.generated[0][0], free.generated[1][5]]
    run = plain_run("llama", lengths, max_new_tokens=14, eos_token_id=ends)
    draft = run.draft(kind)
    stats = run.again(draft, return_dict_in_generate=True).speculation
    assert draft.last_speculation is stats and stats.method == draft.config.model_type.removeprefix("longspec_")
    texts = [row[: next((i for i, t in enumerate(row) if t in ends), len(row) - 1) + 1] for row in run.generated]
    assert len(texts[0]) == 1 < len(texts[1])
    # the first token of a row comes from its prompt
    assert [1 + sum(row) for row in stats.emitted_per_step] == [len(text) for text in texts]
    emitted = [count for row in stats.emitted_per_step for count in row]
    drafted = [count for row in stats.drafted_per_step for count in row]
    assert len(emitted) == len(drafted) == stats.num_spec_steps <= len(lengths) * stats.num_forwards
    assert (sum(emitted), sum(drafted)) == (stats.num_emitted_tokens, stats.num_draft_tokens)
    assert stats.acceptance_histogram == [emitted.count(n + 1) for n in range(max(emitted))]
    assert max(emitted) > 1
    assert stats.num_emitted_tokens == stats.num_accepted_draft_tokens + stats.num_spec_steps
    assert stats.mean_acceptance_length == stats.num_emitted_tokens / stats.num_spec_steps
    proposed = {"tree": 6, "specattn": 3}[kind]
    assert stats.num_accepted_draft_tokens <= stats.num_draft_tokens <= proposed * stats.num_spec_steps
    assert 0 < stats.draft_seconds + stats.verify_seconds <= stats.decode_seconds
    assert stats.prefill_seconds > 0
    if kind == "tree":  # what the drafter was told, without the seeding chain and the last step
        assert stats.num_forwards == len(draft.verifications)


def test_one_token_needs_no_verification_and_statistics_are_those_of_the_last_call(plain_run):
    run = plain_run("llama", (21,), max_new_tokens=9)
    draft = run.draft("tree")
    assert draft.last_speculation is None
    assert isinstance(run.again(draft), torch.Tensor)
    first = draft.last_speculation
    stats = run.again(draft, max_new_tokens=1, return_dict_in_generate=True).speculation
    assert draft.last_speculation is stats is not first and first.num_emitted_tokens == 8
    assert stats.num_spec_steps == stats.num_forwards == 0 and stats.acceptance_histogram == []
    assert stats.mean_acceptance_length == 0.0
