"""The check of the first verification: targets whose attention is made wrong, and how often it runs."""

from typing import ClassVar

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_longspec import NgramDraftModel, PlainDraftModel
from hf_longspec.attention_backends.contexts import TreeContext
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.generation.special_case import LayerTraits
from hf_longspec.generation.special_cases import forward_check
from hf_longspec.generation.special_cases.trial import HybridMode
from hf_longspec.generation.target import TargetView
from tests.rounding import rounding
from tests.tiny_targets import TINY_TARGETS, WINDOW, tiny_prompts, tiny_target, unpacked
from tests.tiny_targets import generate as generate_text

ONE, RAGGED = (21,), (3, 33, 13)


class IgnoresPositions(LlamaForCausalLM):
    """Counts positions from the length of its cache, as models do that take no `position_ids`."""

    def forward(self, *args, position_ids=None, **kwargs):
        return super().forward(*args, **kwargs)


class SeesTheFuture(LlamaForCausalLM):
    """Its plain forwards attend to later tokens too; a verified path cannot."""

    def forward(self, *args, attention_mask=None, tree=None, **kwargs):
        if tree is not None:
            return super().forward(*args, attention_mask=attention_mask, tree=tree, **kwargs)
        tokens, cache = kwargs["input_ids"], kwargs[CACHE_NAME]
        length = cache.get_seq_length() + tokens.shape[1]
        everything = torch.zeros(tokens.shape[0], 1, tokens.shape[1], length)
        return super().forward(*args, attention_mask=everything, **kwargs)


class Counted(LlamaForCausalLM):
    """Counts its forwards."""

    forwards: ClassVar[list[int]] = []

    def forward(self, *args, **kwargs):
        self.forwards.append(kwargs["input_ids"].shape[0] * kwargs["input_ids"].shape[1])
        return super().forward(*args, **kwargs)


@pytest.fixture(autouse=True)
def nothing_was_counted():
    Counted.forwards.clear()


@pytest.fixture
def blind(monkeypatch):
    """The trial forward finds nothing, neither reasons nor windows: the check has to find mistakes by itself."""

    def nothing(self, model, config):
        return LayerTraits((None,) * config.num_hidden_layers, [], None)

    monkeypatch.setattr(HybridMode, "trial", nothing)


def as_class(kind, name="llama", **overrides):
    """The weights of a tiny target in a model of another class."""
    target = tiny_target(name, **overrides)
    model = kind(target.config).eval().to(target.dtype)
    model.load_state_dict(target.state_dict())
    return model


def generate(model, lengths=ONE, draft=None, **options):
    return generate_text(model, draft or NgramDraftModel.from_target(model), lengths, **options)


def gap_of(model, lengths, monkeypatch):
    """Largest gap between logits in the check, over their standard deviation."""
    found = []
    monkeypatch.setattr(
        forward_check,
        "_compare",
        lambda target, verified, plain, *_: found.append((verified - plain).abs().max().item() / plain.std().item()),
    )
    generate(model, lengths)
    return found[0]


@pytest.mark.parametrize("name", TINY_TARGETS)
def test_every_target_passes_by_far(name, monkeypatch):
    assert gap_of(tiny_target(name), RAGGED, monkeypatch) < forward_check.TOLERANCE / 10


def test_it_runs_after_the_longest_prefix(monkeypatch):
    """Against one forward without a cache over that row."""
    model, found = tiny_target("gemma3"), []
    monkeypatch.setattr(forward_check, "_compare", lambda target, verified, plain, *_: found.append(plain))
    generate(model, RAGGED)
    input_ids, attention_mask = tiny_prompts(128, RAGGED)
    longest = attention_mask.sum(1).argmax()
    row = input_ids[longest]
    with torch.no_grad():
        whole = model(torch.cat([row[:-1], row[-4:]])[None]).logits[:, -4:]
    torch.testing.assert_close(found[0], whole.expand(2, -1, -1), **rounding(whole, model.config.num_hidden_layers))


@pytest.mark.parametrize(("kind", "lengths"), [(IgnoresPositions, ONE), (SeesTheFuture, RAGGED)])
def test_wrong_models_are_refused(kind, lengths, blind):
    model = as_class(kind)
    for _ in range(2):  # a refusal is not forgotten
        with pytest.raises(ValueError, match=rf"{kind.__name__} cannot be verified: .* by up to \d.* 0\.0\d+"):
            generate(model, lengths)


def test_flags_of_weights_that_were_unpacked_make_nothing_right(blind):
    with pytest.raises(ValueError, match="IgnoresPositions cannot be verified"):
        generate(unpacked(as_class(IgnoresPositions)))


@pytest.mark.parametrize(("name", "lengths"), [("mistral", ONE), ("gemma3", RAGGED)])
def test_a_lost_window_is_refused(name, lengths, blind):
    """Plain forwards have the window in their masks, and a verified tree has no such mask."""
    with pytest.raises(ValueError, match="cannot be verified"):
        generate(tiny_target(name), lengths)
    generate(tiny_target(name, sliding_window=4 * WINDOW), lengths)  # the prompts do not fill it


