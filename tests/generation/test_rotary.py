"""Texts that cross a change of rotary frequencies, against plain `generate`; every text has a model of its own."""

from functools import cache, partial

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_longspec import SpeculativeCache
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.generation.special_cases.rotary_limit import FORGETS, RECOMPUTES, cache_at
from hf_longspec.generation.target import TargetView
from tests.generation.test_unsupported import check_unsupported
from tests.robustness.drafts import make_draft
from tests.tiny_targets import RandomTreeDrafter, RandomTreeDraftModel, tiny_prompts, tiny_target
from tests.tiny_targets import generate as generate_text
from tests.watching import before

LIMIT, NEW = 40, 22
HALF = 8  # frequencies of a head
OF = {"original_max_position_embeddings": LIMIT}
BOTH = {"short_factor": [1.0 + 0.1 * i for i in range(HALF)], "long_factor": [4.0 + i for i in range(HALF)]}
SETTINGS = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0} | OF,
    "longrope": {"factor": 4.0} | OF | BOTH,
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | OF,
    "proportional": {"partial_rotary_factor": 0.5},
}
# Below the limit, at it, and beyond it; rows that cross one after another.
BELOW, RAGGED = (30,), (33, 9, 25)
BEFORE, AT, BEYOND = (LIMIT - 1,), (3, LIMIT, 38), (20, LIMIT + 4, 41)
CHANGING = [("llama", "longrope"), ("llama", "dynamic"), ("phi3", "longrope")]


def parameters(kind):
    return {"rope_type": kind, "rope_theta": 10000.0} | SETTINGS[kind]


def build(name, kind):
    overrides = {"rope_parameters": parameters(kind)}
    overrides["max_position_embeddings"] = LIMIT if kind == "dynamic" else 4 * LIMIT
    if name == "phi3":
        overrides["original_max_position_embeddings"] = LIMIT
    if name == "gemma3":
        overrides["rope_parameters"] = {"full_attention": parameters(kind), "sliding_attention": parameters("default")}
    model = tiny_target(name, **overrides)
    model.generation_config.eos_token_id = None
    return model


def generate(model, lengths, draft=None, **options):
    return generate_text(model, draft, lengths, **({"max_new_tokens": NEW} | options)).tolist()


@cache
def plain(name, kind, lengths):
    return generate(build(name, kind), lengths)


def make(kind, model, text=(), prompt_width=0):
    """A draft that always speculates, so that nothing depends on the clock."""
    if kind == "tree":
        draft = RandomTreeDraftModel.from_target(model)
        draft.hints = [row[prompt_width:] for row in text]
        draft.num_nodes, draft.luck = 9, 0.6
        draft.generation_config.gate, draft.generation_config.on_unsupported = False, "error"
        return draft
    return make_draft(kind, model)


def loses_its_cache(name, lengths):
    """phi3 in transformers 5.17: plain generate runs the last token alone from the limit on."""
    return name == "phi3" and max(lengths) <= LIMIT and cache_at(build(name, "longrope"), LIMIT) == FORGETS


def check(name, kind, draft, lengths):
    if loses_its_cache(name, lengths):
        model = build(name, kind)
        with pytest.raises(ValueError, match=r"Keep max_length at 41 or below, or upgrade"):
            generate(model, lengths, make(draft, model))
        return None
    text, model = plain(name, kind, lengths), build(name, kind)
    made = make(draft, model, text, max(lengths))
    assert generate(model, lengths, made) == text
    return made.last_speculation


def test_every_rope_type_is_here():
    assert set(SETTINGS) == set(ROPE_INIT_FUNCTIONS) | {"default"}


@pytest.mark.parametrize("kind", sorted(set(SETTINGS) - {"longrope", "dynamic", "default"}))
def test_types_that_look_at_nothing_but_the_position(kind):
    spent = check("llama", kind, "tree", RAGGED)
    assert spent.num_spec_steps > 0 == spent.num_plain_steps


