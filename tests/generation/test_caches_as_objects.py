"""A cache that a call with a draft returns is used as a `DynamicCache` is; a `StaticCache` and new tokens are taken."""

import copy
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache, StaticCache

from hf_longspec import NgramDraftModel, PlainDraftModel, SpeculativeCache
from hf_longspec.generation.cache import CACHE_NAME
from tests.pairwise import few
from tests.rounding import rounding
from tests.tiny_targets import RandomTreeDraftModel, tiny_prompts
from tests.user_objects import Answer, Recorder

pytestmark = pytest.mark.usefixtures("every_step_speculates")

# Windows; keys, values and states in one layer; layers with states alone.
KINDS = "llama", "gemma3", "falcon_h1", "qwen3_next"
NEW = 9


def prompts(*lengths, seed=0):
    return tiny_prompts(90, lengths, seed)


def generated(model, tokens, mask=None, draft=None, **options):
    """A greedy call of `generate`."""
    mask = torch.ones_like(tokens) if mask is None else mask
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    return model.generate(tokens, attention_mask=mask, assistant_model=draft, **options)


def drafted(model, text, width):
    """A draft whose trees hold the text after `width` columns."""
    draft = RandomTreeDraftModel.from_target(model, on_unsupported="error")
    draft.hints = text[:, width:].tolist()
    return draft


def after_a_call(model, tokens, **options):
    """Text of a call with a draft, and the cache that it returns."""
    out = generated(model, tokens, draft=NgramDraftModel.from_target(model), return_dict_in_generate=True, **options)
    assert isinstance(out[CACHE_NAME], SpeculativeCache)
    return out.sequences, out[CACHE_NAME]


def check_continues(model, text, cache):
    """Plain generation and a draft continue a cache as if the text were passed whole."""
    more = torch.cat([text, prompts(*[4] * len(text), seed=8)[0]], 1)
    expected = generated(model, more)
    for draft in (None, drafted(model, expected, more.shape[1])):
        held = copy.deepcopy(cache)
        assert generated(model, more, draft=draft, **{CACHE_NAME: held}).tolist() == expected.tolist()
        assert held.get_seq_length() == expected.shape[1] - 1


def pickled(cache):
    return pickle.loads(pickle.dumps(cache))


@pytest.mark.parametrize("name", few(KINDS, 2))
def test_rows_copies_and_files(made, name, tmp_path):
    model, tokens = made(name), prompts(17, 17)[0]
    text, cache = after_a_call(model, tokens)
    check_continues(model, text, cache)
    check_continues(model, text, pickled(cache))
    rows = {
        "batch_repeat_interleave": (2, [0, 0, 1, 1]),
        "batch_select_indices": (torch.tensor([False, True]), [1]),
        "reorder_cache": (torch.tensor([1, 0]), [1, 0]),
    }
    for method, (argument, order) in rows.items():
        other = copy.deepcopy(cache)
        getattr(other, method)(argument)
        assert other.batch_size == len(order)
        check_continues(model, text[order], other)
    cache.save(tmp_path / "text.safetensors")
    check_continues(model, text, SpeculativeCache.load(tmp_path / "text.safetensors", model.config))
    if not cache.parts:
        cut = copy.deepcopy(cache)
        cut.crop(-5)
        check_continues(model, text[:, :-5], cut)
        check_continues(model, text, DynamicCache(iter(cache)))
    check_continues(model, text, cache)  # none of this has changed it


def test_rows_of_different_lengths_keep_them(made):
    """Rows that end at different places, with padding on their left: lengths and columns go with the rows."""
    model = made("llama")
    tokens, mask = prompts(14, 9, 14)
    first = generated(model, tokens, mask)
    end = first[0, 17].item()
    text, cache = after_a_call(model, tokens, mask=mask, eos_token_id=end)
    assert len(set(cache.lengths.host)) > 1
    order = [2, 0, 1]
    cache.batch_select_indices(torch.tensor(order))
    text, mask = text[order], torch.cat([mask, torch.ones(3, text.shape[1] - 14, dtype=torch.long)], 1)[order]
    expected = generated(model, text, mask)
    got = generated(model, text, mask, drafted(model, expected, text.shape[1]), **{CACHE_NAME: pickled(cache)})
    assert got.tolist() == expected.tolist()


