"""A `PrefixCache`: texts are those of whole calls, what is stored stays, and states are used at their places."""

import copy

import pytest
import torch
from transformers import DynamicCache

from hf_longspec import NgramDraftModel, PrefixCache, SpeculativeCache
from hf_longspec.generation.cache import CACHE_NAME
from tests.pairwise import few
from tests.tiny_targets import tiny_prompts

NEW, SYSTEM, QUESTION, CHUNK = 7, 23, 5, 8
PLENTY = 10**8


def prompt(length, seed):
    return tiny_prompts(90, (length,), seed)[0]


def options(tokens, **more):
    """Arguments of a greedy call."""
    mask = torch.ones_like(tokens)
    return {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | more


@pytest.mark.parametrize("name", few(["llama", "gemma3", "falcon_h1", "qwen3_next"], 2))
def test_agents_that_alternate_read_new_tokens_alone(made, name, widths):
    """Three of them with texts of their own, over three turns, with a draft and without one."""
    model, texts = made(name), [prompt(SYSTEM, seed) for seed in (1, 2, 3)]
    prefixes, draft = PrefixCache(model, PLENTY), NgramDraftModel.from_target(model)
    found, more = widths(model), {"prefill_chunk_size": CHUNK}
    for turn in range(3):
        for agent, text in enumerate(texts):
            text = torch.cat([text, prompt(QUESTION, 10 * turn + agent + 5)], 1)
            expected = model.generate(text, **options(text))
            assert prefixes.find(text) == (text.shape[1] - QUESTION - 1 if turn else 0)
            found.clear()
            assistant = draft if turn % 2 else None
            got = prefixes.generate(text, assistant_model=assistant, **options(text, **more))
            assert got.tolist() == expected.tolist()
            assert not turn or max(found) < SYSTEM < text.shape[1]  # the largest one verifies a tree
            texts[agent] = got
    assert len(prefixes) == 3
    # another question after the first text's beginning; states lie at ends of chunks
    text = torch.cat([prompt(SYSTEM, 1), prompt(QUESTION, 99)], 1)
    assert prefixes.find(text) == (SYSTEM // CHUNK * CHUNK if name in ("falcon_h1", "qwen3_next") else SYSTEM)
    assert prefixes.generate(text, **options(text)).tolist() == model.generate(text, **options(text)).tolist()


def read(model, prefixes, *texts):
    """Read texts, and store them."""
    for text in texts:
        cache = SpeculativeCache(model.config, 1, 64)
        with torch.no_grad():
            model(text, **{CACHE_NAME: cache})
        prefixes.put(text, cache)


def copies(prefixes):
    """All that is stored."""
    parts = [part for text in prefixes._texts for part in (text.entries, *text.states.values())]
    return [{name: entry.clone() for name, entry in part.items()} for part in parts]


def same(one, other):
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in b)


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1"])
def test_what_is_lent_may_be_written_to(made, name):
    """By a draft, by plain generation, after a cut and by one token alone; the cache that was stored as well."""
    model, text = made(name), prompt(SYSTEM, 1)
    prefixes, draft = PrefixCache(model, PLENTY), NgramDraftModel.from_target(model)
    read(model, prefixes, text)
    before = copies(prefixes)
    longer = torch.cat([text, prompt(QUESTION, 4)], 1)
    for assistant in (draft, None):
        lent = prefixes.take(longer)
        assert lent.get_seq_length() == SYSTEM and lent.nbytes < PLENTY
        if not lent.parts:
            lent.crop(-6)
        out = model.generate(longer, assistant_model=assistant, **{CACHE_NAME: lent}, **options(longer))
        assert out.tolist() == model.generate(longer, **options(longer)).tolist() and same(before, copies(prefixes))
    with torch.no_grad():
        for length, cut in ((1, 0), (3, 9)):
            lent = prefixes.take(longer)
            if not lent.parts:
                lent.crop(-cut)
            model(prompt(length, 5), **{CACHE_NAME: lent})
    assert same(before, copies(prefixes))
    cache = SpeculativeCache(model.config, 1, 64)
    with torch.no_grad():
        model(text, **{CACHE_NAME: cache})
        prefixes.clear()
        prefixes.put(text, cache)
        model(prompt(1, 5), **{CACHE_NAME: cache})
        if not cache.parts:
            cache.crop(-9)
        model(prompt(3, 6), **{CACHE_NAME: cache})
    assert same(before, copies(prefixes))


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_texts_are_dropped_by_their_last_use(made, name):
    model, texts = made(name), [prompt(SYSTEM, seed) for seed in range(1, 5)]
    longer = [torch.cat([text, prompt(QUESTION, 9)], 1) for text in texts]
    prefixes = PrefixCache(model, PLENTY)
    read(model, prefixes, texts[0])
    size = prefixes.nbytes
    prefixes = PrefixCache(model, 3 * size + size // 2)
    read(model, prefixes, *texts[:3])
    prefixes.take(longer[0])
    read(model, prefixes, texts[3])
    assert [prefixes.find(text) for text in longer] == [SYSTEM, 0, SYSTEM, SYSTEM] and prefixes.nbytes == 3 * size
    small = PrefixCache(model, size - 1)
    read(model, small, texts[0])
    assert len(small) == 0
    read(model, prefixes, longer[0])  # takes the place of its beginning
    assert len(prefixes) == 3 or prefixes.nbytes <= 3 * size + size // 2


def test_nothing_is_lent_where_a_second_turn_is_another_text(made):
    model, text = made("deepseek_v32"), prompt(SYSTEM, 1)
    prefixes = PrefixCache(model, PLENTY)
    read(model, prefixes, text)
    assert len(prefixes) == 0 and prefixes.take(text).get_seq_length() == 0


def test_what_cannot_be_known_by_tokens_is_refused(made):
    model, text = made("llama"), prompt(SYSTEM, 1)
    prefixes = PrefixCache(model, PLENTY)
    for more, match in (
        ({"token_type_ids": torch.zeros_like(text)}, "token_type_ids: a PrefixCache knows texts by their tokens"),
        ({"attention_mask": torch.zeros_like(text)}, "padding in attention_mask"),
    ):
        with pytest.raises(ValueError, match=match):
            prefixes.generate(text, **options(text, **more))
    with pytest.raises(ValueError, match=r"shape \(2, 23\): .* one prompt"):
        prefixes.generate(text.expand(2, -1))
    held = DynamicCache()
    model(text, **{CACHE_NAME: held})
    for cache in (held, SpeculativeCache(model.config, 2, 9), held_by(model, torch.cat([text, text], 1))):
        with pytest.raises(ValueError, match="is no cache of these 23 tokens"):
            prefixes.put(text, cache)
    padded = SpeculativeCache(model.config, 1, 64)
    mask = torch.ones_like(text)
    mask[0, :3] = 0
    draft = NgramDraftModel.from_target(model)
    out = model.generate(text, assistant_model=draft, **{CACHE_NAME: padded}, **options(text, attention_mask=mask))
    prefixes.put(out, copy.copy(padded))
    assert len(prefixes) == 0


def held_by(model, text):
    cache = SpeculativeCache(model.config, 1, 64)
    with torch.no_grad():
        model(text, **{CACHE_NAME: cache})
    return cache
