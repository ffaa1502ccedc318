"""Any call of `generate` gives the text that it gives without a draft and changes nothing else, or raises ValueError.

Greedy texts are compared with the bare model's, token by token, in float32; sampled ones with those of the loop without
drafting (`PlainDraftModel`) for the same seed, whose distribution tests/generation/test_sampling.py checks.
tests/robustness/cases.py draws the targets, the drafts and the options.
"""

import copy

import pytest
import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st

from hf_longspec import PlainDraftModel, SpeculativeCache
from tests.robustness.cases import END, Case, cases, drafts
from tests.robustness.comparison import WANTED, check_scores, tied


def plain(case: Case):
    """The call without a draft: of the bare model, or when sampling of the loop that drafts nothing."""
    model = case.model(ours=False)
    draft = PlainDraftModel.from_target(model) if case.do_sample else None
    torch.manual_seed(5)
    return model.generate(**case.arguments(), **WANTED, assistant_model=draft)


def with_draft(case: Case, draft, **more):
    """The output of a call. Model, draft, prompts and the global random state of greedy calls are as before."""
    model, arguments = case.model(), case.arguments() | WANTED | more
    before = copy.deepcopy((arguments["input_ids"], arguments["attention_mask"], draft.state_dict()))
    settings, own = copy.deepcopy(draft.generation_config.to_dict()), model.generation_config.to_dict()
    implementation = model.config._attn_implementation
    torch.manual_seed(5)
    random_state = torch.get_rng_state()
    out = model.generate(**arguments, assistant_model=draft)
    after = arguments["input_ids"], arguments["attention_mask"], draft.state_dict()
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert all(torch.equal(after[2][name], value) for name, value in before[2].items())
    assert draft.generation_config.to_dict() == settings and model.generation_config.to_dict() == own
    assert model.config._attn_implementation == implementation
    assert case.do_sample or torch.equal(torch.get_rng_state(), random_state)
    return out


def check_text(case: Case, expected, out) -> None:
    if expected.sequences.tolist() != out.sequences.tolist():
        assume(not (not case.do_sample and tied(expected, out.sequences, max(case.lengths))))
    assert out.sequences.tolist() == expected.sequences.tolist()


@given(case=cases())
def test_text_and_scores(case: Case):
    event(f"{case.kind}, {'sampled' if case.do_sample else 'greedy'}")
    if case.refusal is not None:
        event("refused")
        with pytest.raises(ValueError, match=case.refusal):
            with_draft(case, case.draft([[] for _ in case.lengths]))
        return
    expected = plain(case)
    hints = expected.sequences[:, max(case.lengths) :].tolist()
    draft = case.draft(hints)
    out = with_draft(case, draft)
    if not case.text_is_fixed:
        assert with_draft(case, draft).sequences.tolist() == out.sequences.tolist()
        return
    check_text(case, expected, out)
    check_scores(expected, out, max(case.lengths))
    stats = out.speculation
    event("something was accepted" if stats.num_accepted_draft_tokens else "nothing was accepted")
    assert stats.num_emitted_tokens == stats.num_spec_steps + stats.num_accepted_draft_tokens


@given(case=cases(), other=drafts(), extra=st.integers(0, 9), more=st.integers(1, 9))
def test_a_second_turn(case: Case, other, extra: int, more: int):
    """A longer text on the cache of the first turn, with another draft."""
    assume(case.refusal is None and case.text_is_fixed)
    case = Case(**(vars(case) | {"lengths": case.lengths[:1]}))  # without padding
    kind, settings = other
    second = Case(**(vars(case) | {"kind": kind, "settings": settings}))
    assume(second.refusal is None and second.text_is_fixed)
    cache = SpeculativeCache(case.model().config, 1, 80, tree_slots=512)
    first = plain(case)
    out = with_draft(case, case.draft(first.sequences[:, case.lengths[0] :].tolist()), past_key_values=cache)
    check_text(case, first, out)
    held = cache.get_seq_length()
    assert held == out.sequences.shape[1] - 1
    added = torch.randint(3, case.vocab, (1, extra), generator=torch.Generator().manual_seed(extra))
    text = torch.cat([out.sequences, added], 1)
    # a mask of ones: transformers takes the padding id for padding, also where it was emitted
    turn = {
        "input_ids": text,
        "attention_mask": torch.ones_like(text),
        "max_new_tokens": more,
        "eos_token_id": END,
        "pad_token_id": 0,
    }
    turn |= {"do_sample": False} | WANTED
    expected = case.model(ours=False).generate(**turn)
    draft = second.draft(expected.sequences[:, text.shape[1] :].tolist())
    again = second.model().generate(**turn, past_key_values=cache, assistant_model=draft)
    if again.sequences.tolist() != expected.sequences.tolist():
        assume(not tied(expected, again.sequences, text.shape[1]))
    assert again.sequences.tolist() == expected.sequences.tolist()
    assert cache.get_seq_length() == again.sequences.shape[1] - 1
