"""Whole calls of tiny targets with random trees, of which a part is the text: helpers of tests of kinds of targets."""

import copy

import pytest
import torch
from transformers import DynamicCache

from hf_longspec import PlainDraftModel, SpeculativeCache
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.generation.draft_tree import DraftTree
from hf_longspec.generation.target import TargetView
from tests.rounding import rounding
from tests.tiny_targets import RandomTreeDraftModel, tiny_prompts
from tests.user_objects import Bomb

NEW = 9
ONE, RAGGED = (37,), (23, 3, 40)
# Stock `generate` is greedy; sampled text is compared with that of the loop without a draft.
MODES = ({"do_sample": False}, {"do_sample": True, "temperature": 0.7})
# Of float32 sums in another order, relative to the largest entry of a state.
STATE_GAP = 1e-5


def arguments(lengths, **options):
    input_ids, mask = tiny_prompts(127, lengths)
    return {"input_ids": input_ids, "attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0} | options


def drafted(model, chain, text, width):
    draft = RandomTreeDraftModel.from_target(model)
    draft.hints, draft.chain = text[:, width:].tolist(), chain
    draft.generation_config.gate, draft.generation_config.on_unsupported = False, "error"
    return draft


def generated(model, seed=5, **options):
    torch.manual_seed(seed)
    return model.generate(**options)


def check_text(model, lengths, chain=False, **options):
    inputs = arguments(lengths, **(MODES[0] | options))
    plain = PlainDraftModel.from_target(model) if inputs["do_sample"] else None
    text = generated(model, **inputs, assistant_model=plain)
    draft = drafted(model, chain, text, max(lengths))
    assert generated(model, **inputs, assistant_model=draft).tolist() == text.tolist()
    stats = draft.last_speculation
    # nodes were accepted, and others were not
    assert 1 < stats.num_emitted_tokens / stats.num_spec_steps < draft.num_nodes


@torch.no_grad()
def check_a_commit(model):
    """Keys and states are those of single steps. Rows of a branching tree keep paths of 4, 3 and 0 nodes."""
    target, length, counts = TargetView(model), 11, [4, 3, 0]
    generator = torch.Generator().manual_seed(1)
    prompt, nodes = (torch.randint(3, 127, (3, size), generator=generator) for size in (length, 6))
    parents, path = torch.tensor([[-1, 0, 0, 1, 2, 4]]), torch.tensor([[0, 2, 4, 5], [0, 1, 3, 0], [0, 0, 0, 0]])
    tree = DraftTree(nodes, parents.expand(3, -1), torch.ones_like(nodes, dtype=torch.bool))
    cache = SpeculativeCache(model.config, 3, 40, tree_slots=8)
    with target.attention():
        target.prefill(prompt, cache, None)
        cache.set_lengths([length] * 3)
        before = [layer.keys[:, :, :length].clone() for layer in cache.key_layers]
        target.verify(tree, cache)
        cache.rollback()
        for layer, keys in zip(cache.key_layers, before, strict=True):
            assert torch.equal(layer.keys[:, :, :length], keys)
        target.verify(tree, cache)
        cache.commit(path, counts)
    for row, count in enumerate(counts):
        alone = SpeculativeCache(model.config, 1, 40, tree_slots=8)
        model(input_ids=prompt[row : row + 1], **{CACHE_NAME: alone}, use_cache=True)
        for place, node in enumerate(path[row, :count], start=length):
            where = {"position_ids": torch.tensor([[place]])}  # which bamba does not count on from the cache
            model(input_ids=nodes[row, node].view(1, 1), **where, **{CACHE_NAME: alone}, use_cache=True)
        for layer, single in zip(cache.key_layers, alone.key_layers, strict=True):
            found, expected = (x[:, :, : length + count] for x in (layer.keys[row : row + 1], single.keys))
            torch.testing.assert_close(found, expected, **rounding(expected, len(cache.layers)))
        states = ([layer for layer in one.layers if hasattr(layer, "copied")] for one in (cache, alone))
        for layer, single in zip(*states, strict=True):
            found, expected = layer.copied(row), single.copied()
            for name, state in expected.items():
                assert (found[name] is None) == (state is None)
                if state is not None:
                    gap = STATE_GAP * state.abs().max().item()
                    torch.testing.assert_close(found[name], state, rtol=0, atol=gap)


def check_a_returned_cache(model, kind):
    """It continues, also by plain `generate`; Ctrl-C before the first token leaves it as it was."""
    inputs = arguments((21,), do_sample=False)
    whole = generated(model, **inputs | {"max_new_tokens": 2 * NEW})
    draft = drafted(model, False, whole, 21)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else SpeculativeCache(model.config, 1, 90)
    first = generated(model, **inputs, assistant_model=draft, **{CACHE_NAME: cache})
    assert cache.get_seq_length() == first.shape[1] - 1
    more = {"input_ids": first, "attention_mask": torch.ones_like(first)}  # the text may hold the token of padding
    more |= {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    kept = copy.deepcopy(cache)
    draft.hints = whole[:, first.shape[1] :].tolist()
    processors = [Bomb().processor()]
    with pytest.raises(KeyboardInterrupt):
        model.generate(**more, assistant_model=draft, **{CACHE_NAME: cache}, logits_processor=processors)
    for continued in ({"assistant_model": draft, CACHE_NAME: cache}, {CACHE_NAME: kept}):
        assert generated(model, **more, **continued).tolist() == whole.tolist()


def after_an_error(model, draft, inputs, whole, cache, error):
    """Return the text after a call that ends in the middle of `whole`, which a second call continues on its cache.

    Ctrl-C keeps the text so far and its states, and an error the states before the call.
    """

    def is_armed():
        return bool(draft.last_speculation and draft.last_speculation.num_emitted_tokens > 4)

    text, call = inputs["input_ids"], {"assistant_model": draft, CACHE_NAME: cache}
    with pytest.raises(error):
        generated(model, **inputs, **call, logits_processor=[Bomb(error=error, armed=is_armed).processor()])
    if error is KeyboardInterrupt:
        text = draft.last_speculation.partial_sequences
        assert inputs["input_ids"].shape[1] + 4 < text.shape[1] < whole.shape[1]
    assert cache.get_seq_length() == (text.shape[1] - 1 if error is KeyboardInterrupt else 0)
    draft.hints = whole[:, text.shape[1] :].tolist()
    more = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    return generated(model, **inputs | more | {"max_new_tokens": whole.shape[1] - text.shape[1]}, **call)