def stored(cache):
    """Bytes of the memory that the tensors of a cache keep alive."""
    tensors = [x for layer in cache.layers for x in vars(layer).values() if isinstance(x, torch.Tensor) and x.dim() > 1]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1"])
def test_memory_is_that_of_the_tokens(made, name, tmp_path):
    """A call that may write 4000 tokens, of which it writes 3."""
    model, tokens = made(name), prompts(17)[0]
    early = Answer(lambda ids, scores: torch.full((len(ids),), ids.shape[1] % 4 == 0))
    options = {"max_new_tokens": 4000, "stopping_criteria": [early]}
    text, cache = after_a_call(model, tokens, **options)
    used = sum(entry.nbytes for entry in cache.entries().values())
    assert text.shape[1] == 20 and stored(cache) == used
    assert len(pickle.dumps(cache)) < used + 8000 and stored(copy.deepcopy(cache)) == used
    cache.save(tmp_path / "file")
    assert os.path.getsize(tmp_path / "file") < used + 4000
    for _ in range(2):  # a further turn makes room, and gives it back
        text = generated(model, text, draft=drafted(model, text, 17), **{CACHE_NAME: cache}, **options)
        assert stored(cache) == sum(entry.nbytes for entry in cache.entries().values())
    assert text.shape[1] == 28
    dynamic, own = DynamicCache(config=model.config), SpeculativeCache(model.config, 1, 5000)
    for given in (dynamic, own):
        generated(model, tokens, draft=drafted(model, text, 17), **{CACHE_NAME: given}, **options)
    assert stored(dynamic) <= used + 64
    assert own.max_length == 5000  # buffers that a user has made stay


def test_files_of_other_models_are_refused(made, tmp_path):
    model, path = made("llama"), tmp_path / "cache.safetensors"
    after_a_call(model, prompts(9)[0])[1].save(path)
    other = copy.deepcopy(model.config)
    other._name_or_path, other.pad_token_id, other.use_cache = "elsewhere", 3, False
    SpeculativeCache.load(path, other)
    other.rope_parameters = dict(other.rope_parameters) | {"rope_theta": 17.0}
    with pytest.raises(ValueError, match=r"another config: its fingerprint is .* or read the text again"):
        SpeculativeCache.load(path, other)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="holds no cache"):
        SpeculativeCache.load(path, model.config)


CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=60),
    "own": lambda model: SpeculativeCache(model.config, 3, 40),
}


@pytest.mark.parametrize(("name", "cache"), [*zip(KINDS, ("own", "static", "dynamic", "own"), strict=True)])
def test_new_tokens_alone(made, name, cache):
    """Beside a filled cache, with the mask of the whole text; also scores, stream and processors are those of stock."""
    model, document, questions = made(name), prompts(17)[0].expand(3, -1), prompts(5, 5, 5, seed=3)[0]
    mask = torch.ones(3, 22, dtype=torch.long)
    options = {"return_dict_in_generate": True, "output_scores": True, "repetition_penalty": 1.3}
    results, streams, caches = [], [], []
    for kind in ("dynamic", cache):
        held = CACHES[kind](model)
        with torch.no_grad():
            model(document, **{CACHE_NAME: held})
        draft = drafted(model, results[0].sequences, 5) if results else None
        streams.append(Recorder())
        options |= {CACHE_NAME: held, "streamer": streams[-1]}
        results.append(generated(model, questions, mask, draft, **options))
        caches.append(held)
    stock, own = results
    assert own.sequences.shape == (3, 5 + NEW) and own.sequences.tolist() == stock.sequences.tolist()
    for one, other in zip(own.scores, stock.scores, strict=True):
        torch.testing.assert_close(one, other, **rounding(other, model.config.num_hidden_layers))
    assert streams[0].puts == streams[1].puts
    assert {int(held.get_seq_length()) for held in caches} == {17 + 5 + NEW - 1}