@pytest.mark.parametrize(
    ("name", "kind", "lengths"),
    [
        *(("llama", "longrope", lengths) for lengths in (BEFORE, RAGGED, AT, BEYOND)),
        *(("llama", "dynamic", lengths) for lengths in (RAGGED, AT)),
        *(("phi3", "longrope", lengths) for lengths in (AT, BEYOND)),
    ],
    ids=str,
)
def test_random_trees(name, kind, lengths):
    spent = check(name, kind, "tree", lengths)
    if spent is None:
        return
    if kind == "longrope":
        assert spent.num_spec_steps > 0
        assert sum(spent.acceptance_histogram[1:]) > 0 and spent.acceptance_histogram[0] > 0
    elif lengths == AT:
        assert spent.num_spec_steps == 0  # every position has its own frequencies


@pytest.mark.parametrize(
    ("name", "kind", "lengths", "draft"),
    [
        ("llama", "longrope", BELOW, "longspec"),
        ("llama", "dynamic", RAGGED, "specattn"),
        ("phi3", "longrope", RAGGED, "longspec"),
        ("llama", "longrope", RAGGED, "specattn"),
    ],
    ids=str,
)
def test_drafts_that_use_the_rotary_embedding(name, kind, lengths, draft):
    spent = check(name, kind, draft, lengths)
    assert spent is None or spent.num_draft_tokens > 0


@pytest.mark.parametrize(("name", "kind"), CHANGING)
def test_the_longest_row_ends_before_the_limit(name, kind):
    """The rows that go on are shorter, and none of their positions is beyond the limit when plain generate changes."""
    lengths = (20, 34)
    if loses_its_cache(name, lengths):
        return
    ended = plain(name, kind, lengths)[1][max(lengths) + 2]
    text = generate(build(name, kind), lengths, eos_token_id=ended)
    assert text[1][-1] == 0 and text[0][-1] != 0
    model = build(name, kind)
    assert generate(model, lengths, make("tree", model, text, max(lengths)), eos_token_id=ended) == text


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_parameters_by_layer_type(kind):
    try:
        text = plain("gemma3", kind, RAGGED)
    except UnboundLocalError:  # longrope by layer type, transformers 5.17
        pytest.skip("plain generate fails in this version of transformers")
    model = build("gemma3", kind)
    assert generate(model, RAGGED, make("longspec", model)) == text


