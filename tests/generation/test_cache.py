"""The preallocated cache: alone, and as the memory of a conversation of several turns."""

import copy
import warnings

import pytest
import torch
from transformers import DynamicCache

from hf_longspec import SpeculativeCache
from hf_longspec.generation.cache import CACHE_NAME
from tests.rounding import rounding
from tests.tiny_targets import WINDOW, tiny_prompts, tiny_target

pytestmark = pytest.mark.usefixtures("every_step_speculates")


def make_cache(batch_size=2, max_length=12, tree_slots=5):
    return SpeculativeCache(tiny_target("llama").config, batch_size, max_length, tree_slots=tree_slots)


@pytest.mark.parametrize("lengths", [[4, 4], [4, 2]])
def test_buffers_become_as_wide_as_what_is_written(lengths):
    """As concatenation does: what autocast stored in half precision stays, and new entries keep all of theirs."""
    cache, half = make_cache(), torch.bfloat16
    made = torch.Generator().manual_seed(0)
    first, more, narrow = (torch.randn(2, 2, 4, 3, generator=made) for _ in range(3))
    cache.update(first, first.to(half), 0)
    cache.set_lengths(lengths)
    cache.stage(4)
    layer, layout = cache.layers[0], cache.layout
    for keys, values, kinds in ((more.to(half), more, 2 * [torch.float32]), (narrow.to(half), narrow.to(half), None)):
        cache.update(keys, values, 0)
        assert [layer.keys.dtype, layer.values.dtype] == (kinds or 2 * [torch.float32])
        for row, length in enumerate(lengths):
            stored = slice(length, length + 4)
            assert torch.equal(layer.keys[row, :, :length], first[row, :, :length])
            assert torch.equal(layer.values[row, :, :length], first[row, :, :length].to(half).float())
            assert torch.equal(layer.keys[row, :, stored], keys[row].float())
            assert torch.equal(layer.values[row, :, stored], values[row].float())
    assert cache.layout != layout and cache.layout == (layout[0] + 1,)


