"""Targets that are verified by a mask over prefix and nodes: the text of `generate`, and the keys of single steps."""

import copy
from functools import cache

import pytest
import torch
from transformers import DynamicCache

from hf_longspec import AssistantDraftModel, NgramDraftModel, SpecAttnDraftModel, SpeculativeCache, TokenSwiftDraftModel
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.generation.draft_tree import DraftTree
from hf_longspec.generation.special_cases.masked import MASKED, IndexerChoices, PlainForwards
from hf_longspec.generation.target import TargetView
from tests.generation.drafted_calls import (
    MODES,
    NEW,
    ONE,
    RAGGED,
    arguments,
    check_a_commit,
    check_a_returned_cache,
    check_text,
    drafted,
    generated,
)
from tests.pairwise import few, pairwise
from tests.robustness import enumeration
from tests.robustness.drafts import PARTIAL
from tests.robustness.enumeration import build
from tests.tiny_targets import tiny_target

# One type for each kind of mask: indexers, some of them shared, beside windows; chunks; no `AttentionInterface`.
TYPES = ("deepseek_v32", "glm_moe_dsa", "dots3_note_text", "llama4_text", "gpt_neox_japanese", "falcon")
TYPES = tuple(name for name in TYPES if name in enumeration.TYPES)  # dots3_note_text is newer than transformers 5.17
# transformers 5.17, under which megatron-bert and git do not follow a mask over prefix and nodes, and are refused.
OLDER = pytest.mark.skipif(
    "dots3_note_text" not in enumeration.TYPES, reason="refused by the trial on transformers 5.17"
)


@pytest.fixture(scope="module")
def made():
    @cache
    def make(name, implementation=None, **overrides):
        model = build(name, **overrides)
        if implementation is not None:
            model.set_attn_implementation(implementation)
        return model

    return make


@pytest.mark.parametrize(
    ("name", "chain", "lengths", "mode"), few(pairwise(TYPES, (True, False), (ONE, RAGGED), MODES), 7), ids=str
)
def test_text_of_rows_that_accept_different_numbers(made, name, chain, lengths, mode):
    model = made(name)
    assert TargetView(model).mode is MASKED
    check_text(model, lengths, chain, **mode)


@pytest.mark.parametrize("name", ["deepseek_v32", "llama4_text"])
def test_prompts_in_chunks_and_masks_that_are_added_to_the_scores(made, name):
    check_text(made(name, "eager"), RAGGED, prefill_chunk_size=7)


def test_a_choice_that_begins_in_the_middle_of_the_text(made):
    """The indexer takes all keys of the prompts and of the trial, and not all keys of the text."""
    check_text(made("deepseek_v32", index_topk=44), (37, 23))


def test_keys_after_a_commit_are_those_of_single_steps(made):
    check_a_commit(made("deepseek_v32"))


@pytest.mark.parametrize(("name", "kind"), [("deepseek_v32", "dynamic"), ("gpt_neox_japanese", "speculative")])
def test_a_returned_cache_continues(made, name, kind):
    check_a_returned_cache(made(name), kind)


@pytest.mark.parametrize(("name", "kind"), [("deepseek_v32", "speculative"), ("llama4_text", "dynamic")])
def test_a_second_turn_of_padded_rows(made, name, kind):
    model, inputs = made(name), arguments(RAGGED, do_sample=False)
    whole = generated(model, **inputs | {"max_new_tokens": 2 * NEW})
    draft = drafted(model, False, whole, 40)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else SpeculativeCache(model.config, 3, 110)
    first = generated(model, **inputs, assistant_model=draft, **{CACHE_NAME: cache})
    draft.hints = whole[:, first.shape[1] :].tolist()
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, NEW, dtype=torch.long)], 1)
    again = inputs | {"input_ids": first, "attention_mask": mask}
    assert generated(model, **again, assistant_model=draft, **{CACHE_NAME: cache}).tolist() == whole.tolist()


