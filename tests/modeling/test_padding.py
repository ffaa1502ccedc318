"""Padding: chats of padded batches, and zeros between tokens, which windows count."""

import pytest
import torch
from transformers import DynamicCache

from hf_longspec import SpeculativeCache
from hf_longspec.generation.cache import CACHE_NAME
from tests.generation.test_unsupported import check_unsupported
from tests.modeling import calls
from tests.modeling.test_contract import FEW_TOKENS, check_drafted, draft_of
from tests.pairwise import few
from tests.tiny_targets import WINDOW, tiny_prompts, tiny_target

PAD, END = 0, 5
GREEDY = calls.GREEDY | {"max_new_tokens": WINDOW + 6}
VOCAB = FEW_TOKENS["vocab_size"]
REASON = r"zeros between tokens in the rows \[0, 1, 2\]"


def gapped():
    """Prompts with padding before and between tokens."""
    input_ids, mask = tiny_prompts(VOCAB, (41, 30, 37))
    for row in range(3):
        for first, count in ((14 + row, 3), (25 + row, 8 - 3 * row), (38 - row, 1)):
            mask[row, first : first + count] = 0
    return input_ids.masked_fill(mask == 0, PAD), mask


@pytest.mark.parametrize(("name", "masked"), [("mistral", True), ("gpt_oss", False)])
def test_zeros_between_tokens(name, masked):
    """Windows of plain `generate` count them. Without a mask, transformers makes it of pad ids."""
    input_ids, mask = gapped()
    call = {"input_ids": input_ids} | ({"attention_mask": mask} if masked else {})
    check_unsupported(lambda: tiny_target(name, **FEW_TOKENS), REASON, call)


def make_cache(model, kind):
    if kind == "own":
        return SpeculativeCache(model.config, 3, 20)
    return DynamicCache(config=model.config) if kind == "with config" else DynamicCache()


def next_turn(text, mask, turn, ends=False):
    """The conversation with a question of one length for all rows, and its mask; with `ends`, it is 0 after an end."""
    is_end = (text[:, mask.shape[1] :] == END).long() * ends
    before_end = (is_end.cumsum(1) - is_end == 0).long()
    said, of_said = tiny_prompts(VOCAB, [4 + turn] * 3, seed=turn + 9)
    return torch.cat([text, said], 1), torch.cat([mask, before_end, of_said], 1)


# Drafts of the turns, target, cache. Without a draft (`None`): what a draft leaves in a cache is right.
CHATS = [
    (["longspec"] * 3, "mistral", "with config"),
    (["longspec_assistant"] * 3, "gpt_oss", "own"),
    (["tokenswift"] * 3, "gemma3", "without config"),
    (["longspec_ngram"] * 3, "mistral", None),
    (["longspec_ngram", None, "specattn", None], "gemma3", "without config"),
]


@pytest.mark.parametrize(("turns", "name", "cache"), few(CHATS, 3), ids=str)
def test_a_batched_chat(target, turns, name, cache):
    """Rows are padded on the left, and none ends before the others."""
    model = target(name, **FEW_TOKENS)
    cache = None if cache is None else make_cache(model, cache)
    chunks = {"prefill_chunk_size": 5} if None in turns else {}
    text, mask = tiny_prompts(VOCAB, (33, 3, 13))
    for turn, kind in enumerate(turns):
        options = GREEDY | {"eos_token_id": None, "attention_mask": mask}
        expected = model.generate(text, **options)
        draft = None if kind is None else draft_of(kind, model)
        out = model.generate(text, **{CACHE_NAME: cache}, assistant_model=draft, **options, **chunks)
        assert torch.equal(out, expected)
        assert draft is None or draft.last_speculation.num_forwards > 0
        text, mask = next_turn(out, mask, turn)
    assert text.shape[1] > 3 * WINDOW


def ended_early(model, draft, cache):
    """The second turn of a chat whose rows end at different places, and its mask, after a first one with a draft."""
    text, mask = tiny_prompts(VOCAB, (33, 3, 13))
    options = GREEDY | {"eos_token_id": END}
    out = model.generate(text, attention_mask=mask, **{CACHE_NAME: cache}, assistant_model=draft, **options)
    assert draft.last_speculation.num_forwards > 0
    text, mask = next_turn(out, mask, 0, ends=True)
    assert (mask[:, 33:] == 0).any()
    return text, mask, {CACHE_NAME: cache, "assistant_model": draft}


@pytest.mark.parametrize("name", ["mistral", "llama"])
@pytest.mark.parametrize("cache", ["with config", "own", None])
def test_a_chat_whose_rows_end_at_different_places(target, name, cache):
    """Without a window, the second turn is drafted, unless its cache has columns for the padding."""
    model = target(name, **FEW_TOKENS)
    cache, draft = None if cache is None else make_cache(model, cache), draft_of("longspec_ngram", model)
    draft.generation_config.on_unsupported = "plain"
    text, mask, how = ended_early(model, draft, cache)
    expected = model.generate(text, attention_mask=mask, **GREEDY)
    if isinstance(cache, SpeculativeCache) and name == "mistral":
        held = cache.lengths.host
        with pytest.raises(ValueError, match=rf"rows hold .*{held[0]}.*start a new cache"):
            model.generate(text, attention_mask=mask, **how, **GREEDY)
        assert cache.lengths.host == held
        return
    assert torch.equal(model.generate(text, attention_mask=mask, **how, **GREEDY), expected)
    spent = draft.last_speculation
    if name == "mistral" or isinstance(cache, DynamicCache):
        assert "zeros between tokens" in spent.reason
    else:
        assert spent.num_forwards > 0


@pytest.mark.parametrize("kind", ["longspec", "specattn"])
def test_zeros_between_tokens_that_nothing_counts(target, kind):
    model, (input_ids, mask) = target("llama", **FEW_TOKENS), gapped()
    draft = draft_of(kind, model)
    expected = model.generate(input_ids, attention_mask=mask, **GREEDY)
    assert torch.equal(model.generate(input_ids, attention_mask=mask, assistant_model=draft, **GREEDY), expected)
    check_drafted(draft, model)
