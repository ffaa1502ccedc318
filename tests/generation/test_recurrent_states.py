"""Targets with recurrent and convolution states: the text of `generate`, and the states of single steps."""

import copy
from functools import cache

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, DynamicCache

from hf_longspec import AssistantDraftModel, NgramDraftModel, SpeculativeCache
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.generation.draft_tree import Beam
from hf_longspec.generation.drafter import Binding
from hf_longspec.generation.special_cases.recurrences import RECURRENCES, _functions, recurrences_replaced
from hf_longspec.generation.target import TargetView
from hf_longspec.modeling.assistant.generation_assistant import CATCH_UP, AssistantDrafter
from tests.generation.drafted_calls import (
    MODES,
    NEW,
    ONE,
    RAGGED,
    after_an_error,
    arguments,
    check_a_commit,
    check_a_returned_cache,
    check_text,
    drafted,
    generated,
)
from tests.pairwise import few, pairwise, soaked
from tests.robustness.drafts import make_draft
from tests.robustness.enumeration import build
from tests.watching import after

# Whether the chunks of a prompt leave out what a cache holds in stock; the text is wrong otherwise.
LEAVES_OUT_HELD_TOKENS = Version(transformers.__version__) >= Version("5.23")
# One type for each recurrence: gated delta rule, KDA, Mamba-2, Mamba-2 beside keys, convolution alone, Mamba-1.
TYPES = ("qwen3_5_text", "kimi_linear", "granitemoehybrid", "falcon_h1", "lfm2_moe", "jamba")
OTHERS = (
    "bailing_hybrid", "bamba", "lfm2", "lfm3", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_next",
)  # fmt: skip
SOAKED = soaked(name for name in OTHERS if name in CONFIG_MAPPING)
EVERY = [*TYPES, *SOAKED]
# Of weights, where two best logits are equal up to rounding with seed 0.
SEEDS = {"kimi_linear": 1}
# Limits within which few of the step sizes of Mamba-2 lie.
LIMITED = {
    "bamba": {"time_step_limit": (1.2, 1.4)},
    "falcon_h1": {"time_step_limit": (0.0, 1.0)},
    "granitemoehybrid": {"time_step_limit": (1.4, 1.6)},
    "nemotron_h": {"time_step_min": 1.35},
}
WAYS = (True, False), (ONE, RAGGED), MODES
CASES = pairwise(TYPES, *WAYS)
CASES += [pytest.param(*one.values, *way, marks=one.marks) for one, *way in pairwise(SOAKED, *WAYS)]


@pytest.fixture(scope="module")
def made():
    return cache(lambda name, **settings: build(name, SEEDS.get(name, 0), **settings))


@pytest.mark.parametrize(("name", "chain", "lengths", "mode"), CASES, ids=str)
def test_text_of_rows_that_accept_different_numbers(made, name, chain, lengths, mode):
    check_text(made(name), lengths, chain, **mode)


@pytest.mark.parametrize(
    ("name", "lengths", "chunk", "more"),
    [
        # The first token has no state; one of the next six is left before the seeding chain.
        ("bamba", (1,), None, 5),
        ("granitemoehybrid", (22,), 16, 5),  # likewise one after a chunk
        ("nemotron_h", (17,), 16, 16),  # stock's last chunk has one token
        ("falcon_h1", (18,), 1, 3),
        ("nemotron_h", (70, 2, 33), None, 5),  # one after a chain of 64
    ],
    ids=str,
)
def test_steps_of_mamba2_are_limited_in_forwards_of_several_tokens(made, name, lengths, chunk, more):
    """Stock limits them there alone: the prompts of two turns, but for a chunk of one token after a state."""
    model = made(name, **LIMITED[name])
    TargetView(model).known.checked.clear()  # so that the check runs on this prompt, too
    caches = {"stock": DynamicCache(config=model.config), "dynamic": DynamicCache(config=model.config)}
    caches["speculative"] = SpeculativeCache(model.config, len(lengths), 160)
    inputs = arguments(lengths, do_sample=False, max_new_tokens=9, prefill_chunk_size=chunk)
    for _ in range(2):
        width = inputs["input_ids"].shape[1]
        text = generated(model, **inputs, **{CACHE_NAME: caches["stock"]})
        for kind in ("dynamic", "speculative"):
            draft = drafted(model, kind == "dynamic", text, width)
            assert generated(model, **inputs, assistant_model=draft, **{CACHE_NAME: caches[kind]}).equal(text)
        longer = torch.cat([text, text[:, -9:][:, :more], text[:, -9:][:, : max(0, more - 9)]], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(longer[:, width:])], 1)
        inputs |= {"input_ids": longer, "attention_mask": mask}
        if not LEAVES_OUT_HELD_TOKENS:
            inputs["prefill_chunk_size"] = None


