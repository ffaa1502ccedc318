"""Drafting with another model: its trees against plain forwards of that model, its text against stock `generate`."""

import pytest
import torch

from hf_longspec import AssistantDraftModel, SpeculativeCache
from hf_longspec.generation.draft_tree import Beam
from hf_longspec.generation.drafter import Binding
from hf_longspec.generation.target import TargetView
from tests.modeling.calls import GREEDY, generate
from tests.tiny_targets import tiny_prompts, tiny_target

FEW = {"vocab_size": 12}
# Neither of them has the shapes of the other.
PAIR = {"num_hidden_layers": 2, "num_key_value_heads": 4, "hidden_size": 48}


@pytest.fixture(scope="module")
def model():
    return tiny_target("qwen3", **FEW)


@pytest.fixture(scope="module")
def small():
    return tiny_target("llama", 5, **FEW, **PAIR)


def propose(model, draft, lengths):
    """Return the tree that a new drafter proposes after random prompts, the prompts and the roots."""
    view = TargetView(model)
    cache = SpeculativeCache(model.config, len(lengths), 64, tree_slots=draft.num_tree_nodes(view))
    drafter = draft.drafter(Binding(view, cache, None, 64))
    texts = [row[keep.bool()] for row, keep in zip(*tiny_prompts(128, lengths), strict=True)]
    root = torch.tensor([7, 8, 9][: len(lengths)])
    drafter.resume(texts, None)
    return drafter.propose(root), texts, root, drafter


def plain_beam(model, tokens, positions, widths, reach):
    """The beam of one row by a plain forward for every node, over the path that leads to it."""
    beam = Beam(tokens[-1:], 1 + sum(widths))
    for depth, width in enumerate(widths):
        logits = []
        for path in beam.paths()[0]:
            ids = torch.cat([tokens, path])[None]
            where = torch.cat([positions, positions[-1] + 1 + torch.arange(depth)])[None]
            mask = torch.ones(ids.shape[1], ids.shape[1]).tril().triu(1 - reach).bool()[None, None]
            logits.append(model(ids, position_ids=where, attention_mask=mask, use_cache=False).logits[0, -1])
        beam.grow(torch.stack(logits)[None], width)
    return beam.fields()


@pytest.mark.parametrize(
    ("name", "window", "widths", "reach"),
    [
        ("llama", None, [3, 4, 2], 99),
        ("llama", 9, [3, 4, 2], 99),
        ("mistral", None, [2, 2, 2, 2, 2], 3),  # its layers see 3 tokens, fewer than a path of the tree has
    ],
)
@torch.no_grad()
def test_trees_are_those_of_plain_forwards(name, window, widths, reach):
    """Without a window over the whole text, with one over the sinks and the last tokens at their true positions."""
    own_window = {"sliding_window": reach} if name == "mistral" else {}
    model, small = tiny_target("qwen3"), tiny_target(name, 5, **PAIR, **own_window)
    draft = AssistantDraftModel.from_model(small, model, tree_widths=widths, window=window, sinks=2)
    tree, texts, roots, _ = propose(model, draft, (31, 1, 17))
    for row, (text, root) in enumerate(zip(texts, roots, strict=True)):
        positions = torch.arange(len(text) + 1)
        tokens = torch.cat([text, root[None]])
        if window is not None and len(text) > 2 + window:
            kept = torch.tensor([0, 1, *range(len(text) - 1 - window, len(text) + 1)])
            positions, tokens = positions[kept], tokens[kept]
        expected = plain_beam(small, tokens, positions, widths, reach)
        for found, field in zip(tree.fields, expected, strict=True):
            assert torch.equal(found[row], field[0])


def test_only_sinks_and_window_are_prefilled(widths):
    model, small = tiny_target("qwen3"), tiny_target("llama", 5, **PAIR)
    draft = AssistantDraftModel.from_model(small, model, window=24, num_assistant_tokens=2, prefill_chunk_size=10)
    seen = widths(small)
    generate(model, draft, (300,), max_new_tokens=9)
    first = seen.index(10)  # after the trial forwards of the check
    assert seen[first : seen.index(2, first)] == [10, 10, 8]
    assert set(seen[first + 3 :]) <= {1, 2}


@pytest.mark.parametrize("settings", [{"num_assistant_tokens": 3}, {"tree_widths": [7, 4], "window": 7}], ids=str)
def test_a_draft_catches_up_after_plain_steps(model, small, settings):
    """Texts grow without the draft for a while; it then proposes what a new drafter would propose, if it keeps all."""
    draft = AssistantDraftModel.from_model(small, model, **settings)
    view, lengths = TargetView(model), (20, 3)
    cache = SpeculativeCache(model.config, 2, 256, tree_slots=16)
    drafter = draft.make_drafter(Binding(view, cache, None, 256))
    texts = [row[keep.bool()] for row, keep in zip(*tiny_prompts(12, lengths), strict=True)]
    root = torch.tensor([7, 8])
    with torch.no_grad():
        drafter.resume(texts, None)
        drafter.propose(root)
    grown = [torch.cat([text, one[None], text.flip(0).repeat(5)]) for text, one in zip(texts, root, strict=True)]
    with torch.no_grad():
        drafter.resume(grown, None)
        again = drafter.propose(root)
    if draft.setting("window") is None:
        fresh = draft.make_drafter(Binding(view, cache, None, 256))
        with torch.no_grad():
            fresh.resume(grown, None)
            assert torch.equal(again.tokens, fresh.propose(root).tokens)
    assert drafter.cache.positions == [len(text) for text in grown]
    assert max(drafter.cache.lengths.host) <= drafter.cache.most + 1


def transformers_rounds(model, small, ids, new, length):
    """Text and target forwards of transformers' assisted generation, with a constant length and no threshold."""
    small.generation_config.num_assistant_tokens = length
    small.generation_config.num_assistant_tokens_schedule = "constant"
    small.generation_config.assistant_confidence_threshold = 0.0
    # the assistant would take generated tokens 0 for padding, and not attend to them
    small.generation_config.pad_token_id = 999
    forwards = []
    handle = model.register_forward_hook(lambda *_: forwards.append(1))
    options = GREEDY | {"max_new_tokens": new, "pad_token_id": 999, "attention_mask": torch.ones_like(ids)}
    text = model.generate(ids, assistant_model=small, **options)
    handle.remove()
    return text, len(forwards)


@pytest.mark.parametrize("length", [1, 4])
def test_tau_is_that_of_transformers_assisted_generation(length):
    """Greedy, one row, chains of a constant length: the same text in the same number of verifications."""
    model = tiny_target("qwen3", vocab_size=24)
    small = tiny_target("qwen3", vocab_size=24)  # a copy with some noise
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in small.parameters():
            weight.add_(0.08 * weight.std() * torch.randn(weight.shape, generator=generator))
    input_ids, _ = tiny_prompts(24, (37,))
    draft = AssistantDraftModel.from_model(small, model, num_assistant_tokens=length)
    ours = model.generate(input_ids, assistant_model=draft, **GREEDY | {"max_new_tokens": 61})
    stats = draft.last_speculation
    # transformers drafts before the first token of the target, and this loop after it
    stock, rounds = transformers_rounds(model, small, ours[:, :38], 60, length)
    assert torch.equal(ours, stock)
    assert stats.num_forwards == rounds
    assert 60 / (length + 1) < rounds < 60
