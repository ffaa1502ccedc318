"""Targets verified by a mask in captured steps, on a simulated CUDA device: the text of `generate`, and launches."""

import pytest

from hf_longspec.generation.special_cases import masked
from hf_longspec.generation.target import TargetView
from tests.generation.drafted_calls import drafted, generated
from tests.generation.test_masked import TYPES as MASKED_TYPES
from tests.pairwise import few, pairwise, soaked
from tests.robustness.drafts import make_draft
from tests.robustness.enumeration import build, with_capturable_experts

pytest.importorskip("triton", reason="captured steps need Triton's kernels")

from tests.generation.test_captured_states import NEW, ONE, RAGGED, check, check_iterations, inputs_of, on_device

# Falcon copies an index from the host in every layer.
TYPES = tuple(name for name in MASKED_TYPES if name != "falcon")
# One case for each kind of mask; all others are soaked.
CASES = [("deepseek_v32", True, RAGGED), ("gpt_neox_japanese", False, RAGGED)]
OTHER_CASES = [case for case in pairwise(TYPES, (True, False), (ONE, RAGGED)) if case not in CASES]


def made(name, implementation=None, **overrides):
    model = with_capturable_experts(build(name, **overrides))
    if implementation is not None:
        model.set_attn_implementation(implementation)
    assert TargetView(model).mode is masked.MASKED
    return model


@pytest.fixture(autouse=True)
def masks_of_any_size(monkeypatch):
    """The weights of tiny models have few bytes."""
    monkeypatch.setattr(masked, "MOST_OF_MASK", 1.0)


def stock_text(model, lengths):
    """That of the device if an indexer chooses, as `topk` takes the first of equal scores there."""
    config = model.config.get_text_config()
    if getattr(config, "index_topk", NEW + max(lengths)) >= NEW + max(lengths):
        return generated(model, **inputs_of(lengths))
    with on_device(model) as (cuda, placed):
        inputs = {name: cuda.place(value) for name, value in inputs_of(lengths).items()}
        return cuda.fetch(generated(placed, **inputs))


def check_text(model, chain, lengths):
    text = stock_text(model, lengths)
    draft = drafted(model, chain, text, max(lengths))
    stats = check(model, draft, lengths, text=text)
    assert 1 < stats.num_emitted_tokens / stats.num_spec_steps < draft.num_nodes


@pytest.mark.parametrize(("name", "chain", "lengths"), [*few(CASES, 2), *soaked(OTHER_CASES)], ids=str)
def test_text_of_rows_that_accept_different_numbers(name, chain, lengths):
    check_text(made(name), chain, lengths)


@pytest.mark.parametrize(
    ("name", "more", "lengths"),
    [
        pytest.param("deepseek_v32", {"index_topk": 18}, RAGGED, marks=pytest.mark.soak),
        ("llama4_text", {"floor_scale": 16}, ONE),
    ],
    ids=str,
)
def test_choices_in_the_middle_of_a_text_and_positions_that_layers_count(name, more, lengths):
    check_text(made(name, "eager", **more), False, lengths)


def test_iterations(monkeypatch):
    model = made("gpt_neox_japanese")
    check_iterations(model, make_draft("tokenswift", model), RAGGED, monkeypatch)


def test_a_mask_that_is_a_large_part_of_a_step_is_not_captured(monkeypatch, caplog):
    monkeypatch.setattr(masked, "MOST_OF_MASK", 0.001)
    model = made("gpt_neox_japanese")
    inputs = inputs_of(ONE)
    text = generated(model, **inputs)
    draft = drafted(model, False, text, max(ONE))
    with on_device(model, draft) as (cuda, placed):
        placed_inputs = {name: cuda.place(value) for name, value in inputs.items()}
        found = generated(placed, **placed_inputs, assistant_model=draft)
        assert cuda.fetch(found).tolist() == text.tolist() and not cuda.replays
    slots = max(ONE) + NEW + draft.num_nodes
    reason = f"its mask of {draft.num_nodes} nodes and {slots} slots takes over 0% of the bytes of the step"
    assert caplog.text.count("could not be captured") == 1 and reason in caplog.text
