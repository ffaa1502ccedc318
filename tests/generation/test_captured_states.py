"""Captured steps of targets with recurrent states, and of those verified by a mask, on a simulated CUDA device."""

import copy
from contextlib import contextmanager
from functools import cache

import pytest
from transformers import CONFIG_MAPPING, DynamicCache

from hf_longspec import AssistantDraftModel, MtpDraftModel, PlainDraftModel
from hf_longspec.generation.special_cases import masked
from hf_longspec.generation.target import TargetView
from tests.generation.drafted_calls import after_an_error, drafted, generated
from tests.generation.test_masked import TYPES as ALL_MASKED
from tests.generation.test_recurrent_states import OTHERS, SEEDS, TYPES
from tests.house import hybrid_target
from tests.pairwise import pairwise, soaked
from tests.robustness.drafts import make_draft
from tests.robustness.enumeration import build, with_capturable_experts
from tests.tiny_targets import tiny_prompts

pytest.importorskip("triton", reason="captured steps need Triton's kernels")

from tests.generation.test_on_simulated_cuda import FIRST, MOST_LAUNCHES, simulated, watch

NEW = 9
ONE, RAGGED = (21,), (14, 3, 9)
WAYS = (True, False), (ONE, RAGGED)
# Falcon copies an index from the host in every layer.
MASKED_TYPES = tuple(name for name in ALL_MASKED if name != "falcon")
# Two types with states, and one case for each kind of mask; all others are soaked.
CASES = [(TYPES[0], True, ONE), (TYPES[-1], False, ONE), ("deepseek_v32", True, RAGGED)]
CASES += [("gpt_neox_japanese", False, RAGGED)]
ALL_TYPES = (*TYPES, *(name for name in OTHERS if name in CONFIG_MAPPING and name != "qwen3_5_moe"), *MASKED_TYPES)
OTHER_CASES = [case for case in pairwise(ALL_TYPES, *WAYS) if case not in CASES]


@pytest.fixture(scope="module")
def made():
    return cache(lambda name, **settings: with_capturable_experts(build(name, SEEDS.get(name, 0), **settings)))


@pytest.fixture(autouse=True)
def masks_of_any_size(monkeypatch):
    """The weights of tiny models have few bytes."""
    monkeypatch.setattr(masked, "MOST_OF_MASK", 1.0)


