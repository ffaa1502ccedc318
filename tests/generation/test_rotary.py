"""Texts before, across and after a change of rotary frequencies; every text has a model of its own."""

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_longspec import SpeculativeCache
from hf_longspec.generation.cache import CACHE_NAME
from tests.generation.test_unsupported import check_unsupported
from tests.robustness import drafts
from tests.tiny_targets import RandomTreeDraftModel, tiny_prompts, tiny_target
from tests.tiny_targets import generate as generate_text

LIMIT, NEW = 40, 12
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
# Prompts with texts before the change, across it, and after it; the shorter rows alone would be before it.
BEFORE, ACROSS, AT, AFTER = (27, 9, 21), (33, 9, 25), (3, LIMIT, 38), (20, LIMIT + 1, 41)
PARTS = {"before": BEFORE, "across": ACROSS, "at": AT, "after": AFTER}


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


def random_tree(model, text, width):
    """A draft that always speculates, so that nothing depends on the clock."""
    draft = RandomTreeDraftModel.from_target(model)
    draft.hints = [row[width:] for row in text]
    draft.num_nodes, draft.luck = 9, 0.6
    draft.generation_config.gate = False
    return draft


def make_draft(kind, model):
    draft = drafts.make_draft(kind, model)
    draft.generation_config.on_unsupported = "plain"
    return draft


def check(name, kind, lengths, draft=None, **options):
    """Compare a text with stock `generate`, and return the statistics."""
    text, model = generate(build(name, kind), lengths, **options), build(name, kind)
    made = random_tree(model, text, max(lengths)) if draft is None else make_draft(draft, model)
    assert generate(model, lengths, made, **options) == text
    return made.last_speculation


def check_reason(spent, where):
    """A text across the change has the reason, and others were drafted."""
    if where == "drafted":
        assert spent.reason is None and spent.num_spec_steps > 0
    else:
        assert spent.num_forwards == 0 and f"rotary frequencies change at position {where}" in spent.reason


def test_every_rope_type_is_here():
    assert set(SETTINGS) == set(ROPE_INIT_FUNCTIONS) | {"default"}


@pytest.mark.parametrize("kind", sorted(set(SETTINGS) - {"longrope", "dynamic", "default"}))
def test_types_that_look_at_nothing_but_the_position(kind):
    spent = check("llama", kind, ACROSS)
    assert spent.num_spec_steps > 0 == spent.num_plain_steps


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("name", "kind"), [("llama", "longrope"), ("llama", "dynamic"), ("phi3", "longrope")])
def test_random_trees(name, kind, part):
    spent = check(name, kind, PARTS[part])
    is_served = part == "before" or (part == "after" and kind == "longrope")
    check_reason(spent, "drafted" if is_served else LIMIT - (kind == "dynamic"))
    if is_served:
        assert sum(spent.acceptance_histogram[1:]) > 0 and spent.acceptance_histogram[0] > 0


@pytest.mark.parametrize(("part", "draft"), [("before", "longspec"), ("after", "longspec"), ("after", "specattn")])
def test_drafts_that_use_the_rotary_embedding(part, draft):
    spent = check("llama", "longrope", PARTS[part], draft)
    assert spent.num_draft_tokens > 0


def test_the_longest_row_ends_before_the_others():
    """The frequencies of the rows that go on are still those of its positions."""
    lengths = (20, LIMIT + 1)
    text = generate(build("llama", "longrope"), lengths)
    ended = text[1][max(lengths) + 2]
    model = build("llama", "longrope")
    expected = generate(build("llama", "longrope"), lengths, eos_token_id=ended)
    assert expected[1][-1] == 0 and expected[0][-1] != 0
    draft = random_tree(model, expected, max(lengths))
    assert generate(model, lengths, draft, eos_token_id=ended) == expected
    check_reason(draft.last_speculation, "drafted")


def test_a_prefill_in_chunks():
    """Plain generate chooses the frequencies for each chunk."""
    input_ids, mask = tiny_prompts(128, (45,))
    call = {"input_ids": input_ids, "attention_mask": mask, "prefill_chunk_size": 16}
    check_unsupported(lambda: build("llama", "longrope"), "prompts of up to 45 tokens", call)
    check_reason(check("llama", "longrope", BEFORE, prefill_chunk_size=16), "drafted")


@pytest.mark.parametrize(("kind", "lengths"), [("longrope", (30, 9)), ("dynamic", (30, 9)), ("longrope", (45, 9))])
def test_a_further_turn(kind, lengths):
    """The prompt of the second turn is beyond the change, and the first turn was before it or not."""
    texts = []
    for drafted in (False, True):
        model = build("llama", kind)
        kept = SpeculativeCache(model.config, 1, 90) if drafted else None
        draft = make_draft("longspec", model) if drafted else None
        options = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "assistant_model": draft}
        first = model.generate(tiny_prompts(128, lengths[:1])[0], max_new_tokens=6, **{CACHE_NAME: kept}, **options)
        prompt = torch.cat([first.sequences, tiny_prompts(128, lengths[1:], seed=4)[0]], 1)
        second = model.generate(prompt, max_new_tokens=12, **{CACHE_NAME: first.past_key_values}, **options)
        texts.append(second.sequences.tolist())
    assert texts[0] == texts[1]
    is_after = kind == "longrope" and lengths[0] > LIMIT
    check_reason(draft.last_speculation, "drafted" if is_after else LIMIT - (kind == "dynamic"))


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
        texts.append(generate(model, ACROSS, draft, eos_token_id=None))
    assert texts[0] == texts[1] != generate(tiny_target("llama"), ACROSS, eos_token_id=None)
    check_reason(draft.last_speculation, LIMIT - (kind != "longrope"))
