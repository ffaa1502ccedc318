"""Targets with recurrent states in captured steps, on a simulated CUDA device: the text of `generate`, and launches."""

import copy
from contextlib import contextmanager

import pytest
from transformers import CONFIG_MAPPING, DynamicCache

from hf_longspec import AssistantDraftModel, MtpDraftModel, PlainDraftModel
from hf_longspec.generation.target import TargetView
from tests.generation.drafted_calls import after_an_error, drafted, generated
from tests.generation.test_recurrent_states import OTHERS, SEEDS, TYPES
from tests.house import hybrid_target
from tests.pairwise import few, pairwise, soaked
from tests.robustness.drafts import make_draft
from tests.robustness.enumeration import build, with_capturable_experts
from tests.tiny_targets import tiny_prompts

pytest.importorskip("triton", reason="captured steps need Triton's kernels")

from tests.generation.test_on_simulated_cuda import FIRST, MOST_LAUNCHES, simulated, watch

NEW = 9
ONE, RAGGED = (21,), (14, 3, 9)
WAYS = (True, False), (ONE, RAGGED)
# One case of each type; all others are soaked.
CASES = [(name, place % 2 == 0, WAYS[1][place // 2 % 2]) for place, name in enumerate(TYPES)]
OTHER_CASES = [case for case in pairwise(TYPES, *WAYS) if case not in CASES]
OTHER_CASES += pairwise([name for name in OTHERS if name in CONFIG_MAPPING and name != "qwen3_5_moe"], *WAYS)


@pytest.fixture(scope="module")
def made():
    models = {}

    def make(name):
        if name not in models:
            models[name] = with_capturable_experts(build(name, SEEDS.get(name, 0)))
        return models[name]

    return make


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


@pytest.mark.parametrize(("name", "chain", "lengths"), [*few(CASES, 2), *soaked(OTHER_CASES)], ids=str)
def test_text_of_rows_that_accept_different_numbers(made, name, chain, lengths):
    model = made(name)
    text = generated(model, **inputs_of(lengths))
    draft = drafted(model, chain, text, max(lengths))
    stats = check(model, draft, lengths)
    assert 1 < stats.num_emitted_tokens / stats.num_spec_steps < draft.num_nodes


def test_iterations(made, monkeypatch):
    model = made("qwen3_5_text")
    check_iterations(model, make_draft("tokenswift", model), RAGGED, monkeypatch)


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
