"""EAGLE-3's drafter: the levels of the authors' code, the logits of a forward over the whole text, windows."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_longspec import Eagle3DraftModel, SpeculativeCache
from hf_longspec.generation.drafter import Binding
from hf_longspec.generation.target import TargetView
from hf_longspec.generation.target_modules import LayerInputs
from hf_longspec.modeling.eagle3.generation_eagle3 import Eagle3Drafter
from hf_longspec.modeling.shared import aux_hidden_states
from hf_longspec.modeling.shared.aux_drafter import PromptAuxHiddenStates
from tests.modeling.calls import LENGTHS, generate
from tests.modeling.eagle3.residual_stream import residual_stream
from tests.pairwise import few
from tests.rounding import rounding
from tests.tiny_targets import random_eagle3_draft, tiny_prompts, tiny_target
from tests.watching import after

FIXTURES = Path(__file__).with_name("fixtures")
CYCLES = ((0, 9), (9, 13))


def draft_for(model, **settings):
    return random_eagle3_draft(model, **({"tree_widths": [4, 4, 3], "gate": False} | settings))


@pytest.fixture
def levels(monkeypatch):
    """Return a list that gets, for each level of each draft, the position of the last entry, tokens and logits."""
    found = []

    def first(result, own, aux, tokens, positions, last):
        found.append([(positions.gather(1, last)[:, 0].tolist(), None, None, result[0])])

    def following(result, own, nodes):
        found[-1].append((found[-1][0][0], nodes.tokens, nodes.ancestor_mask, result[0]))

    after(monkeypatch, Eagle3Drafter, "first_level", first)
    after(monkeypatch, Eagle3Drafter, "next_level", following)
    return found


@pytest.mark.parametrize("name", ["original_no_theta", "original_theta_5000"])
def test_levels_of_the_authors_code(levels, name):
    """A prompt, and entries appended to it, as after a verification."""
    expected = load_file(FIXTURES / name / "expected.safetensors")
    model = tiny_target("llama", vocab_size=97, hidden_size=32)
    draft = Eagle3DraftModel.from_pretrained(FIXTURES / name, target=model, tree_widths=[3, 3, 3], window=None)
    binding = Binding(TargetView(model), SpeculativeCache(model.config, 1, 64, tree_slots=10), None, 64)
    drafter, aux, ids = draft.drafter(binding), expected["taps"][None], expected["ids"][None]
    for cycle, (first, end) in enumerate(CYCLES):
        entries, tokens = slice(first, end - 1), slice(first + 1, end)
        with torch.no_grad():
            drafter.remember(aux[:, entries], ids[:, tokens], torch.arange(first, end - 1)[None])
            newest = aux[:, end - 1 : end], ids[:, end : end + 1], torch.tensor([[end - 1]]), torch.tensor([[0]])
            drafter.grow((ids[:, end], *newest))
        found = [logits[0] for *_, logits in levels[-1]]
        for level, logits in enumerate(found):
            original = expected[f"cycle_{cycle}_level_{level}"]
            torch.testing.assert_close(logits, original, **rounding(original, layers=1 + level))


def check_levels(levels, draft, model, texts, window=None, sinks=0, shown=lambda row, p: True):
    """Every level is that of a forward over the text up to the root and one path of the tree, with hidden_states."""
    compared, deepest = 0, 0
    below, own_layers = model.config.num_hidden_layers, draft.config.num_hidden_layers
    for row, text in enumerate(texts):
        states, _ = residual_stream(model, text[None])
        aux = torch.cat([states[layer] for layer in draft.layers_of(model.config)], -1)
        before = None
        for steps in levels:
            last = steps[0][0][row]
            if last >= len(text) - 2 or last == before:  # the row has ended, and others go on
                continue
            before = last
            drafted = text[1 : last + 2]
            with torch.no_grad():
                own = draft(aux[:, : last + 1], drafted[None], 1, target=model, window=window, sinks=sinks)[0][0, -1]
            torch.testing.assert_close(steps[0][3][row, 0], own, **rounding(own, below + own_layers))
            tokens = torch.cat([drafted[last : last + 1], *(level[1][row] for level in steps[1:])])
            for depth, (_, _, ancestor_mask, logits) in enumerate(steps[1:], start=1):
                for node in range(ancestor_mask.shape[1]):
                    # without the root, whose entry is in the text
                    path = ancestor_mask[row, node].nonzero().flatten()[1:]
                    ids = torch.cat([drafted, tokens[path]])[None]
                    padded = torch.cat([aux[:, : last + 1], aux[:, :1].expand(-1, depth, -1)], 1)
                    with torch.no_grad():
                        chained = draft(padded, ids, depth + 1, target=model, window=window, sinks=sinks)
                    wanted, layers = chained[depth][0, last], below + (1 + depth) * own_layers
                    torch.testing.assert_close(logits[row, node], wanted, **rounding(wanted, layers))
                    compared, deepest = compared + 1, max(deepest, depth)
    assert compared > 50 and deepest == 2


@pytest.mark.parametrize(
    ("name", "settings", "chunk"),
    few(
        [
            ("gemma3", {"window": None, "norm_output": True, "fc_norm": True}, 7),
            ("deepseek_v3", {"window": None, "norm_before_residual": True, "num_hidden_layers": 2}, 5),
            ("qwen3", {"window": 5, "sinks": 0}, 4),
            ("gpt_oss", {"window": 6, "sinks": 3, "qk_norm": True, "norm_before_fc": True}, None),
            ("llama", {"layer_windows": [4], "sinks": 3}, 6),
        ],
        3,
    ),
    ids=str,
)
def test_drafting_is_a_forward_over_the_text(target, levels, name, settings, chunk):
    """Ragged rows; windows that hide tokens; accepted and refused nodes; prompts in chunks."""
    model = target(name, vocab_size=12)
    draft = draft_for(model, **settings)
    sequences = generate(model, draft, prefill_chunk_size=chunk, max_new_tokens=12)
    assert 0 < draft.last_speculation.num_accepted_draft_tokens < draft.last_speculation.num_draft_tokens
    mask = tiny_prompts(12, LENGTHS)[1]
    width = mask.shape[1]
    texts = [row[width - int(keep.sum()) :] for row, keep in zip(sequences, mask, strict=True)]
    check_levels(levels, draft, model, texts, settings.get("window"), settings.get("sinks", 4))


@pytest.mark.parametrize("chunk", [1, 4, 5, 100])
def test_auxiliary_states_are_hidden_states(target, chunk):
    """States of one forward agree to the bit, those of chunks within rounding. First and last positions are kept."""
    model = target("llama")
    ids, _ = tiny_prompts(128, (23,))
    layers = (0, 1, 2)
    with LayerInputs(model, layers) as caught:
        states, _ = residual_stream(model, ids)
    assert torch.equal(caught.hidden, torch.cat(states, -1))
    cache = SpeculativeCache(model.config, 1, 40)
    view = TargetView(model)
    with torch.no_grad(), PromptAuxHiddenStates(model, layers, [23], [0], [0], sinks=3, window=6) as aux:
        view.prefill(ids[:, :22], cache, chunk)
    positions, kept = aux.of_row(0)
    assert positions.tolist() == [0, 1, 2, 17, 18, 19, 20, 21]
    expected = caught.hidden[0, positions]
    torch.testing.assert_close(kept, expected, **rounding(expected, model.config.num_hidden_layers))
    held = sum(piece.untyped_storage().nbytes() for rows in aux._pieces for row in rows for _, piece in row)
    assert held == 3 * len(positions) * 64 * 4  # nothing of the other positions is in memory


def test_a_reduced_vocabulary_reads_only_its_rows_of_the_targets_head(target, monkeypatch):
    def input_alone(model, part):
        assert part == "input", "all rows of the head were read"
        return model.get_input_embeddings()

    model, drafters = target("llama"), []
    draft = draft_for(model, draft_vocab_size=5)
    draft.set_vocabulary([1, 3, 4, 6, 10])
    outputs = torch.randn(2, 3, draft.config.hidden_size)
    expected = model.lm_head(outputs)[..., [1, 3, 4, 6, 10]].detach()
    monkeypatch.setattr(aux_hidden_states, "_part_of", input_alone)
    after(monkeypatch, Eagle3Drafter, "propose", lambda tree, drafter, root: drafters.append(drafter))
    generate(model, draft, (33,))
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    generate(model, draft, (33,))
    tolerance = rounding(expected, layers=1)
    torch.testing.assert_close(drafters[-1].head(outputs), 3 * expected, **tolerance)


def test_tokens_outside_of_the_drafts_vocabulary_are_counted(target):
    model = target("llama", vocab_size=12)
    draft = draft_for(model, draft_vocab_size=5)
    draft.d2t.copy_(torch.tensor([1, 2, 2, 3, 6]))
    assert draft.token_ids.tolist() == [1, 3, 4, 6, 10]
    sequences = generate(model, draft, (33,), return_dict_in_generate=True).sequences
    stats = draft.last_speculation
    assert stats.num_out_of_draft_vocabulary == sum(int(t) not in {1, 3, 4, 6, 10} for t in sequences[0, 33:]) > 0
    assert "num_out_of_draft_vocabulary" in stats.to_dict()
    whole = draft_for(model)
    generate(model, whole, (33,))
    assert whole.last_speculation.num_out_of_draft_vocabulary == 0


def test_layers_with_several_streams_are_refused(target):
    model = target("llama")
    with (
        LayerInputs(model, [1]),
        pytest.raises(ValueError, match=r"LlamaForCausalLM pass states of shape \(4, 1, 3, 64\)"),
    ):
        model.model.layers[1](torch.zeros(4, 1, 3, 64))