@pytest.mark.parametrize(
    ("name", "lengths", "chunk"),
    [
        ("qwen3_5_text", (40, 3, 23), 17),  # one of 35 tokens would be alone in a third chunk, where rows have ended
        ("kimi_linear", (4, 23, 30), 16),
        ("granitemoehybrid", (22, 1, 6), 16),
        ("falcon_h1", (1, 13), 7),
        ("lfm2_moe", (33, 2, 18), 9),
        ("jamba", (2, 19), None),
    ],
    ids=str,
)
def test_prompts_of_different_lengths_run_in_the_same_forwards(made, name, lengths, chunk, monkeypatch):
    monkeypatch.delattr(TargetView, "prefill_rows")
    check_text(made(name), lengths, prefill_chunk_size=chunk)


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2_moe"])
def test_chunks_of_one_token_and_padding(made, name):
    """Stock masks no padding in a forward of one token, so it decodes alone."""
    model, inputs = made(name), arguments(RAGGED, do_sample=False, prefill_chunk_size=1)
    draft = drafted(model, False, torch.zeros(3, 80, dtype=torch.long), 40)
    with pytest.raises(ValueError, match="prefill_chunk_size=1 with padding"):
        generated(model, **inputs, assistant_model=draft)
    draft.generation_config.on_unsupported = "plain"
    text = generated(model, **inputs)
    assert generated(model, **inputs, assistant_model=draft).equal(text)
    assert not text.equal(generated(model, **inputs | {"prefill_chunk_size": None}))


@pytest.mark.parametrize("name", EVERY)
def test_states_after_a_commit_are_those_of_single_steps(made, name):
    check_a_commit(made(name))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3_5_text", "dynamic"),
        ("falcon_h1", "speculative"),
        ("nemotron_h", "dynamic"),  # layers of experts alone keep nothing
        *(pytest.param(*one.values, kind, marks=one.marks) for one in SOAKED for kind in ("dynamic", "speculative")),
    ],
)
def test_a_returned_cache_continues(made, name, kind):
    check_a_returned_cache(made(name), kind)


@pytest.mark.parametrize(
    ("name", "error", "kind"),
    few(
        [
            ("qwen3_5_text", KeyboardInterrupt, "dynamic"),
            ("granitemoehybrid", KeyboardInterrupt, "speculative"),
            ("falcon_h1", RuntimeError, "dynamic"),
            ("kimi_linear", RuntimeError, "speculative"),
            *(pytest.param(*one.values, KeyboardInterrupt, "dynamic", marks=one.marks) for one in SOAKED),
        ],
        2,
    ),
)
def test_a_call_that_ends_in_the_middle_leaves_a_cache_that_continues(made, name, error, kind):
    model, inputs = made(name), arguments((21,), do_sample=False)
    whole = generated(model, **inputs)
    draft = drafted(model, False, whole, 21)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else SpeculativeCache(model.config, 1, 90)
    assert after_an_error(model, draft, inputs, whole, cache, error).tolist() == whole.tolist()


def test_the_functions_of_transformers_are_replaced_for_a_call_only(made):
    model = made("qwen3_5_text")
    module = type(model).__module__
    before = _functions(module)
    assert set(before) & set(RECURRENCES)
    with recurrences_replaced(model), recurrences_replaced(model):
        assert all(_functions(module)[name] is not function for name, function in before.items())
    assert _functions(module) == before


def noisy(model):
    """A copy that often agrees with the model."""
    copied, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1 + 0.03 * torch.randn(parameter.shape, generator=generator))
    return copied


@torch.no_grad()
def beam_of_plain_forwards(model, text, shape, mask_token):
    """Tokens of the beam after a text `(T,)`, by a forward over the whole text for every level."""
    widths = [1] * shape if isinstance(shape, int) else shape
    beam = Beam(text[-1:], 1 + sum(widths))
    for depth, width in enumerate(widths):
        masks = text.new_full((0 if mask_token is None else depth,), mask_token or 0)
        paths = beam.paths()[0] if mask_token is None else masks[None]
        whole = torch.cat([text.expand(len(paths), -1), paths], 1)
        beam.grow(model(whole, use_cache=False).logits[None, :, -1], width)
    return beam.fields()[0][0]


@pytest.mark.parametrize(
    ("name", "settings"),
    few(
        [
            ("qwen3_5_text", {"num_assistant_tokens": 3}),
            ("kimi_linear", {"tree_widths": [2, 3, 2]}),
            ("granitemoehybrid", {"num_assistant_tokens": 2, "ngram_candidates": 2, "ngram_size": 1}),
            ("falcon_h1", {"tree_widths": [3, 2]}),
            ("lfm2_moe", {"num_assistant_tokens": 3, "pard_token": 5}),
            ("jamba", {"tree_widths": [2, 2]}),
        ],
        3,
    ),
    ids=str,
)
def test_a_hybrid_draft_model_proposes_its_own_text(made, name, settings, monkeypatch):
    """After every rejection and in rows of different lengths: its states are those of the committed text."""
    model, small, proposals = made(name), noisy(made(name)), []
    note = lambda tree, one, _: proposals.append((one.binding.cache.lengths.host, tree.tokens))  # noqa: E731
    after(monkeypatch, AssistantDrafter, "propose", note)
    lengths, new = (14, 3, 21), 14
    inputs = arguments(lengths, do_sample=False, max_new_tokens=new)
    text = generated(model, **inputs)
    draft = AssistantDraftModel.from_model(small, model, **settings)
    draft.generation_config.gate, draft.generation_config.on_unsupported = False, "error"
    assert generated(model, **inputs, assistant_model=draft).tolist() == text.tolist()
    histogram = draft.last_speculation.acceptance_histogram
    assert histogram[0] and sum(histogram[1:])
    compared, depth = 0, draft.shape() if isinstance(draft.shape(), int) else len(draft.shape())
    for places, tokens in proposals:
        for row, (place, length) in enumerate(zip(places, lengths, strict=True)):
            if place + depth < length + new:  # tokens after the end are proposed at clamped positions
                known = text[row, 21 - length : 22 - length + place]
                expected = beam_of_plain_forwards(small, known, draft.shape(), draft.config.pard_token)
                assert tokens[row].tolist() == expected.tolist()
                compared += 1
    assert compared > 3 * len(lengths)