def test_what_a_call_leaves_on_the_module():
    """Dynamic NTK keeps its frequencies from call to call, in plain generate too."""
    bare, drafted = build("llama", "dynamic"), build("llama", "dynamic")
    for length in (45, 40, 30, 46):
        text = generate(bare, (length,), max_new_tokens=NEW // 2)
        assert generate(drafted, (length,), make("longspec", drafted), max_new_tokens=NEW // 2) == text
        left = [model.model.rotary_emb for model in (bare, drafted)]
        assert torch.equal(left[0].inv_freq, left[1].inv_freq)
        assert int(left[0].max_seq_len_cached) == int(left[1].max_seq_len_cached)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_padding_in_every_row(name):
    """Positions count tokens, while phi3 compares the padded length."""
    lengths = (24, 30)
    if loses_its_cache(name, lengths):
        return
    padded = zip(("input_ids", "attention_mask"), tiny_prompts(128, lengths), strict=True)
    inputs = {key: torch.nn.functional.pad(value, (3, 0)) for key, value in padded}
    text = generate(build(name, "longrope"), lengths, **inputs)
    model = build(name, "longrope")
    assert generate(model, lengths, make("tree", model, text, 33), **inputs) == text


class TestRefused:
    def test_a_prefill_in_chunks_beyond_the_limit(self):
        input_ids, mask = tiny_prompts(128, (45,))
        call = {"input_ids": input_ids, "attention_mask": mask, "prefill_chunk_size": 16}
        make_model = partial(build, "llama", "longrope")
        check_unsupported(make_model, "prefill_chunk_size=16 with a prompt of 45 tokens", call)
        text, model = plain("llama", "longrope", BELOW), make_model()
        assert generate(model, BELOW, make("tree", model, text, 30), prefill_chunk_size=16) == text

    def test_a_target_that_loses_its_cache(self):
        if loses_its_cache("phi3", BELOW):
            input_ids, mask = tiny_prompts(128, (36,))
            call = {"input_ids": input_ids, "attention_mask": mask}
            check_unsupported(partial(build, "phi3", "longrope"), "Keep max_length at 41 or below, or upgrade", call)

    def test_layers_that_change_at_different_positions(self):
        config = build("gemma3", "longrope").config
        config.rope_parameters["sliding_attention"] = parameters("longrope") | {"original_max_position_embeddings": 20}
        model = AutoModelForCausalLM.from_config(config)
        reasons = TargetView(model).why_not()
        assert reasons == ["its rotary frequencies change at different positions, [20, 40], not at one"]

    def test_a_further_turn_whose_cache_the_target_drops(self):
        model = build("phi3", "longrope")
        kept = SpeculativeCache(model.config, 1, 80)
        generate(model, BELOW, make("tree", model), **{CACHE_NAME: kept}, max_new_tokens=4)
        before = kept.lengths.host
        with pytest.raises(ValueError, match=r"holds 33 tokens, and the prompt has 45.*Start a new cache"):
            generate(model, (45,), make("tree", model), **{CACHE_NAME: kept})
        assert kept.lengths.host == before == (33,)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_further_turn_beyond_the_limit(kind):
    """The first turn ends below the limit, the prompt of the second one is beyond it."""
    more, _ = tiny_prompts(128, (9,), seed=4)
    texts = []
    for drafted in (False, True):
        model = build("llama", kind)
        kept = SpeculativeCache(model.config, 1, 90) if drafted else None
        draft = make("longspec", model) if drafted else None
        options = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "assistant_model": draft}
        first = model.generate(tiny_prompts(128, BELOW)[0], max_new_tokens=6, **{CACHE_NAME: kept}, **options)
        prompt = torch.cat([first.sequences, more], 1)
        assert prompt.shape[1] > LIMIT > first.sequences.shape[1]
        second = model.generate(prompt, max_new_tokens=12, **{CACHE_NAME: first.past_key_values}, **options)
        texts.append(second.sequences.tolist())
    assert texts[0] == texts[1]


def test_an_error_after_the_cache_was_computed_anew_leaves_it_empty(monkeypatch):
    model = build("phi3", "longrope")
    if cache_at(model, LIMIT) != RECOMPUTES:
        return
    kept = SpeculativeCache(model.config, 1, 80)
    generate(model, BELOW, make("tree", model), **{CACHE_NAME: kept}, max_new_tokens=4)

    def fail(drafter, root):
        if drafter.binding.cache.lengths.host[0] > LIMIT:
            raise RuntimeError("on purpose")

    before(monkeypatch, RandomTreeDrafter, "propose", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        generate(model, (36,), make("tree", model), **{CACHE_NAME: kept})
    assert kept.lengths.host == (0,)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "an attribute"])
def test_frequencies_of_a_module_that_the_config_does_not_name(kind):
    """A rotary embedding that was put in the place of the model's own, or an attribute of it that was set."""
    texts, other = [], build("llama", "dynamic" if kind == "an attribute" else kind)
    for with_draft in (False, True):
        model = tiny_target("llama", max_position_embeddings=other.config.max_position_embeddings)
        if kind == "an attribute":
            model.config.rope_parameters["factor"] = 4.0
            model.model.rotary_emb.rope_type = "dynamic"
        else:
            model.model.rotary_emb = type(other.model.rotary_emb)(other.config)
        draft = make_draft("ngram", model) if with_draft else None
        texts.append(generate(model, RAGGED, draft, eos_token_id=None))
    assert texts[0] == texts[1] != generate(tiny_target("llama"), RAGGED, eos_token_id=None)
    assert draft.last_speculation.num_forwards and TargetView(model).rotary_limit <= LIMIT
