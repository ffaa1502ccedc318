"""Whole calls of tiny targets with random trees, of which a part is the text: helpers of tests of kinds of targets."""

import copy

import pytest
import torch
from transformers import DynamicCache

from hf_longspec import SpeculativeCache
from tests.tiny_targets import RandomTreeDraftModel, tiny_prompts
from tests.user_objects import Bomb

NEW = 24


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


def check_a_returned_cache(model, kind):
    """It continues, also by plain `generate`; Ctrl-C before the first token leaves it as it was."""
    inputs = arguments((21,), do_sample=False)
    whole = generated(model, **inputs | {"max_new_tokens": 2 * NEW})
    draft = drafted(model, False, whole, 21)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else SpeculativeCache(model.config, 1, 90)
    first = generated(model, **inputs, assistant_model=draft, past_key_values=cache)
    assert cache.get_seq_length() == first.shape[1] - 1
    more = {"input_ids": first, "attention_mask": torch.ones_like(first)}  # the text may hold the token of padding
    more |= {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    kept = copy.deepcopy(cache)
    draft.hints = whole[:, first.shape[1] :].tolist()
    processors = [Bomb().processor()]
    with pytest.raises(KeyboardInterrupt):
        model.generate(**more, assistant_model=draft, past_key_values=cache, logits_processor=processors)
    for continued in ({"assistant_model": draft, "past_key_values": cache}, {"past_key_values": kept}):
        assert generated(model, **more, **continued).tolist() == whole.tolist()
