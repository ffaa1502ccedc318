"""Targets with recurrent states in captured steps, on a simulated CUDA device: the text of `generate`, and launches."""

import copy
from contextlib import contextmanager

import pytest
import torch
from transformers import CONFIG_MAPPING, DynamicCache

from hf_longspec import AssistantDraftModel, MtpDraftModel, PlainDraftModel
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.generation.special_cases.fixed_states import CommitStates
from hf_longspec.generation.target import TargetView
from tests.generation.drafted_calls import drafted, generated
from tests.generation.test_recurrent_states import OTHERS, SEEDS, TYPES
from tests.house import hybrid_target
from tests.pairwise import few, pairwise, soaked
from tests.robustness.drafts import make_draft
from tests.robustness.enumeration import build, with_capturable_experts
from tests.tiny_targets import tiny_prompts
from tests.user_objects import Bomb

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


def check(model, draft, lengths, calls=2, text=None, **options):
    """The text of `generate` in calls that replay graphs, all of which the first one has captured."""
    inputs = inputs_of(lengths, **options)
    text = generated(model, **inputs) if text is None else text
    draft.generation_config.gate, draft.generation_config.on_unsupported = False, "error"
    with on_device(model, draft) as (cuda, placed):
        view = TargetView(model)
        assert view.windows  # a trial, whose result holds for the copy: other tests here run it on the device
        vars(TargetView(placed).known).update(vars(view.known))
        placed_inputs = {name: cuda.place(value) for name, value in inputs.items()}
        for call in range(calls):
            captured = len(cuda.graphs)
            vars(draft).get("verifications", []).clear()  # graphs depend on the attributes of a draft
            found = generated(placed, **placed_inputs, assistant_model=draft)
            assert cuda.fetch(found).tolist() == text.tolist()
            assert cuda.replays and (not call or len(cuda.graphs) == captured)
    return draft.last_speculation


@pytest.mark.parametrize(
    ("name", "chain", "lengths"),
    [*few(CASES, 2), *soaked(OTHER_CASES)],
    ids=str,
)
def test_text_of_rows_that_accept_different_numbers(made, name, chain, lengths):
    model = made(name)
    text = generated(model, **inputs_of(lengths))
    draft = drafted(model, chain, text, max(lengths))
    stats = check(model, draft, lengths)
    assert 1 < stats.num_emitted_tokens / stats.num_spec_steps < draft.num_nodes


# Most launches in a captured plain step of a mixer of the gated delta rule, and of a commit of all layers.
MOST_OF_MIXER = {("graph", torch.float32): 30, ("fused", torch.float32): 17, ("fused", torch.bfloat16): 19}
MOST_OF_COMMIT = 12


@pytest.mark.parametrize(("steps", "dtype"), few([*MOST_OF_MIXER][::-1], 1), ids=str)
def test_launches(made, steps, dtype, monkeypatch):
    """Of plain steps; outside of graphs they are as many as those of other targets. The text is that of `generate`."""
    model = copy.deepcopy(made("qwen3_5_text")).to(dtype)
    inputs = inputs_of(ONE, max_new_tokens=7)
    text = generated(model, **inputs)
    draft, mixers = PlainDraftModel.from_target(model), []
    with on_device(model, draft) as (cuda, placed):
        draft.generation_config.compile = steps
        kind = next(type(module) for module in placed.modules() if hasattr(module, "conv1d"))
        forward = kind.forward

        def counted(self, *args, **kwargs):
            graph = cuda._memory.capture and cuda._memory.capture.graph
            before = graph and graph.names.total()
            result = forward(self, *args, **kwargs)
            if graph:
                mixers.append(graph.names.total() - before)
            return result

        monkeypatch.setattr(kind, "forward", counted)
        iterations = watch(cuda, monkeypatch)
        inputs = {name: cuda.place(value) for name, value in inputs.items()}
        assert cuda.fetch(generated(placed, **inputs, assistant_model=draft)).tolist() == text.tolist()
        steady = iterations[FIRST:]
        assert {(one.reads, one.writes) for one in steady} == {(1, 0)}
        assert max(one.launches for one in steady) <= MOST_LAUNCHES
    assert len(mixers) > 2 and min(mixers) <= MOST_OF_MIXER[steps, dtype]  # the first one prepares the windows of all


