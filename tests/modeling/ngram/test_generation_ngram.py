"""N-grams as drafts: what is proposed, and what is remembered from call to call."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from hf_longspec import NgramDraftModel
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.generation.drafter import Verification
from hf_longspec.modeling.ngram.modeling_ngram import MEMORY
from hf_longspec.modeling.shared.ngrams import NgramDrafter
from tests.gates import FlippingGate
from tests.tiny_targets import tiny_prompts
from tests.valid_tree import check_tree

RAGGED = (33, 3, 13)


def drafter_of(batch_size, **settings):
    """A drafter without a target: it needs to know how many rows there are, and how long they can get."""
    target = SimpleNamespace(run=lambda function, holder, *inputs, **settings: function(*inputs, **settings))
    binding = SimpleNamespace(target=target, cache=SimpleNamespace(batch_size=batch_size), max_length=500)
    names = {"num_tokens": 3, "candidates": 2, "size": 3, "source": "both", "preload": True} | settings
    return NgramDrafter(binding, {f"ngram_{name}": value for name, value in names.items()}.__getitem__)


def begin(drafter, texts):
    """Texts whose last token is the root."""
    committed = [torch.tensor(text[:-1]) for text in texts]
    drafter.start(
        committed, Verification(torch.zeros(1, 1), SeqLens([1]), SeqLens((0,)), tokens=[text[-1:] for text in texts])
    )
    return drafter.propose(torch.tensor([text[-1] for text in texts]))


def paths(tree, row=0):
    """Every path of a row down to a node without children."""
    inner = set(tree.parents[row][tree.valid[row]].tolist())
    leaves = [node for node in range(1, tree.num_nodes) if tree.valid[row, node] and node not in inner]
    return [tree.tokens[row][tree.mask[row, leaf]].tolist()[1:] for leaf in leaves]


class TestProposals:
    TEXT = [7, 1, 2, 3, 4, 5, 7, 1, 2, 9, 4, 6, 8, 1, 2, 9, 5, 6, 7, 1, 2]

    def test_a_text_worked_out_by_hand(self):
        """(7, 1, 2) was followed by 3, then by 9; both once, and the later one is better."""
        tree = begin(drafter_of(1), [self.TEXT])
        check_tree(tree)
        assert tree.num_nodes == 7 and paths(tree) == [[9, 4, 6], [3, 4, 5]]
        assert tree.tokens[0, 0] == 2

    def test_sources_differ_where_counts_and_suffixes_do(self):
        text = [6, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2, 4, 6, 1, 2]
        # keys of 2 tokens: 4 followed twice, but only 3 came after (6, 1, 2)
        found = {
            source: paths(begin(drafter_of(1, num_tokens=1, size=2, source=source), [text]))
            for source in ("pool", "lookup", "both")
        }
        assert found == {"pool": [[4], [3]], "lookup": [[3], [4]], "both": [[3], [4]]}

    def test_room_that_shared_beginnings_leave_goes_to_further_paths(self):
        text = [1, 5, 6, 1, 5, 7, 1, 5, 8, 1]
        assert paths(begin(drafter_of(1, num_tokens=2, candidates=2), [text])) == [[5, 8], [5, 7], [5, 6]]

    def test_without_preload_the_prompt_is_not_proposed(self):
        drafter = drafter_of(1, preload=False)
        assert paths(begin(drafter, [self.TEXT])) == []
        drafter.observe(Verification(torch.zeros(1, 1), SeqLens([5]), SeqLens((20,)), tokens=[[4, 8, 9, 9, 2]]))
        # the root's own continuation, which was generated; (9, 2) and (9, 9, 2) were not seen before
        assert paths(drafter.propose(torch.tensor([2]))) == [[4, 8, 9]]

    def test_starting_again_reads_only_what_is_new(self):
        drafter = drafter_of(1)
        begin(drafter, [self.TEXT])
        index = drafter.indexes[0]
        begin(drafter, [[*self.TEXT, 9, 4]])
        assert drafter.indexes[0] is index and index.text.tolist() == [*self.TEXT, 9, 4]
        begin(drafter, [[5, 5, 5]])
        assert drafter.indexes[0] is not index and drafter.indexes[0].text.tolist() == [5, 5, 5]


class TestMemory:
    @pytest.fixture
    def case(self, target, every_step_speculates):
        model = target("llama")
        input_ids, mask = tiny_prompts(model.config.vocab_size, RAGGED)
        options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
        return model, input_ids, options, model.generate(input_ids, **options)

    def test_a_second_call_drafts_what_the_first_one_generated(self, case):
        model, input_ids, options, plain = case
        draft = NgramDraftModel.from_target(model, ngram_memory=500)
        steps = []
        for _ in range(2):
            assert torch.equal(model.generate(input_ids, assistant_model=draft, **options), plain)
            steps.append(draft.last_speculation.num_spec_steps)
        assert steps[1] < steps[0] / 2, steps

    def test_documents_are_drafted_and_saved(self, case, tmp_path):
        model, input_ids, options, plain = case
        draft = NgramDraftModel.from_target(model, ngram_memory=500)
        draft.remember(plain)
        draft.save_pretrained(tmp_path)
        loaded = NgramDraftModel.from_pretrained(tmp_path, target=model, ngram_size=4)
        assert loaded.memory.index.text == draft.memory.index.text
        assert torch.equal(model.generate(input_ids, assistant_model=loaded, **options), plain)
        assert loaded.last_speculation.mean_acceptance_length > 4
        loaded.generation_config.ngram_memory = 0
        loaded.save_pretrained(tmp_path)
        assert not (tmp_path / MEMORY).exists()

    def test_the_gate_keeps_what_was_generated(self, case, monkeypatch):
        """The drafter remembers the text of steps that it did not observe."""
        model, input_ids, options, plain = case
        draft = NgramDraftModel.from_target(model, ngram_memory=500)
        monkeypatch.setattr(
            "hf_longspec.generation.special_cases.gate.gate_of", lambda drafter, *_: FlippingGate(drafter)
        )
        model.generate(input_ids, assistant_model=draft, **options)
        assert draft.last_speculation.num_plain_steps
        assert draft.memory.index.text[-21:].tolist() == [*plain[-1, -20:].tolist(), -1]

    @pytest.mark.parametrize(
        ("memory", "texts", "message"),
        [
            (0, [[1]], "ngram_memory=0"),
            (9, ["text"], "'t' in texts: expected token ids below 128, a list or tensor for each text"),
            (9, [[1], [9999]], "9999"),
        ],
    )
    def test_what_cannot_be_remembered_is_refused(self, target, memory, texts, message):
        draft = NgramDraftModel.from_target(target("llama"), ngram_memory=memory)
        with pytest.raises(ValueError, match=message):
            draft.remember(texts)
        assert not draft._memory.index.text

    @pytest.mark.parametrize("tokens", [torch.ones(3), torch.tensor([9999])])
    def test_a_damaged_file_is_refused(self, target, tmp_path, tokens):
        draft = NgramDraftModel.from_target(target("llama"), ngram_memory=9)
        draft.save_pretrained(tmp_path)
        save_file({"tokens": tokens if tokens.is_floating_point() else tokens.int()}, tmp_path / MEMORY)
        with pytest.raises(ValueError, match="token ids below"):
            NgramDraftModel.from_pretrained(tmp_path)
