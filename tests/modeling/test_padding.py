"""Zeros inside of attention masks, which sliding windows of plain `generate` count, and chats of padded batches."""

from itertools import cycle

import pytest
import torch
from transformers import DynamicCache

from hf_longspec import SpeculativeCache
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.generation.compiled.compiled_steps import FixedSteps
from hf_longspec.modeling.register_draft import DRAFTS
from tests.generation.tiny_models import IMAGE_TOKEN, vision_language_model
from tests.modeling import calls
from tests.modeling.calls import generate
from tests.modeling.test_contract import FEW_TOKENS, check_drafted, draft_of
from tests.pairwise import few
from tests.tiny_targets import WINDOW, tiny_prompts, tiny_target

TARGETS = ("mistral", "gemma3", "gpt_oss", "cohere2", "llama")
PAD, END = 0, 5
GREEDY = calls.GREEDY | {"max_new_tokens": WINDOW + 6}
# Every draft, with three rows and with one.
PAIRS = [*zip(DRAFTS, cycle(TARGETS), cycle((3, 1)))]


def gapped(rows, seed=0):
    """Prompts with padding before and between tokens: gaps longer and shorter than what remains of a window."""
    input_ids, mask = tiny_prompts(FEW_TOKENS["vocab_size"], (41, 30, 37)[:rows], seed=seed)
    for row in range(rows):
        for first, count in ((14 + row, 3), (25 + row, 8 - 3 * row), (38 - row, 1)):
            mask[row, first : first + count] = 0
    return input_ids.masked_fill(mask == 0, PAD), mask


@pytest.mark.parametrize(("kind", "name", "rows"), PAIRS)
def test_greedy_text_is_that_of_stock_generate(target, kind, name, rows):
    model = target(name, **FEW_TOKENS)
    input_ids, mask = gapped(rows)
    draft = draft_of(kind, model)
    expected = model.generate(input_ids, attention_mask=mask, **GREEDY)
    assert torch.equal(model.generate(input_ids, attention_mask=mask, assistant_model=draft, **GREEDY), expected)
    check_drafted(draft, model)
    if name != "llama":  # the gaps matter
        alone = input_ids[0][mask[0].bool()][None]
        assert not torch.equal(model.generate(alone, **GREEDY)[0, alone.shape[1] :], expected[0, input_ids.shape[1] :])


def test_pad_ids_inside_of_a_prompt(target):
    """transformers makes the mask."""
    model = target("gpt_oss", **FEW_TOKENS)
    input_ids, _ = gapped(3)
    expected = model.generate(input_ids, **GREEDY)
    assert torch.equal(model.generate(input_ids, assistant_model=draft_of("longspec_ngram", model), **GREEDY), expected)


def test_steps_with_gaps_run_as_they_are(target, monkeypatch):
    """Others of the same draft are compiled."""
    steps = []
    monkeypatch.setattr(FixedSteps, "verify", lambda *args: steps.append(1))  # returns None: the step runs as it is
    model = target("mistral", **FEW_TOKENS)
    draft = draft_of("longspec_plain", model)
    draft.generation_config.compile = "compile"
    input_ids, mask = gapped(3)
    options = GREEDY | {"attention_mask": mask}
    out = model.generate(input_ids, assistant_model=draft, **options)
    assert torch.equal(out, model.generate(input_ids, **options)) and not steps
    generate(model, draft, (21,))
    assert steps


def make_cache(model, kind, rows):
    if kind == "own":
        return SpeculativeCache(model.config, rows, 20)
    return DynamicCache(config=model.config) if kind == "with config" else DynamicCache()


# Turns, target, cache. Without a draft (`None`): what a draft leaves in a cache is right where the mask is not 0.
SOAK = {"marks": pytest.mark.soak}
CHATS = [
    (["longspec"] * 3, "mistral", "with config"),
    pytest.param(["specattn"] * 3, "gemma3", "with config", **SOAK),
    (["longspec_assistant"] * 3, "gpt_oss", "own"),
    pytest.param(["longspec_eagle3"] * 3, "cohere2", "without config", **SOAK),
    (["tokenswift"] * 3, "gemma3", "without config"),
    (["longspec_ngram"] * 3, "mistral", None),
    (["longspec_ngram", None, "specattn", None], "mistral", "with config"),
    (["longspec_ngram", None, "specattn", None], "gemma3", "without config"),
]


@pytest.mark.parametrize(("turns", "name", "cache"), few(CHATS, 3), ids=str)
def test_a_batched_chat(target, turns, name, cache):
    """A row ends at its end token. The padding after it and before the next prompt is masked."""
    model = target(name, **FEW_TOKENS)
    cache = None if cache is None else make_cache(model, cache, 3)
    chunks = {"prefill_chunk_size": 5} if None in turns else {}
    text, mask = tiny_prompts(FEW_TOKENS["vocab_size"], (33, 3, 13))
    for turn, kind in enumerate(turns):
        options = GREEDY | {"eos_token_id": END, "attention_mask": mask}
        expected, width = model.generate(text, **options), text.shape[1]
        draft = None if kind is None else draft_of(kind, model)
        out = model.generate(text, **{CACHE_NAME: cache}, assistant_model=draft, **options, **chunks)
        assert torch.equal(out, expected)
        assert draft is None or draft.last_speculation.num_forwards > 0
        is_end = (out[:, width:] == END).long()
        before_end = (is_end.cumsum(1) - is_end == 0).long()
        said, of_said = tiny_prompts(
            FEW_TOKENS["vocab_size"], [4 + (row + turn) % 3 for row in range(3)], seed=turn + 9
        )
        text, mask = torch.cat([out, said], 1), torch.cat([mask, before_end, of_said], 1)
    assert text.shape[1] > 3 * WINDOW and (mask[:, 33:] == 0).any(1).all()  # every row has gaps


def refused(model, match, **options):
    input_ids, mask = gapped(3)
    options = {"input_ids": input_ids, "attention_mask": mask} | options
    with pytest.raises(ValueError, match=match):
        model.generate(**(GREEDY | options), assistant_model=draft_of("longspec_ngram", model))


def test_what_the_prompt_cannot_run_with_is_refused(target, monkeypatch):
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    model = tiny_target("mistral", **FEW_TOKENS, max_position_embeddings=50, **dynamic)
    refused(model, "max_length=63: .*change at position 49.*zeros between tokens")
    model = target("mistral", **FEW_TOKENS)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    refused(model, "zeros between tokens.*'flash_attention_2'")


def test_images_beside_gaps_are_refused():
    model = vision_language_model("gemma3")
    input_ids, mask = gapped(1)
    types = torch.zeros_like(input_ids)
    input_ids[:, 2:6], types[:, 2:6] = IMAGE_TOKEN, 1
    inputs = {"input_ids": input_ids, "attention_mask": mask, "token_type_ids": types}
    inputs["pixel_values"] = torch.randn(1, 3, 28, 28)
    refused(model, "zeros between tokens.*image inputs, token_type_ids", **inputs)
