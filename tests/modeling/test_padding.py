"""Zeros inside of attention masks, which sliding windows of plain `generate` count, and chats of padded batches."""

import copy

import pytest
import torch
from transformers import DynamicCache

from hf_longspec import PlainDraftModel, SpeculativeCache
from hf_longspec.modeling.register_draft import DRAFTS
from hf_longspec.testing import WINDOW, tiny_prompts
from tests.modeling.calls import NEVER
from tests.modeling.test_contract import FEW_TOKENS, KEY_TOLERANCE, check_drafted, draft_of

TARGETS = ("mistral", "gemma3", "gpt_oss", "cohere2", "llama")
PAD, END = 0, 5
GREEDY = {"max_new_tokens": WINDOW + 6, "eos_token_id": NEVER, "pad_token_id": PAD, "do_sample": False}
# Every draft and every target at least twice, on one row and on three.
PAIRS = [(kind, TARGETS[(number + shift) % 5], rows) for shift, rows in ((0, 3), (2, 1)) for number, kind in enumerate(DRAFTS)]


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


@pytest.mark.parametrize(("kind", "name"), [("longspec", "mistral"), ("longspec_assistant", "gemma3")])
def test_sampled_text_is_that_of_the_plain_loop(target, kind, name):
    model, texts = target(name, **FEW_TOKENS), []
    input_ids, mask = gapped(3)
    for draft in (PlainDraftModel.from_target(model), draft_of(kind, model)):
        torch.manual_seed(5)
        options = GREEDY | {"do_sample": True, "temperature": 0.8, "attention_mask": mask}
        texts.append(model.generate(input_ids, assistant_model=draft, **options))
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "llama"])
def test_pad_ids_inside_of_a_prompt(target, name):
    """transformers makes the mask."""
    model = target(name, **FEW_TOKENS)
    input_ids, _ = gapped(3)
    expected = model.generate(input_ids, **GREEDY)
    assert torch.equal(model.generate(input_ids, assistant_model=draft_of("longspec_ngram", model), **GREEDY), expected)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_prompts_in_chunks(target, seed, chunk):
    model = target("gemma3", **FEW_TOKENS)
    input_ids, mask = gapped(3, seed)
    options = GREEDY | {"attention_mask": mask}
    expected = model.generate(input_ids, **options)
    draft = draft_of("specattn", model)
    assert torch.equal(
        model.generate(input_ids, assistant_model=draft, prefill_chunk_size=chunk, **options), expected
    )


def make_cache(model, kind, rows):
    if kind == "own":
        return SpeculativeCache(model.config, rows, 20)
    return DynamicCache(config=model.config) if kind == "with config" else DynamicCache()


def chat(model, lengths, turns, cache, seed=0):
    """Turns of a batched chat, whose texts are compared with those of plain generation without a cache.

    A row ends at its end token. The padding after it and before the next prompt is masked.
    """
    text, mask = tiny_prompts(FEW_TOKENS["vocab_size"], lengths, seed=seed)
    gaps, drafts = [], []
    for turn, kind in enumerate(turns):
        options = GREEDY | {"eos_token_id": END, "attention_mask": mask}
        expected, width = model.generate(text, **options), text.shape[1]
        if kind is not None:
            drafts.append(draft_of(kind, model))
            options["assistant_model"] = drafts[-1]
        out = model.generate(text, past_key_values=cache, **options)
        assert torch.equal(out, expected)
        new = out[:, width:]
        after_end = ((new == END).long().cumsum(1) - (new == END).long()) > 0
        gaps.append(int(after_end.sum()))
        said, own = tiny_prompts(FEW_TOKENS["vocab_size"], [4 + (row + turn) % 3 for row in range(len(lengths))], seed=turn + 9)
        text, mask = torch.cat([out, said], 1), torch.cat([mask, (~after_end).long(), own], 1)
    assert len(lengths) == 1 or any(gaps)
    return text, mask, drafts


CHATS = [
    ("longspec", "mistral", "with config"),
    ("specattn", "gemma3", "with config"),
    ("longspec_assistant", "gpt_oss", "own"),
    ("longspec_eagle3", "cohere2", "without config"),
    ("longspec_quest", "mistral", "own"),
    ("tokenswift", "gemma3", "without config"),
    ("longspec_ngram", "llama", "with config"),
    ("longspec_token_recycling", "llama", "own"),
    ("longspec_plain", "gemma3", "own"),
    ("longspec_ngram", "mistral", None),
]


@pytest.mark.parametrize(("kind", "name", "cache"), CHATS)
def test_a_batched_chat(target, kind, name, cache):
    model = target(name, **FEW_TOKENS)
    cache = None if cache is None else make_cache(model, cache, 3)
    text, mask, drafts = chat(model, (33, 3, 13), [kind] * 3, cache)
    assert text.shape[1] > 3 * WINDOW and any(draft.last_speculation.num_forwards for draft in drafts)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama"])
def test_turns_with_and_without_a_draft_on_one_cache(target, name):
    model = target(name, **FEW_TOKENS)
    for config in ("with config", "without config"):
        chat(model, (21, 9, 13), ("longspec_ngram", None, "specattn", None), make_cache(model, config, 3), seed=1)
