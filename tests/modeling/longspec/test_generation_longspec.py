"""LongSpec's drafter against the restated block, in every iteration of whole generations."""

import random
from types import SimpleNamespace

import pytest
import torch

from hf_longspec.generation.draft_tree import Beam
from hf_longspec.generation.target_modules import TargetEnds
from hf_longspec.modeling.longspec.generation_longspec import LongSpecDrafter
from hf_longspec.modeling.shared.vocabulary import part_of_head
from tests.modeling.calls import LENGTHS, NEVER, check_sampled_text, check_text, generate
from tests.modeling.longspec.restated_longspec import Restated
from tests.rounding import rounding
from tests.tiny_targets import random_longspec_draft, random_tokenswift_draft, tiny_target

# a random draft hits one token of 128; wide levels make it hit often enough that paths of several nodes are accepted
WIDE = [40, 40, 40]


def noisy_draft(model, **overrides):
    return random_longspec_draft(model, **({"window": 8, "tree_widths": WIDE} | overrides))


@pytest.fixture
def recorded(monkeypatch):
    """An entry per iteration: texts, tree, logits of each level. With `hints`, first nodes mostly are right."""

    class Recorded(list):
        hints = None

    iterations, luck = Recorded(), random.Random(0)
    propose, grow = LongSpecDrafter.propose, Beam.grow

    def recording_propose(self, root):
        sequences = self.binding.rule.sequences
        texts = [[*self.texts[row], *sequences.generated[row][:-1]] for row in range(len(root))]
        coming = [hint[len(sequences.generated[row]) :] for row, hint in enumerate(iterations.hints or [])]
        iterations.append({"texts": texts, "levels": [], "coming": coming})
        tree = propose(self, root)
        iterations[-1]["tree"] = tree
        return tree

    def recording_start(self, texts, verification):
        self.texts = [text.tolist() for text in texts]
        start(self, texts, verification)

    def recording_grow(self, logits, width, *more):
        iterations[-1]["levels"].append(logits)
        depth, ancestor_mask = len(self.levels) - 1, self.ancestor_mask
        grow(self, logits, width, *more)
        for row, coming in enumerate(iterations[-1]["coming"]):
            if depth < len(coming) and luck.random() < 0.8:
                self.tokens[row, 0] = coming[depth]
                self.parent_places[-1][row, 0] = 0
                self.parents[-1][row, 0] = self.num_nodes - self.tokens.shape[1] - ancestor_mask.shape[1]
                self.ancestor_mask[row, 0, : ancestor_mask.shape[2]] = ancestor_mask[row, 0]

    start = LongSpecDrafter.start
    monkeypatch.setattr(LongSpecDrafter, "propose", recording_propose)
    monkeypatch.setattr(LongSpecDrafter, "start", recording_start)
    monkeypatch.setattr(Beam, "grow", recording_grow)
    return iterations


@pytest.mark.parametrize("window", [None, 9])
def test_every_node_of_every_iteration_is_the_restated_block(window, plain_run, recorded):
    """Prefill, ring, kept nodes, window edges, tree attention and the gap at once; paths of full depth are accepted."""
    model = tiny_target("llama")
    run = plain_run(model, LENGTHS, max_new_tokens=14, eos_token_id=NEVER)
    draft = noisy_draft(model, qkv_bias=True, tree_widths=[5, 6, 4], cross_attention_window=window)
    recorded.hints = run.generated
    assert run.again(draft).tolist() == run.sequences.tolist()
    histogram = draft.last_speculation.acceptance_histogram
    assert histogram[0] and histogram[1] and histogram[3] > 2
    restated = Restated(draft, model)
    for step in recorded:
        tree = step["tree"]
        for row, text in enumerate(step["texts"]):
            if not step["coming"][row]:
                continue  # a finished row drafts nothing that matters
            keys = restated.target_keys(text)
            if window is not None and len(text) > 4 + window:
                keys = tuple(torch.cat([states[:, :4], states[:, -window:]], 1) for states in keys)
            first = 0
            for logits in step["levels"]:
                for place in range(0, logits.shape[1], 2):
                    path = tree.tokens[row][tree.mask[row, first + place]].tolist()
                    expected = restated.logits(text, path, keys)
                    torch.testing.assert_close(logits[row, place].double(), expected, **rounding(expected, layers=3))
                first += logits.shape[1]


