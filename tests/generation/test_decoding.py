"""The whole loop against plain `generate` of the bare model, which shares no code with it: greedy, float32."""

import pytest
import torch

from tests.rounding import rounding

pytestmark = pytest.mark.usefixtures("every_step_speculates")

# Windows of 16 tokens are full from the first step in some rows and fill up in others; the prompt of 3 tokens is
# shorter than every seed chain.
ONE, RAGGED = (21,), (33, 3, 13)
KINDS = ("tree", "chain", "specattn")


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