@pytest.mark.parametrize(("name", "part"), [("gemma2", "softcap"), ("gpt_oss", "sinks")])
def test_lost_parts_of_the_attention_are_refused(name, part, monkeypatch):
    attend = TreeContext.attend
    monkeypatch.setattr(TreeContext, "attend", lambda *args, **options: attend(*args, **(options | {part: None})))
    with pytest.raises(ValueError, match="cannot be verified"):
        generate(tiny_target(name), RAGGED)


class SingleTokens(LlamaForCausalLM):
    """Treats forwards of one token otherwise, by 1 %."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if out.logits.shape[1] == 1 and kwargs["input_ids"].shape[1] == 1:
            out.logits[..., ::2] *= 1.01
        return out


def test_forwards_of_one_token_are_compared():
    with pytest.raises(ValueError, match="treat forwards of one token otherwise"):
        generate(as_class(SingleTokens))


class Sensitive(LlamaForCausalLM):
    """Rounding in its embeddings changes its logits much."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits += 0.3 * (out.logits * 3e3).sin()
        return out


def test_rounding_of_the_target_is_measured(monkeypatch):
    """A larger difference is no reason to refuse if noise in the last places of the embeddings has as large ones."""
    with monkeypatch.context() as patch:
        assert gap_of(as_class(Sensitive), RAGGED, patch) > forward_check.TOLERANCE
    generate(as_class(Sensitive), RAGGED)
    monkeypatch.setattr(forward_check, "MOST_TIMES", 0)
    with pytest.raises(ValueError, match="cannot be verified"):
        generate(as_class(Sensitive), RAGGED)


class MasksTokens(LlamaForCausalLM):
    """Some tokens of its vocabulary are never emitted."""

    value = -torch.inf

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits[..., 5:9] = self.value
        return out


class Broken(MasksTokens):
    value = torch.nan


@pytest.mark.parametrize("kind", [MasksTokens, Broken])
def test_logits_that_are_no_numbers_are_compared(kind):
    """The text is that of stock `generate`, also where that is not sensible."""
    model = as_class(kind)
    assert torch.equal(generate(model, RAGGED), generate_text(model, None, RAGGED))
    forward_check._compare(TargetView(model), torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]))
    with pytest.raises(ValueError, match="cannot be verified"):
        forward_check._compare(TargetView(model), torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]))


class TestHowOften:
    @pytest.mark.parametrize(
        ("draft", "sizes"), [(PlainDraftModel, [3, 3, 9, 6]), (NgramDraftModel, [3] * 4 + [21, 12])]
    )
    def test_once_per_model_at_the_cost_of_a_few_small_forwards(self, draft, sizes):
        model = as_class(Counted)
        draft = draft.from_target(model, gate=False)  # a second call would begin with other steps
        assert TargetView(model).why_not() == []  # the trial has forwards of its own
        Counted.forwards.clear()
        generate(model, RAGGED, draft)
        first = list(Counted.forwards)
        Counted.forwards.clear()
        generate(model, RAGGED, draft)
        assert first[0] == Counted.forwards[0] == 3 * 32  # the prefill
        # three rows: as many tokens as fit into trees, one by one and together, and a tree with two branches
        count = len(sizes)
        assert first[1 : 1 + count] == sizes and first[1 + count :] == Counted.forwards[1:]

    def test_it_can_be_switched_off(self, blind):
        model = as_class(Counted)
        draft = NgramDraftModel.from_target(model, check_target=False)
        generate(model, draft=draft)
        assert 7 not in Counted.forwards
        generate(as_class(IgnoresPositions), draft=NgramDraftModel.from_target(model, check_target=False))


@pytest.mark.parametrize(("lengths", "new"), [((1,), 9), ((2,), 1), ((5, 1), 2)], ids=str)
def test_there_is_room_for_it(lengths, new):
    """Short prompts and short texts: the tree shrinks to what fits."""
    model = tiny_target("gemma3")
    text = generate_text(model, None, lengths, max_new_tokens=new)
    for draft in (PlainDraftModel, NgramDraftModel):
        TargetView(model).known.checked.clear()
        assert torch.equal(generate(model, lengths, draft.from_target(model), max_new_tokens=new), text)
        assert len(TargetView(model).known.checked) == 1


def test_half_precision_warns_once(monkeypatch, blind):
    told = []
    monkeypatch.setattr(forward_check.logger, "warning", lambda *message: told.append(message))
    generate(tiny_target("llama", dtype=torch.bfloat16))
    assert not told
    model = as_class(IgnoresPositions, dtype=torch.bfloat16)
    generate(model)
    generate(model)
    assert len(told) == 1 and told[0][1] == "IgnoresPositions" and "float32" in told[0][0]
