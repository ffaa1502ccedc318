"""Tau on held-out rows: which rows, and what is said about a draft that pays and one that does not."""

import torch
from datasets import Dataset

from hf_longspec import LongSpecDraftModel, TokenSwiftDraftModel
from hf_longspec.cli import held_out
from hf_longspec.cli.held_out import HeldOut, measure, split
from hf_longspec.modeling.tokenswift.generation_tokenswift import TokenSwiftDrafter
from hf_longspec.training import DraftTrainingArguments, TokenWindows
from hf_longspec.training.data import DocumentEncoder
from tests.tiny_targets import tiny_target
from tests.watching import before


def test_the_last_rows_are_held_out():
    """One of a hundred, two at least and 32 at most; of few rows none, and of a stream the first two."""
    for count, held in ((20, 2), (399, 3), (5000, 32)):
        windows, dataset = (
            TokenWindows(torch.arange(2 * count), 2),
            Dataset.from_dict({"input_ids": [[n] for n in range(count)]}),
        )
        rows, kept = split(windows)
        assert len(rows) == count - held and len(kept) == held
        assert kept[0]["input_ids"].tolist() == [2 * (count - held), 2 * (count - held) + 1]
        rows, kept = split(dataset)
        assert [row["input_ids"][0] for row in kept] == list(range(count - held, count)) and len(rows) == count - held
    assert split(TokenWindows(torch.arange(38), 2))[1] is None
    rows, kept = split(dataset.to_iterable_dataset())
    assert [row["input_ids"] for row in kept] == [[0], [1]] and next(iter(rows)) == {"input_ids": [2]}


def test_tau_is_that_of_decoding_the_rows(tmp_path, monkeypatch):
    """A draft whose tokens are never accepted has tau 1, although its gate would stop it."""
    monkeypatch.setattr(held_out, "MOST_PROMPTS", 3)
    target = tiny_target("llama", vocab_size=260)
    target.generation_config.eos_token_id = None
    draft = LongSpecDraftModel.from_target(target, window=16, draft_vocab_size=1, tree_widths=[1, 1])
    unused = set(range(260))
    rows = [
        {"input_ids": torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(seed))} for seed in (0, 1)
    ]
    for row in rows:
        prompt = row["input_ids"][None, :20]
        unused -= set(target.generate(prompt, max_new_tokens=held_out.NEW_TOKENS, do_sample=False)[0].tolist())
    draft.set_vocabulary([min(unused)])
    encoder = DocumentEncoder(DraftTrainingArguments(str(tmp_path)))
    measured = measure(draft, target, [*rows, {"input_ids": torch.arange(3, 10)}], encoder)
    assert (measured.tau, measured.texts) == (1.0, 2) and measured.pays_from > 0
    assert draft.last_speculation.num_plain_steps == 0
    assert measure(draft, target, [{"input_ids": torch.arange(3, 10)}], encoder) is None


def test_heads_are_measured_as_a_chain_on_a_cpu(tmp_path, monkeypatch):
    """As their tree of 40 nodes takes several steps there."""
    target, widths = tiny_target("llama", vocab_size=260), []
    heads = TokenSwiftDraftModel.from_target(target)
    branching = heads.generation_config.tree_branching
    before(monkeypatch, TokenSwiftDrafter, "propose", lambda drafter, root: widths.append(list(drafter.largest)))
    measure(heads, target, [{"input_ids": torch.arange(3, 40)}], DocumentEncoder(DraftTrainingArguments(str(tmp_path))))
    assert widths and set(map(tuple, widths)) == {(1, 1, 1)}
    assert heads.generation_config.tree_branching == branching == [1, 3, 3, 3]


def test_only_a_draft_that_does_not_pay_has_a_warning():
    assert "below 1.35, this draft makes decoding slower" in HeldOut(1.04, 1.35, 8).warning
    assert HeldOut(1.36, 1.35, 8).warning is None
    assert str(HeldOut(1.04, 1.35, 8)).startswith("tau 1.04: 1.04 tokens per step in 8 greedy")
