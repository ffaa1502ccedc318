"""The whole loop against plain `generate` of the bare model, which shares no code with it: greedy, float32."""

import pytest
import torch

from tests.generation.tiny_models import ATTENTION
from tests.rounding import rounding

pytestmark = pytest.mark.usefixtures("every_step_speculates")

# Windows of 16 tokens are full from the first step in some rows and fill up in others; the prompt of 3 tokens is
# shorter than every seed chain.
ONE, RAGGED = (21,), (33, 3, 13)
KINDS = ("tree", "chain", "specattn")

# An end token that no greedy text of these targets holds: what is compared shall be long.
NEVER = 1


@pytest.mark.parametrize("name", ATTENTION)
def test_every_kind_of_attention(plain_run, name):
    """Random trees over ragged rows, and chains in one."""
    options = {"max_new_tokens": 20, "eos_token_id": NEVER}
    histograms = []
    for lengths, kind, settings in ((RAGGED, "tree", {"num_nodes": 9, "luck": 0.5}), (ONE, "chain", {"luck": 0.6})):
        run = plain_run(name, lengths, **options)
        draft = run.draft(kind, **settings)
        assert run.again(draft).tolist() == run.sequences.tolist()
        histograms.append(draft.last_speculation.acceptance_histogram)
        if kind == "tree":
            firsts = {path[1] for v in draft.verifications for path in v.path.tolist() if len(path) > 1}
            assert firsts - {0, 1}  # a path led past a sibling that was refused
    # nothing was accepted in some steps, several tokens at once in others
    assert all(histogram[0] > 0 and sum(histogram[2:]) > 0 for histogram in histograms)


@pytest.mark.parametrize(("lengths", "new"), [(ONE, 1), (ONE, 4), (RAGGED, 5)], ids=str)
def test_the_length_limit_is_exact(plain_run, lengths, new):
    run = plain_run("llama", lengths, max_new_tokens=new)
    hints = plain_run("llama", lengths, max_new_tokens=20).generated  # the draft knows what would come after the end
    for kind in KINDS:
        draft = run.draft(kind, **({"sparse_ratio": 1.0} if kind == "specattn" else {"luck": 1.0, "hints": hints}))
        for limit in ({}, {"max_new_tokens": None, "max_length": max(lengths) + new}):
            out = run.again(draft, **limit)
            assert out.shape[1] == run.prompt_length + new
            assert out.tolist() == run.sequences.tolist()


def test_max_time_stops_after_the_first_token(plain_run):
    run = plain_run("llama", RAGGED, max_new_tokens=9, max_time=1e-9)
    out = run.again(run.draft("tree"))
    assert out.shape[1] == run.prompt_length + 1
    assert out.tolist() == run.sequences.tolist()


@pytest.mark.parametrize(
    ("name", "kind", "lengths"), [("llama", "tree", ONE), ("gemma3", "chain", RAGGED), ("llama", "specattn", RAGGED)]
)
def test_scores_and_logits_are_those_of_plain_generate(plain_run, name, kind, lengths):
    free = plain_run(name, lengths, max_new_tokens=10)
    end = free.generated[0][5]
    options = {"max_new_tokens": 10, "eos_token_id": end, "repetition_penalty": 1.2, "return_dict_in_generate": True}
    run = plain_run(name, lengths, **options, output_scores=True, output_logits=True)
    plain, run.sequences = run.sequences, run.sequences.sequences
    out = run.again(run.draft(kind))
    assert out.sequences.tolist() == run.sequences.tolist()
    assert len(out.scores) == len(out.logits) == len(plain.scores)
    growing = torch.ones(len(lengths), dtype=torch.bool)
    for position in range(len(plain.scores)):
        for ours, theirs in ((out.scores, plain.scores), (out.logits, plain.logits)):
            assert ours[position].dtype == torch.float32
            expected = theirs[position][growing]
            allowed = rounding(expected, run.model.config.num_hidden_layers)
            torch.testing.assert_close(ours[position][growing], expected, **allowed)
        growing &= run.sequences[:, run.prompt_length + position] != end
    assert out.speculation is not None and out.past_key_values is not None
    assert out.attentions is None and out.hidden_states is None


@pytest.mark.parametrize(("name", "kind", "chunk"), [("gemma3", "tree", 7), ("deepseek_v3", "specattn", 1)])
def test_chunked_prefill(plain_run, widths, name, kind, chunk):
    run = plain_run(name, (43, 3, 20), max_new_tokens=4)
    found, draft = widths(run.model), run.draft(kind)
    assert run.again(draft, prefill_chunk_size=chunk).tolist() == run.sequences.tolist()
    assert max(found) <= max(chunk, draft.max_nodes(None), 5)
    run.again(draft)
    assert max(found) > 30


@pytest.mark.parametrize(("name", "kind"), [("gpt_oss", "tree"), ("deepseek_v3", "specattn")])
def test_bfloat16_runs_and_stays_finite(plain_run, target, name, kind):
    run = plain_run(target(name, dtype=torch.bfloat16), RAGGED, max_new_tokens=10, min_new_tokens=10)
    out = run.again(
        run.draft(kind), return_dict_in_generate=True, output_scores=True, output_logits=True, do_sample=True
    )
    assert out.sequences.shape == run.sequences.shape
    assert all(torch.isfinite(logits).all() for logits in out.logits)
    assert not any(torch.isnan(scores).any() for scores in out.scores)
    assert out.past_key_values.layers[0].keys.dtype == torch.bfloat16
    assert out.speculation.num_spec_steps > 0