@pytest.mark.parametrize("options", [{"kv_layer": 0}, {"cross_attention": False}], ids=str)
def test_the_chosen_layer_is_read(recorded, options):
    model = tiny_target("llama")
    draft = noisy_draft(model, **options)
    generate(model, draft, (19,), max_new_tokens=6)
    restated, step = Restated(draft, model), recorded[1]
    text = step["texts"][0]
    expected = restated.logits(text, [int(step["tree"].tokens[0, 0])], restated.target_keys(text))
    torch.testing.assert_close(step["levels"][0][0, 0].double(), expected, **rounding(expected, layers=3))


def test_a_reduced_vocabulary(recorded):
    """Each node's logits are those of the restated block for the chosen tokens; the text may have others."""
    model, ids = tiny_target("llama", vocab_size=31), sorted(random.Random(3).sample(range(31), 13))
    draft = noisy_draft(model, draft_vocab_size=13, tree_widths=[5, 6, 4])
    draft.set_vocabulary(ids)
    check_text(model, draft, max_new_tokens=14)
    assert draft.last_speculation.num_out_of_draft_vocabulary > 0
    restated, step = Restated(draft, model), recorded[1]
    tree, text = step["tree"], step["texts"][0]
    assert set(tree.tokens[:, 1:].flatten().tolist()) <= set(ids)
    keys, first = restated.target_keys(text), 0
    for logits in step["levels"]:
        for place in range(0, logits.shape[1], 2):
            path = tree.tokens[0][tree.mask[0, first + place]].tolist()
            expected = restated.logits(text, path, keys)[ids]
            torch.testing.assert_close(logits[0, place].double(), expected, **rounding(expected, layers=3))
        first += logits.shape[1]
    check_text(model, draft, max_new_tokens=14, do_sample=True)


def test_kept_rows_of_the_head_are_copied_again():
    """As training may have changed the head since the call that left them."""
    model, kept = tiny_target("llama", vocab_size=31), {}
    draft, states = noisy_draft(model), torch.randn(2, model.config.hidden_size)
    draft.set_vocabulary([2, 3, 5, 7, 30])
    binding = SimpleNamespace(part=lambda key, make: kept.setdefault(key, kept.get(key) or make()))
    first = part_of_head(draft, TargetEnds(model), binding)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    assert part_of_head(draft, TargetEnds(model), binding) is first
    expected = model.lm_head(states)[:, [2, 3, 5, 7, 30]]
    torch.testing.assert_close(first(states), expected, **rounding(expected, layers=1))


@pytest.mark.parametrize("kind", ["longspec", "tokenswift"])
def test_drafts_without_rows_of_tokens_may_get_another_vocabulary(tmp_path, kind):
    model = tiny_target("llama", vocab_size=31)
    draft = noisy_draft(model, tree_widths=[3, 2]) if kind == "longspec" else random_tokenswift_draft(model)
    assert "d2t" not in draft.state_dict() and draft.config.draft_vocab_size is None
    for ids in ([2, 3, 5, 7, 30], [1, 4, 6]):
        draft.set_vocabulary(ids)
        draft.save_pretrained(tmp_path)
        loaded = type(draft).from_pretrained(tmp_path, target=model)
        assert loaded.token_ids.tolist() == ids and loaded.config.draft_vocab_size == len(ids)
        check_sampled_text(model, loaded, max_new_tokens=9)
    with pytest.raises(ValueError, match="2 token ids, 1 of them distinct"):
        draft.set_vocabulary([3, 3])