@pytest.mark.parametrize(("name", "kind"), [("llama", "own"), ("llama", "dynamic"), ("gemma3", "own")])
def test_one_read_and_a_batch_of_questions(made, name, kind):
    """With padding between the document and the questions. Where windows or a cache count it, without the draft."""
    model, document = made(name), prompts(17)[0]
    questions, of_questions = prompts(4, 7, 2, seed=3)
    mask = torch.cat([torch.ones(3, 17, dtype=torch.long), of_questions], 1)
    _, read = after_a_call(model, document, max_new_tokens=1)
    held = [DynamicCache(iter(read)), read if kind == "own" else DynamicCache(iter(read))]
    for cache in held:
        cache.batch_repeat_interleave(3)
    stock = generated(model, questions, mask, **{CACHE_NAME: held[0]})
    draft = drafted(model, stock, 7)
    draft.generation_config.on_unsupported = "plain"
    got = generated(model, questions, mask, draft, **{CACHE_NAME: held[1]})
    assert got.tolist() == stock.tolist()
    assert (draft.last_speculation.reason is None) == (name == "llama" and kind == "own")
    if name == "llama":  # windows count the padding
        for row, keep in zip(range(3), of_questions.bool(), strict=True):
            alone = torch.cat([document[0], questions[row][keep]])[None]
            assert got[row, 7:].tolist() == generated(model, alone)[0, alone.shape[1] :].tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_new_tokens_with_positions(made, name):
    """Those of the new tokens, or of the whole text, as plain `generate` takes them; others are refused by name."""
    model, document, (question, pads) = made(name), prompts(17)[0], prompts(5, 3, seed=3)
    mask = torch.cat([torch.ones(2, 17, dtype=torch.long), pads], 1)
    counted = (mask.cumsum(1) - 1).clamp_min(0)
    for rows, positions in ((1, counted[:1, 17:]), (1, counted[:1]), (2, counted[:, 17:])):
        texts = []
        for draft in (None, PlainDraftModel.from_target(model)):
            held = DynamicCache(config=model.config)
            with torch.no_grad():
                model(document.expand(rows, -1), **{CACHE_NAME: held})
            options = {CACHE_NAME: held, "position_ids": positions}
            texts.append(generated(model, question[:rows], mask[:rows], draft, **options).tolist())
        reason = draft.last_speculation.reason
        assert texts[0] == texts[1] and (reason is None if rows == 1 else "zeros between tokens" in reason)
    options = {CACHE_NAME: after_a_call(model, document, max_new_tokens=1)[1], "position_ids": counted[:1, :5]}
    with pytest.raises(ValueError, match=r"position_ids of shape \(1, 5\) do not .* shape \(1, 5\), from 17. Drop"):
        generated(model, question[:1], mask[:1], draft, **options)
    for more in ({}, {"attention_mask": mask[:1, :5]}):  # plain generate fails at a shape of 0 elements
        options = {CACHE_NAME: options[CACHE_NAME], "assistant_model": draft, "max_new_tokens": NEW, "pad_token_id": 0}
        with pytest.raises(ValueError, match=r"holds 17 tokens, and input_ids has 5\. .* attention_mask of the whole"):
            model.generate(question[:1], **options, **more)