def test_too_much_is_refused_before_anything_is_written():
    for sizes in ((0, 5, 5), (1, 0, 5), (1, 5, 0)):
        with pytest.raises(ValueError, match="each must be at least 1"):
            make_cache(*sizes)
    cache, token = make_cache(max_length=6, tree_slots=4), torch.zeros(3, 2, 1, 8)
    for refused, message in (
        (lambda: cache.stage(5), r"5 nodes .* tree_slots=4"),
        (lambda: cache.update(token, token, 0), r"batch_size=2.* 3 rows"),
        (lambda: cache.set_lengths([1, 2, 3]), r"3 lengths .* 2 rows"),
        (lambda: cache.crop(2), r"crop\(2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    cache.update(*torch.zeros(2, 2, 2, 10, 8), 0)
    cache.set_lengths([10, 3])
    with pytest.raises(ValueError, match=r"\(10, 3\)"):
        cache.update(token[:2], token[:2], 0)
    with pytest.raises(ValueError, match=r"1 nodes .* 10 "):
        cache.stage(1)


def test_plain_generate_with_our_cache(plain_run):
    """Left-padded rows, more tokens than a window holds."""
    run = plain_run("gemma3", (21, 3, 13), max_new_tokens=WINDOW + 4)
    cache = SpeculativeCache(run.model.config, 3, 64)
    out = run.model.generate(**run.inputs, **{CACHE_NAME: cache})
    assert out.tolist() == run.sequences.tolist()
    assert cache.get_seq_length() == out.shape[1] - 1


def conversation(plain_run, model, lengths, turns, new, cache, check):
    """Turns of plain generation and of drafts on one cache, each compared with plain text; `check(text)` after each."""
    run = plain_run(model, lengths, max_new_tokens=new, eos_token_id=1)
    text = run.inputs["input_ids"]
    for turn, speaker in enumerate(turns):
        # without a mask, transformers would take an emitted token 0 for padding
        options = {"do_sample": False, "max_new_tokens": new, "eos_token_id": 1}
        options |= {"attention_mask": torch.ones_like(text)}
        expected = run.model.generate(text, **options)
        if speaker != "plain":
            draft = run.draft(speaker)
            draft.hints = expected[:, text.shape[1] :].tolist()
            options |= {"assistant_model": draft}
        out = run.model.generate(text, **options, **{CACHE_NAME: cache}, return_dict_in_generate=True)
        assert out.sequences.tolist() == expected.tolist()
        assert out.past_key_values is cache
        # the last token has not been through the model
        assert cache.get_seq_length() == out.sequences.shape[1] - 1
        check(out.sequences)
        said, _ = tiny_prompts(128, [5 + turn] * len(lengths), seed=turn + 1)
        text = torch.cat([out.sequences, said], dim=1)
    return text


@pytest.mark.parametrize("name", sorted({"past_key_values", CACHE_NAME}))
def test_names_of_the_argument(plain_run, name):
    """transformers announces the end of the old name, in the call of `generate` alone."""
    run = plain_run("llama", (21,), max_new_tokens=12, eos_token_id=1)
    cache, plain = DynamicCache(), run.model.generate(**run.inputs, return_dict_in_generate=True)
    with warnings.catch_warnings(record=True) as announced:
        warnings.simplefilter("always")
        out = run.again(run.draft("tree"), **{name: cache}, return_dict_in_generate=True)
    assert out.sequences.tolist() == run.sequences.tolist()
    assert set(out.keys()) >= set(plain.keys()) >= {CACHE_NAME}
    assert out[CACHE_NAME] is cache and cache.get_seq_length() == 32
    assert len([one for one in announced if "past_key_values" in str(one.message)]) == (name != CACHE_NAME)


class TestSecondTurn:
    """A cache that holds the beginning of the text."""

    @pytest.mark.parametrize("lengths", [(9, 9), (9, 5), (4, 9)])
    def test_another_mask_is_refused(self, plain_run, target, lengths):
        """The cache holds the tokens that the first mask left."""
        model = target("llama")
        run = plain_run(model, lengths, max_new_tokens=4, eos_token_id=1)
        cache = SpeculativeCache(model.config, 2, 64)
        out = run.again(run.draft("tree"), **{CACHE_NAME: cache})
        mask, held = torch.ones_like(out), cache.lengths.host
        mask[1, :3] = 0
        options = {"attention_mask": mask, CACHE_NAME: cache, "max_new_tokens": 4}
        with pytest.raises(ValueError, match=rf"{CACHE_NAME} .*\(\d+, \d+\)"):
            model.generate(out, assistant_model=run.draft("tree"), **options)
        assert (model.config._attn_implementation, cache.lengths.host) == ("sdpa", held)
        if lengths != (9, 9):
            with pytest.raises(ValueError, match="the rows hold"):
                model.generate(out, **options)

    @pytest.mark.parametrize(
        ("kind", "make", "first"),
        [("specattn", None, True), ("tree", SpeculativeCache, False), ("tree", DynamicCache, True)],
    )
    def test_inside_and_outside_of_inference_mode(self, plain_run, kind, make, first):
        """A cache that was made and filled in one goes on in the other; none is a cache that the first call returns."""
        run = plain_run("gemma3", (14, 14), max_new_tokens=6, eos_token_id=1)
        draft, cache, text = run.draft(kind), None, run.inputs["input_ids"]
        for mode in (first, not first, first):
            with torch.inference_mode(mode):
                if cache is None and make is not None:
                    cache = make(run.model.config, 2, 24) if make is SpeculativeCache else make()
                options = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": 1, "return_dict_in_generate": True}
                mask = torch.ones_like(text)
                out = run.model.generate(
                    text, attention_mask=mask, assistant_model=draft, **{CACHE_NAME: cache}, **options
                )
                cache, text = out.past_key_values, out.sequences.clone()
        assert torch.equal(text, run.again(None, max_new_tokens=18))


class TestGrowth:
    """A cache that was made for one call serves longer ones."""

    def test_too_small_for_a_tree_or_just_large_enough(self, plain_run):
        run = plain_run("llama", (21,), max_new_tokens=12, eos_token_id=1)
        small = SpeculativeCache(run.model.config, 1, max_length=3, tree_slots=2)
        assert run.again(run.draft("tree"), **{CACHE_NAME: small}).tolist() == run.sequences.tolist()
        assert small.max_length >= 33 and small.tree_slots == 7
        exact = SpeculativeCache(run.model.config, 1, max_length=33, tree_slots=7)
        assert run.again(run.draft("tree"), **{CACHE_NAME: exact}).tolist() == run.sequences.tolist()
        assert (exact.max_length, exact.tree_slots) == (33, 7)


class TestCachesOfTransformers:
    """A `DynamicCache` of the user's: taken over, and at the end what stock `generate` would have left in it."""

    def entries(self, cache):
        return [(layer.keys, layer.values) for layer in cache.layers if getattr(layer, "keys", None) is not None]

    def check(self, model, cache, text):
        """It holds what a forward of the model over the text writes."""
        has_config = cache.layer_class_to_replicate is None
        expected = DynamicCache(config=model.config) if has_config else DynamicCache()
        with torch.no_grad():
            model(text[:, :-1], **{CACHE_NAME: expected})
        assert cache.get_seq_length() == text.shape[1] - 1
        pairs = list(zip(self.entries(cache), self.entries(expected), strict=True))
        assert pairs
        for found, wanted in pairs:
            for own, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(own, other, **rounding(other, model.config.num_hidden_layers))

    @pytest.mark.parametrize(
        ("name", "kind", "with_config"),
        [("gemma3", "specattn", True), ("gemma3", "tree", False), ("deepseek_v3", "tree", True)],
    )
    def test_turns_of_all_kinds(self, plain_run, target, name, kind, with_config):
        """Past the windows of gemma3, of which the layers then keep the last tokens."""
        model = target(name)
        cache = DynamicCache(config=model.config) if with_config else DynamicCache()
        turns = (kind, "plain", kind, kind)
        text = conversation(plain_run, model, (14, 14), turns, 6, cache, lambda text: self.check(model, cache, text))
        assert text.shape[1] > 2 * WINDOW

    def test_rows_that_end_at_different_places(self, plain_run):
        """It holds as much as the shortest row; the next call computes the rest, as of any input."""
        free = plain_run("llama", (14, 14), max_new_tokens=14, eos_token_id=1)
        first, second = free.generated
        count, end = next((i, t) for i, t in enumerate(first) if i >= 3 and t not in first[:i] + second)
        run, cache = plain_run("llama", (14, 14), max_new_tokens=14, eos_token_id=end), DynamicCache()
        draft = run.draft("tree")
        out = run.again(draft, **{CACHE_NAME: cache})
        assert out.tolist() == run.sequences.tolist() and cache.get_seq_length() == 14 + count
        options = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": 1, "attention_mask": torch.ones_like(out)}
        expected = run.model.generate(out, **options)
        for assistant in (draft, None):
            held = copy.deepcopy(cache)
            assert run.model.generate(out, assistant_model=assistant, **{CACHE_NAME: held}, **options).tolist() == (
                expected.tolist()
            )


def filled(run, cache, tokens, rows):
    """The cache after a forward of the bare model over the first tokens of the prompts."""
    run.model(run.inputs["input_ids"][:, :tokens].repeat(rows, 1), **{CACHE_NAME: cache})
    return cache


class TestRefusedCaches:
    """Ways of storing: test_unsupported.py."""

    @pytest.mark.parametrize(
        ("lengths", "make", "match"),
        [
            ((21, 4), lambda run: SpeculativeCache(run.model.config, 3, 64), f"{CACHE_NAME} has 3 rows"),
            ((9,), lambda run: filled(run, DynamicCache(), 4, 2), f"{CACHE_NAME} has 2 rows"),
            ((9,), lambda run: filled(run, SpeculativeCache(run.model.config, 1, 64), 9, 1), f"{CACHE_NAME} holds 9"),
        ],
    )
    def test_caches(self, plain_run, lengths, make, match):
        run = plain_run("llama", lengths, max_new_tokens=5)
        cache, before = make(run), (run.model.config._attn_implementation, run.model.generation_config.to_dict())
        length = cache.get_seq_length()
        with pytest.raises(ValueError, match=match):
            run.again(run.draft("tree"), **{CACHE_NAME: cache})
        assert (run.model.config._attn_implementation, run.model.generation_config.to_dict()) == before
        assert cache.get_seq_length() == length