class TestTies:
    def test_equal_scores_are_chosen_as_in_the_forward_of_plain_generate(self):
        """Of two rows, one with padding, whose nodes are a tree; the reference ranks the padded row of each node."""
        lengths, lags, size, count = (30, 26), (0, 4), 33, 5
        parents = torch.tensor([[-1, 0, 1, 0, 3]]).expand(2, -1)
        tree = DraftTree(torch.zeros(2, 5, dtype=torch.long), parents, torch.ones(2, 5, dtype=torch.bool))
        positions = torch.tensor(lengths)[:, None] + tree.depths
        scores = torch.randint(0, 3, (2, 5, 35), generator=torch.Generator().manual_seed(0)).float()
        orders = []
        for row, length in enumerate(lengths):
            slots = torch.arange(35) - length
            is_seen = (slots < 0) | (tree.mask[row][:, slots.clamp(0, 4)] & (slots >= 0) & (slots < 5))
            scores[row].masked_fill_(~is_seen, -torch.inf)
            orders.append([seen.nonzero().flatten() for seen in is_seen])
        for prompt in (0, size):
            plain = PlainForwards(lags, 0, prompt, max(prompt, 1))
            with IndexerChoices(positions, 35, plain):
                found = scores.topk(count, dim=-1).indices
            as_it_is, differs = scores.topk(count, dim=-1).indices, 0
            for row, lag in enumerate(lags):
                for node, order in enumerate(orders[row]):
                    column = int(positions[row, node]) + lag
                    whole = torch.full((1, 1, prompt if column < prompt else column + 1), -torch.inf)
                    whole[0, 0, lag : lag + len(order)] = scores[row, node, order]
                    expected = order[whole.topk(count, dim=-1).indices[0, 0] - lag]
                    assert set(found[row, node].tolist()) == set(expected.tolist())
                    differs += set(as_it_is[row, node].tolist()) != set(expected.tolist())
            assert differs  # what the reference chooses depends on the layout


def test_positions_counted_by_the_cache(made):
    """Llama 4 scales queries by positions that it counts itself, from `floor_scale` on: one row, or rows below it."""
    check_text(made("llama4_text", floor_scale=16), ONE)
    check_text(made("llama4_text", floor_scale=40 + NEW), RAGGED)
    with pytest.raises(ValueError, match=r"max_length=49: from 48 tokens on \(floor_scale\)"):
        check_text(made("llama4_text", floor_scale=39 + NEW), RAGGED)


class TestRefusals:
    @pytest.mark.parametrize(
        "make",
        [
            SpecAttnDraftModel.from_target,
            lambda target: TokenSwiftDraftModel.from_target(target, num_heads=2, **PARTIAL),
            lambda target: AssistantDraftModel.from_model(target, tiny_target("llama")),
        ],
    )
    def test_drafts_that_run_the_target_themselves(self, made, make):
        with pytest.raises(
            ValueError, match="does not draft with FalconForCausalLM, whose nodes are verified by masks"
        ):
            make(made("falcon"))

    @OLDER
    def test_inputs_beside_the_tokens(self, made):
        model, inputs = made("megatron-bert"), arguments((9,), do_sample=False)
        types = torch.zeros_like(inputs["input_ids"])
        draft = NgramDraftModel.from_target(model, on_unsupported="error")
        with pytest.raises(ValueError, match="token_type_ids: inputs beside the tokens are not supported"):
            generated(model, **inputs, token_type_ids=types, assistant_model=draft)

    @OLDER
    def test_text_that_depends_on_padding(self, made):
        model = made("git")
        check_text(model, ONE)
        with pytest.raises(ValueError, match=r"attention_mask has padding.*plain generate counts the padding"):
            check_text(model, RAGGED)


def test_a_model_that_ignores_its_mask_is_refused(made):
    model = copy.deepcopy(made("falcon"))

    class Unmasked(type(model.transformer)):
        def forward(self, *args, attention_mask=None, **more):
            return super().forward(*args, **more)

    model.transformer.__class__ = Unmasked
    with pytest.raises(ValueError, match="does not follow a mask over prefix and nodes: logits of a tree and of"):
        model.generate(**arguments((9,)), assistant_model=NgramDraftModel.from_target(model))
