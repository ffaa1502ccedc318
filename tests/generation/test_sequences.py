"""Growing rows: stopping exact to the token, streaming every token once. Alone, and through `generate`."""

import pytest
import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, StoppingCriteria, StoppingCriteriaList

from hf_longspec import NgramDraftModel
from hf_longspec.generation.sequences import Sequences
from tests.tiny_targets import PAD_TOKEN_ID, random_longspec_draft, tiny_prompts
from tests.user_objects import Answer, Recorder

pytestmark = pytest.mark.usefixtures("every_step_speculates")

ONE, RAGGED = (21,), (33, 3, 13)
CALLS = pytest.mark.parametrize(("kind", "lengths"), [("tree", RAGGED), ("chain", ONE)])


def sequences(criteria=(), batch_size=2, max_length=9, streamer=None):
    input_ids, _ = tiny_prompts(50, [4] * batch_size)
    return Sequences(input_ids, StoppingCriteriaList(criteria), PAD_TOKEN_ID, max_length, streamer)


class TestAlone:
    def test_a_token_that_cannot_be_drawn_is_an_error_when_the_text_needs_it(self):
        """Not after the end of a row, and not while a criterion may still end the row before."""
        eos, bad = EosTokenCriteria(torch.tensor([7])), -1
        rows = sequences([eos])
        assert rows.append([[11, 7, bad], [12, 13]]) == [2, 2] and rows.done == [True, False]
        with pytest.raises(RuntimeError, match="token 6 of row 1"):
            rows.append([[], [bad]])
        for last in (7, 8):
            rows = sequences([eos, Answer(lambda ids, scores, last=last: ids.shape[1] == last)])
            assert rows.append([[11, 12, 13, bad], [21]]) == [3, 1] and not rows.finished
            if last == 8:  # one column too late
                with pytest.raises(RuntimeError, match="token 7 of row 0"):
                    rows.append([[], [22, 23, 24]])
            else:
                assert rows.append([[], [22, 23, 24]]) == [0, 2] and rows.finished
                assert rows.output()[:, 4:].tolist() == [[11, 12, 13], [21, 22, 23]]

    def test_a_criterion_must_answer_for_every_row(self):
        three = Answer(lambda ids, scores: torch.zeros(3, dtype=torch.bool))
        with pytest.raises(ValueError, match=r"3 values .* 2 rows"):
            sequences([three]).append([[11], [12]])


class Judge(StoppingCriteria):
    """Gives one answer for the batch, by all rows and, if there are any, all scores; remembers what it was shown."""

    def __init__(self, form, stop=None):
        self.form, self.stop, self.shown, self.scores = form, stop, [], []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append(input_ids.tolist())
        self.scores = scores
        return self.form(int(input_ids.sum()) % 4 == 3 and input_ids.shape[1] > self.stop)


FORMS = {"bool": bool, "scalar": torch.tensor, "one": lambda stop: torch.tensor([stop])}
FORMS |= {"rows": lambda stop: torch.tensor([stop] * 3)}


@pytest.mark.parametrize(
    ("kind", "form", "end"),
    [
        ("tree", "bool", "early"),
        ("chain", "scalar", None),
        ("specattn", "one", "early"),
        ("ngram", "rows", "early"),
        ("longspec", "bool", None),
        ("plain", "rows", None),
    ],
)
def test_a_criterion_that_looks_at_all_rows(plain_run, kind, form, end):
    """It is shown the batches of stock `generate`, and all rows end at one column, wherever speculation has been."""
    free = plain_run("llama", RAGGED, max_new_tokens=24)
    eos = free.generated[1][4] if end else None
    judges = [Judge(FORMS[form], max(RAGGED) + 8) for _ in range(2)]
    options = {"max_new_tokens": 24, "eos_token_id": eos}
    run = plain_run("llama", RAGGED, stopping_criteria=[judges[0]], **options)
    assert 9 <= len(run.generated[0]) < 24
    out = run.again(drafted(run, kind, free.generated), stopping_criteria=[judges[1]])
    assert out.tolist() == run.sequences.tolist()
    assert judges[1].shown == judges[0].shown


def drafted(run, kind, hints):
    if kind == "longspec":
        return random_longspec_draft(run.model, window=8, tree_widths=[5, 4])
    if kind == "ngram":
        return NgramDraftModel.from_target(run.model)
    return run.draft(kind, **({"hints": hints, "luck": 0.8} if kind in ("tree", "chain") else {}))


@CALLS
def test_a_criterion_gets_the_scores_of_stock_generate(plain_run, kind, lengths):
    """Those of all tokens so far, if scores are asked for. Rows that have ended have none here."""
    free = plain_run("llama", lengths, max_new_tokens=12)
    judges = [Judge(bool, max(lengths) + 99) for _ in range(2)]
    options = {"max_new_tokens": 12, "output_scores": True, "return_dict_in_generate": True}
    run = plain_run("llama", lengths, stopping_criteria=[judges[0]], eos_token_id=free.generated[0][5], **options)
    run.sequences, free = run.sequences.sequences, free.generated
    draft = run.draft(kind, hints=free, luck=0.8)
    out = run.again(draft, stopping_criteria=[judges[1]], **options)
    assert out.sequences.tolist() == run.sequences.tolist()
    assert judges[1].shown == judges[0].shown
    stock, ours = (torch.stack(judge.scores, 1) for judge in judges)
    assert stock.shape == ours.shape and torch.equal(torch.stack(out.scores, 1), ours)
    for row, text in enumerate(run.generated):
        count = next((place for place, token in enumerate(text) if token == free[0][5]), len(text) - 1) + 1
        torch.testing.assert_close(ours[row, :count], stock[row, :count], rtol=1e-4, atol=1e-4)
        assert not ours[row, count:].any()


@CALLS
def test_a_streamer_gets_what_plain_generate_gives_it(plain_run, kind, lengths):
    """Batch 3 too: transformers' own streamers refuse it, others need not. Rows end at different places."""
    free = plain_run("llama", lengths, max_new_tokens=14)
    plain, ours = Recorder(), Recorder()
    run = plain_run("llama", lengths, max_new_tokens=14, eos_token_id=free.generated[0][6], streamer=plain)
    assert run.again(run.draft(kind), streamer=ours).tolist() == run.sequences.tolist()
    assert ours.puts == plain.puts
    assert ours.ends == plain.ends == 1