@pytest.mark.parametrize("settings", [{"num_assistant_tokens": 3}, {"tree_widths": [2, 2], "window": 9}], ids=str)
@torch.no_grad()
def test_a_hybrid_draft_model_catches_up_after_plain_steps(made, settings):
    """One row by more than a forward takes, and one by its root, which its states have already."""
    model = made("qwen3_5_text")
    draft = AssistantDraftModel.from_model(made("granitemoehybrid"), model, **settings)
    cache = SpeculativeCache(model.config, 2, 256, tree_slots=16)
    generator, roots = torch.Generator().manual_seed(4), torch.tensor([7, 8])
    texts = [torch.randint(3, 127, (length,), generator=generator) for length in (20, 2)]
    more = [torch.randint(3, 127, (count,), generator=generator) for count in (CATCH_UP + 9, 0)]
    drafter, fresh = (draft.make_drafter(Binding(TargetView(model), cache, None, 256)) for _ in range(2))
    drafter.start(texts, None)
    drafter.propose(roots)
    grown = [torch.cat([text, root[None], new]) for text, root, new in zip(texts, roots, more, strict=True)]
    drafter.resume(grown, None)
    found = drafter.propose(roots + 2)
    assert drafter.cache.positions == [len(text) + 1 for text in grown]  # with the root
    if draft.setting("window") is None:
        fresh.start(grown, None)
        assert torch.equal(found.tokens, fresh.propose(roots + 2).tokens)


@pytest.mark.parametrize("name", few(["qwen3_5_text", "jamba", "granitemoehybrid", "falcon_h1"], 2))
def test_the_target_drafts_for_itself_on_copies_of_its_states(made, name):
    """With all entries it proposes the text of `generate`, and all is accepted; with few the text is the same."""
    model, lengths = made(name), (23, 3, 40)
    inputs = arguments(lengths, do_sample=False)
    text = generated(model, **inputs)
    for settings in ({"sparse_ratio": 1.0}, {}):
        draft = make_draft("specattn", model, **settings)
        assert generated(model, **inputs, assistant_model=draft).tolist() == text.tolist()
        stats = draft.last_speculation
        steps = -(-(NEW - 1) // 4)  # of a row, for all but the first token
        assert (stats.num_spec_steps == len(lengths) * steps) == bool(settings)
        assert stats.draft_state_bytes > 0


@pytest.mark.parametrize(
    ("name", "make"),
    [
        *((name, lambda _: DynamicCache()) for name in TYPES),
        ("qwen3_5_text", lambda made: DynamicCache(config=made("lfm2_moe").config)),
        ("falcon_h1", lambda made: SpeculativeCache(made("granitemoehybrid").config, 1, 64)),
    ],
)
def test_a_cache_without_layers_for_the_states(made, name, make):
    """Stock raises IndexError and the like in its first forward; here there is none."""
    model, cache, inputs = made(name), make(made), arguments((9,), do_sample=False)
    with pytest.raises((IndexError, ValueError, AttributeError)):
        generated(model, **inputs, **{CACHE_NAME: copy.deepcopy(cache)})
    draft, forwards, layers = drafted(model, False, torch.zeros(1, 40, dtype=torch.long), 9), [], list(cache.layers)
    handle = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    with pytest.raises(ValueError, match=r"whose layers are not those of this model.* with \w+Cache\(config"):
        generated(model, **inputs, assistant_model=draft, **{CACHE_NAME: cache})
    handle.remove()
    assert not forwards and cache.layers == layers


def test_what_is_refused_by_name(made):
    model, inputs = made("qwen3_5_text"), arguments((9,), do_sample=False)
    compiled = NgramDraftModel.from_target(model, compile="compile")
    for attempt, message in (
        (lambda: compiled.candidate_generator(model, 64), "cannot follow Qwen3_5ForCausalLM, whose recurrent states"),
        (lambda: model.generate(**inputs, assistant_model=compiled), "compile='compile' is not supported with recurr"),
        (lambda: model.generate(**inputs, assistant_model=model), "stateful models"),  # stock's assistants stay stock's
    ):
        with pytest.raises(ValueError, match=message):
            attempt()