@pytest.mark.parametrize("name", few([*KINDS, "llama4_text"], 3))
@pytest.mark.parametrize("lengths", [(21,), (14, 21)], ids=str)
def test_a_static_cache_is_filled(made, name, lengths):
    """Over two turns, past the windows: entries of stock, in the tensors that it had; stock goes on with it."""
    if name == "llama4_text" and CACHE_NAME == "past_key_values":
        pytest.skip("before transformers 5.24, Llama 4 makes no masks for a StaticCache")
    model = made(name)
    text, mask = prompts(*lengths)
    stock, own = (StaticCache(config=model.config, max_cache_len=64) for _ in range(2))
    places = set()
    for turn in range(2):
        expected = generated(model, text, mask, **{CACHE_NAME: stock})
        draft = drafted(model, expected, text.shape[1])
        assert generated(model, text, mask, draft, **{CACHE_NAME: own}).tolist() == expected.tolist()
        assert draft.last_speculation.num_accepted_draft_tokens > 0
        assert int(own.get_seq_length()) == int(stock.get_seq_length())
        layers = [layer for layer in own.layers if getattr(layer, "keys", None) is not None]
        places.add(tuple(layer.keys.data_ptr() for layer in layers))
        if mask.all():
            check_entries(model, own, stock)
        text = torch.cat([expected, prompts(*[4] * len(lengths), seed=turn + 2)[0]], 1)
        mask = torch.cat([mask, torch.ones(len(mask), text.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)
    assert len(places) == 1
    texts = [generated(model, text, mask, **{CACHE_NAME: cache}).tolist() for cache in (stock, own)]
    assert texts[0] == texts[1]


def check_entries(model, own, stock):
    for layer, other in zip(own.layers, stock.layers, strict=True):
        for name in ("keys", "values"):
            if (entries := getattr(other, name, None)) is not None:
                torch.testing.assert_close(
                    getattr(layer, name), entries, **rounding(entries, model.config.num_hidden_layers)
                )
        for name in ("conv_states", "recurrent_states"):
            if (states := getattr(other, name, {0: None})[0]) is not None:
                gap = 1e-4 * states.abs().max().item()  # of float32 sums in another order, over 50 tokens
                torch.testing.assert_close(getattr(layer, name)[0], states, rtol=0, atol=gap)


def test_a_static_cache_with_indexers_is_not_taken(made):
    """They choose among as many keys as it has slots: the text of stock is another one, too."""
    model, tokens = made("deepseek_v32"), prompts(14)[0]
    caches = [StaticCache(config=model.config, max_cache_len=64) for _ in range(2)]
    draft = NgramDraftModel.from_target(model)
    texts = [
        generated(model, tokens, draft=one, **{CACHE_NAME: cache})
        for one, cache in zip((None, draft), caches, strict=True)
    ]
    assert torch.equal(*texts) and "layers of the kind StaticIndexedLayer" in draft.last_speculation.reason


@pytest.mark.parametrize("chat", [False, True])
def test_rows_that_have_ended_go_along_in_plain_steps(target, monkeypatch, chat):
    """Rows stay equally long, so that they are read at once, and the cache that is returned holds the texts alone."""
    model = target("llama")
    tokens, mask = prompts(7, 7, 7, 7)
    free = generated(model, tokens)
    end = free[1, 9].item()
    draft = PlainDraftModel.from_target(model, gate=False)
    shared, commit = [], SpeculativeCache.commit

    def watched(self, *args):
        commit(self, *args)
        shared.append(self.lengths.shared is not None)

    monkeypatch.setattr(SpeculativeCache, "commit", watched)
    how = {"eos_token_id": end, "return_dict_in_generate": True}
    if chat:
        how[CACHE_NAME] = SpeculativeCache(model.config, 4, 40)
    out = generated(model, tokens, mask, draft, **how)
    expected = generated(model, tokens, mask, eos_token_id=end)
    assert torch.equal(out.sequences, expected)
    lengths = [7 + [*row[7:].tolist(), end].index(end) for row in expected]
    assert len(set(lengths)) > 1 and all(shared)
    assert list(out[CACHE_NAME].lengths.host) == [min(length, 6 + NEW) for length in lengths]