def inputs_of(lengths, vocab_size=127, **options):
    input_ids, mask = tiny_prompts(vocab_size, lengths)
    fixed = {"max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    return {"input_ids": input_ids, "attention_mask": mask} | fixed | options


@contextmanager
def on_device(model, *drafts):
    """The device, and a copy of the model on it; the drafts are placed."""
    placed = copy.deepcopy(model)
    with simulated() as cuda:
        cuda.place(placed)
        for draft in drafts:
            draft.generation_config.compile = "graph"
            cuda.place(draft)
        yield cuda, placed


def check(model, draft, lengths, text=None, **options):
    """The text of `generate` in calls that replay graphs, all of which the first one has captured."""
    inputs = inputs_of(lengths, **options)
    text = generated(model, **inputs) if text is None else text
    draft.generation_config.gate, draft.generation_config.on_unsupported = False, "error"
    with on_device(model, draft) as (cuda, placed):
        view = TargetView(model)
        assert view.windows  # a trial, whose result holds for the copy: other tests here run it on the device
        vars(TargetView(placed).known).update(vars(view.known))
        placed_inputs = {name: cuda.place(value) for name, value in inputs.items()}
        for call in range(2):
            captured = len(cuda.graphs)
            vars(draft).get("verifications", []).clear()  # graphs depend on the attributes of a draft
            found = generated(placed, **placed_inputs, assistant_model=draft)
            assert cuda.fetch(found).tolist() == text.tolist()
            assert cuda.replays and (not call or len(cuda.graphs) == captured)
    return draft.last_speculation


def check_iterations(model, draft, lengths, monkeypatch):
    """Steady ones read once and never write; outside of graphs they have as many launches as those of other targets."""
    with on_device(model, draft) as (cuda, placed):
        iterations = watch(cuda, monkeypatch)
        inputs = {name: cuda.place(value) for name, value in inputs_of(lengths).items()}
        generated(placed, **inputs, assistant_model=draft)
        steady = iterations[FIRST:]
        assert len(steady) > 1 and {(one.reads, one.writes) for one in steady} == {(1, 0)}
        assert max(one.launches for one in steady) <= MOST_LAUNCHES


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


@pytest.mark.parametrize(("name", "chain", "lengths"), [*CASES, *soaked(OTHER_CASES)], ids=str)
def test_text_of_rows_that_accept_different_numbers(made, name, chain, lengths):
    assert (TargetView(made(name)).mode is masked.MASKED) == (name in MASKED_TYPES)
    check_text(made(name), chain, lengths)


@pytest.mark.parametrize(
    ("name", "more", "lengths"),
    [
        pytest.param("deepseek_v32", {"index_topk": 18}, RAGGED, marks=pytest.mark.soak),
        ("llama4_text", {"floor_scale": 16}, ONE),
    ],
    ids=str,
)
def test_choices_in_the_middle_of_a_text_and_positions_that_layers_count(made, name, more, lengths):
    model = made(name, **more)
    model.set_attn_implementation("eager")
    check_text(model, False, lengths)


@pytest.mark.parametrize("name", ["qwen3_5_text", "gpt_neox_japanese"])
def test_iterations(made, name, monkeypatch):
    check_iterations(made(name), make_draft("tokenswift", made(name)), RAGGED, monkeypatch)


def test_a_mask_that_is_a_large_part_of_a_step_is_not_captured(made, monkeypatch, caplog):
    monkeypatch.setattr(masked, "MOST_OF_MASK", 0.001)
    model, inputs = made("gpt_neox_japanese"), inputs_of(ONE)
    text = generated(model, **inputs)
    draft = drafted(model, False, text, max(ONE))
    with on_device(model, draft) as (cuda, placed):
        placed_inputs = {name: cuda.place(value) for name, value in inputs.items()}
        found = generated(placed, **placed_inputs, assistant_model=draft)
        assert cuda.fetch(found).tolist() == text.tolist() and not cuda.replays
    slots = max(ONE) + NEW + draft.num_nodes
    reason = f"its mask of {draft.num_nodes} nodes and {slots} slots takes over 0% of the bytes of the step"
    assert caplog.text.count("could not be captured") == 1 and reason in caplog.text


def test_the_target_drafts_for_itself_on_copies_of_its_states(made):
    """With all entries everything is accepted."""
    draft = make_draft("specattn", made("qwen3_5_text"), sparse_ratio=1.0)
    stats = check(made("qwen3_5_text"), draft, RAGGED)
    assert stats.num_spec_steps == len(RAGGED) * -(-(NEW - 1) // 4)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3_5_text", {"num_assistant_tokens": 3}),
        pytest.param("granitemoehybrid", {"tree_widths": [3, 2]}, marks=pytest.mark.soak),
        pytest.param("falcon_h1", {"num_assistant_tokens": 2, "ngram_candidates": 2}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_hybrid_draft_model(made, name, settings):
    """The target's own weights in the draft: everything is accepted, so its states are the right ones."""
    model = made(name)
    stats = check(model, AssistantDraftModel.from_model(copy.deepcopy(model), model, **settings), RAGGED)
    if "num_assistant_tokens" in settings:
        assert stats.num_spec_steps <= len(RAGGED) * -(-(NEW - 1) // (1 + settings["num_assistant_tokens"]))


def test_mtp_layers_of_a_hybrid_target():
    model = hybrid_target()
    check(model, MtpDraftModel.from_target(model), RAGGED, vocab_size=model.config.get_text_config().vocab_size)


@pytest.mark.parametrize("error", [KeyboardInterrupt, pytest.param(RuntimeError, marks=pytest.mark.soak)])
def test_a_call_that_ends_in_the_middle_leaves_a_cache_that_continues(made, error):
    model, inputs = made("qwen3_5_text"), inputs_of(ONE)
    whole = generated(model, **inputs)
    draft = drafted(model, False, whole, 21)
    with on_device(model, draft) as (cuda, placed):
        inputs, cache = {name: cuda.place(value) for name, value in inputs.items()}, DynamicCache(config=model.config)
        found = after_an_error(placed, draft, inputs, whole, cache, error)
        assert cuda.replays and cuda.fetch(found).tolist() == whole.tolist()


def test_compiled_steps_are_refused_by_name(made):
    model = made("qwen3_5_text")
    draft = PlainDraftModel.from_target(model, compile="compile")
    with pytest.raises(ValueError, match="compile='compile' is not supported with recurrent states"):
        generated(model, **inputs_of(ONE), assistant_model=draft)