@pytest.mark.parametrize("name", few(["qwen3_5_text", "kimi_linear", "granitemoehybrid"], 1))
def test_launches_of_a_commit_do_not_grow_with_layers(made, name, monkeypatch):
    """A tree in ragged rows, whose path is read on the device."""
    model = made(name)
    draft = drafted(model, False, generated(model, **inputs_of(RAGGED)), max(RAGGED))
    found, run = [], CommitStates.run

    def counted(self, *inputs):
        before = cuda._memory.capture and cuda._memory.capture.graph.names.total()
        result = run(self, *inputs)
        if cuda._memory.capture:
            found.append(cuda._memory.capture.graph.names.total() - before)
        return result

    monkeypatch.setattr(CommitStates, "run", counted)
    with on_device(model, draft) as (cuda, placed):
        inputs = {name: cuda.place(value) for name, value in inputs_of(RAGGED).items()}
        generated(placed, **inputs, assistant_model=draft)
    assert found and max(found) <= MOST_OF_COMMIT


@pytest.mark.parametrize(
    ("name", "kind", "lengths"),
    few(
        [
            ("qwen3_5_text", "specattn", RAGGED),
            ("falcon_h1", "specattn", ONE),
            pytest.param("granitemoehybrid", "specattn", RAGGED, marks=pytest.mark.soak),
            pytest.param("jamba", "specattn", ONE, marks=pytest.mark.soak),
        ],
        1,
    ),
)
def test_the_target_drafts_for_itself_on_copies_of_its_states(made, name, kind, lengths):
    """With all entries everything is accepted."""
    stats = check(made(name), make_draft(kind, made(name), sparse_ratio=1.0), lengths)
    assert stats.num_spec_steps == len(lengths) * -(-(NEW - 1) // 4)


@pytest.mark.parametrize(
    ("name", "settings"),
    few(
        [
            ("qwen3_5_text", {"num_assistant_tokens": 3}),
            ("granitemoehybrid", {"tree_widths": [3, 2]}),
            pytest.param("falcon_h1", {"num_assistant_tokens": 2, "ngram_candidates": 2}, marks=pytest.mark.soak),
            pytest.param("kimi_linear", {"num_assistant_tokens": 3, "pard_token": 5}, marks=pytest.mark.soak),
        ],
        1,
    ),
    ids=str,
)
def test_a_hybrid_draft_model(made, name, settings):
    """The target's own weights in the draft: without masks everything is accepted, so its states are the right ones."""
    model = made(name)
    target = model if "pard_token" in settings else made(name)
    draft = AssistantDraftModel.from_model(copy.deepcopy(target), model, **settings)
    stats = check(model, draft, RAGGED)
    if "num_assistant_tokens" in settings and "pard_token" not in settings:
        assert stats.num_spec_steps <= len(RAGGED) * -(-(NEW - 1) // (1 + settings["num_assistant_tokens"]))


def test_mtp_layers_of_a_hybrid_target():
    model = hybrid_target()
    check(model, MtpDraftModel.from_target(model), RAGGED, vocab_size=model.config.get_text_config().vocab_size)


@pytest.mark.parametrize("error", few([KeyboardInterrupt, RuntimeError], 1))
def test_a_call_that_ends_in_the_middle_leaves_a_cache_that_continues(made, error):
    """Ctrl-C keeps the text so far and its states, and an error the states before the call."""
    model, inputs = made("qwen3_5_text"), inputs_of(ONE)
    whole = generated(model, **inputs)
    draft = drafted(model, False, whole, 21)
    with on_device(model, draft) as (cuda, placed):
        inputs, cache = {name: cuda.place(value) for name, value in inputs.items()}, DynamicCache(config=model.config)
        bomb = Bomb(
            error=error, armed=lambda: bool(draft.last_speculation and draft.last_speculation.num_emitted_tokens > 4)
        )
        with pytest.raises(error):
            generated(
                placed, **inputs, assistant_model=draft, **{CACHE_NAME: cache}, logits_processor=[bomb.processor()]
            )
        text = draft.last_speculation.partial_sequences if error is KeyboardInterrupt else inputs["input_ids"]
        assert cache.get_seq_length() == (text.shape[1] - 1 if error is KeyboardInterrupt else 0)
        draft.hints = whole[:, text.shape[1] :].tolist()
        more = inputs | {"input_ids": text, "attention_mask": torch.ones_like(text)}
        more["max_new_tokens"] = whole.shape[1] - text.shape[1]
        found = generated(placed, **more, assistant_model=draft, **{CACHE_NAME: cache})
        assert cuda.replays and cuda.fetch(found).tolist() == whole.tolist()


def test_compiled_steps_are_refused_by_name(made):
    model = made("qwen3_5_text")
    draft = PlainDraftModel.from_target(model, compile="compile")
    with pytest.raises(ValueError, match="compile='compile' is not supported with recurrent states"):
        generated(model, **inputs_of(ONE), assistant_model=draft)
