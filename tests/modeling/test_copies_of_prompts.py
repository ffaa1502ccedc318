"""Rows with the same prompt are read as one, as in rollouts; texts and drafted tokens stay the same."""

from itertools import cycle

import pytest
import torch

from hf_longspec.generation.special_cases.copies import Copies
from tests.modeling.calls import GREEDY
from tests.modeling.test_contract import DRAFTS, FEW_TOKENS, REFUSED, check_drafted, draft_of
from tests.robustness.enumeration import build
from tests.tiny_targets import tiny_prompts

ROWS = [0, 1, 0, 0, 2, 1]  # of three prompts
LENGTHS = (33, 3, 13)
NAMES = ("llama", "mistral", "gpt_oss", "deepseek_v3", "gemma3")


def continued(model, draft, **options):
    """The text after copies of prompts, and how many rows the first forward of each size had."""
    input_ids, mask = (part[ROWS] for part in tiny_prompts(model.config.vocab_size, LENGTHS))
    rows = {}

    def see(module, args, kwargs):
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if torch.is_tensor(tokens):
            rows.setdefault(tokens.shape[1], len(tokens))

    hook = model.register_forward_pre_hook(see, with_kwargs=True)
    try:
        torch.manual_seed(5)
        text = model.generate(input_ids, attention_mask=mask, assistant_model=draft, **GREEDY | options)
    finally:
        hook.remove()
    return text, rows


def unhooked(draft):
    """A draft that takes no notice of the hook that counts."""
    draft.generation_config.check_target = False
    return draft


CASES = [case for case in zip(DRAFTS, cycle(NAMES)) if case not in REFUSED]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_copies_are_read_once(target, monkeypatch, kind, name):
    model = target(name, **FEW_TOKENS)
    expected, _ = continued(model, None)
    draft = unhooked(draft_of(kind, model))
    text, rows = continued(model, draft)
    assert torch.equal(text, expected)
    check_drafted(draft, model)
    assert rows[max(rows)] == 3
    # the draft knows of every row what it knows of a prompt that is read by itself
    monkeypatch.setattr(Copies, "change", lambda self, call: None)
    alone = unhooked(draft_of(kind, model))
    text, rows = continued(model, alone)
    assert torch.equal(text, expected) and rows[max(rows)] == len(ROWS)
    assert draft.last_speculation.emitted_per_step == alone.last_speculation.emitted_per_step


@pytest.mark.parametrize("kind", ["longspec", "longspec_ngram"])
def test_sampled_copies_differ(target, kind):
    """Each row has noise of its own."""
    model = target("llama", **FEW_TOKENS)
    expected, _ = continued(model, unhooked(draft_of("longspec_plain", model)), do_sample=True)
    draft = unhooked(draft_of(kind, model))
    text, rows = continued(model, draft, do_sample=True)
    assert torch.equal(text, expected) and rows[max(rows)] == 3
    assert not torch.equal(text[0], text[2])


@pytest.mark.parametrize("name", ["falcon_h1", "llama4_text"])
def test_targets_that_depend_on_forwards_read_all(name):
    model = build(name)
    expected, _ = continued(model, None)
    draft = unhooked(draft_of("longspec_ngram", model))
    text, rows = continued(model, draft)
    assert torch.equal(text, expected) and rows[max(rows)] == len(ROWS)
