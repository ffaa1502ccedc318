"""The EAGLE-3 model against the outputs of the projects that publish such drafts, and a loop over single places."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_longspec import Eagle3DraftModel
from tests.rounding import rounding, share
from tests.tiny_targets import randomize, tiny_target

FIXTURES = Path(__file__).with_name("fixtures")
SPECULATORS = sorted(path.name for path in FIXTURES.iterdir() if not path.name.startswith("original"))
# three chained steps of one layer
TOLERANCE = share(layers=3)
BROKEN = 1e-2


def expected_of(name):
    return load_file(FIXTURES / name / "expected.safetensors")


@torch.no_grad()
def logits_of(draft, expected, **options):
    aux, tokens = expected["taps"][None], expected["tokens_after"][None]
    return [level[0] for level in draft(aux_hidden_states=aux, tokens=tokens, steps=3, **options)]


def error_of(draft, expected, **options):
    """Largest error of a logit, as a share of the largest logit of its step."""
    levels = [(level, expected[f"level_{step}"]) for step, level in enumerate(logits_of(draft, expected, **options))]
    return max(float((level - wanted).abs().max() / wanted.abs().max()) for level, wanted in levels)


@pytest.mark.parametrize("name", SPECULATORS)
def test_logits_of_three_chained_steps(name):
    expected, draft = expected_of(name), Eagle3DraftModel.from_pretrained(FIXTURES / name)
    shapes = [tuple(level.shape) for level in logits_of(draft, expected)]
    assert shapes == [tuple(expected[f"level_{step}"].shape) for step in range(3)]
    assert error_of(draft, expected) < TOLERANCE


def test_logits_of_p_eagle():
    """Of the entry and the masks after it, at three places of a text."""
    folder = FIXTURES.with_name("peagle_llama")
    expected, draft = load_file(folder / "expected.safetensors"), Eagle3DraftModel.from_pretrained(folder)
    with torch.no_grad():
        steps = draft(expected["taps"][None], expected["tokens_after"][None], 4)
    for block, length in enumerate(expected["context_lengths"].tolist()):
        found, wanted = torch.stack([level[0, length - 1] for level in steps]), expected[f"block_{block}_logits"]
        assert float((found - wanted).abs().max() / wanted.abs().max()) < TOLERANCE


def test_settings_override_the_checkpoint():
    expected = expected_of("llama_eagle31")
    draft = Eagle3DraftModel.from_pretrained(FIXTURES / "llama_eagle31", norm_output=False)
    assert error_of(draft, expected) > BROKEN
    draft.generation_config.norm_output = None
    assert error_of(draft, expected) < TOLERANCE
    draft.generation_config.rope_theta = 1e4
    assert error_of(draft, expected) > BROKEN
    draft.generation_config.rope_theta = 5000
    assert error_of(draft, expected) < TOLERANCE


def test_embedding_and_head_of_the_target():
    """A draft without its own gives the logits of one that holds copies."""
    model = tiny_target("gemma3", vocab_size=31)  # its embedding module has a factor, which the draft must not see
    draft = Eagle3DraftModel.from_target(model, draft_vocab_size=9)
    draft.d2t.copy_(torch.tensor([0, 1, 1, 4, 4, 5, 7, 8, 11]))
    randomize(draft)
    own = Eagle3DraftModel.from_target(model, draft_vocab_size=9, own_embedding=True, own_head=True)
    own.load_state_dict(draft.state_dict(), strict=False)
    own.copy_from(model)
    aux, tokens = torch.randn(2, 7, 3 * 64, generator=torch.Generator().manual_seed(0)), torch.randint(31, (2, 7))
    with torch.no_grad():
        shared, copied = draft(aux, tokens, 2, target=model), own(aux, tokens, 2)
    assert shared[0].shape == (2, 7, 9)
    for left, right in zip(shared, copied, strict=True):
        torch.testing.assert_close(left, right, **rounding(right, layers=2))
    with pytest.raises(ValueError, match="no embedding of its own and uses the target's: pass target="):
        draft(aux, tokens)
