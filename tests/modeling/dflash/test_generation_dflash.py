"""DFlash's and P-EAGLE's drafters: the logits of a forward over the whole text, the best paths, published layouts."""

import itertools

import pytest
import torch

from hf_longspec import DFlashDraftModel, Eagle3DraftModel
from hf_longspec.modeling.dflash.generation_dflash import DFlashDrafter
from hf_longspec.modeling.eagle3.generation_eagle3 import ParallelEagle3Drafter
from tests.modeling.calls import LENGTHS, check_sampled_text, generate, reference, watch_levels
from tests.modeling.dflash.block_logits import block_logits
from tests.modeling.dflash.test_modeling_dflash import FIXTURES, NAMES
from tests.modeling.eagle3.residual_stream import residual_stream
from tests.pairwise import few
from tests.rounding import rounding
from tests.tiny_targets import random_draft, tiny_prompts, tiny_target

PEAGLE = FIXTURES.parents[1] / "eagle3" / "peagle_llama"
SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 8}


def texts_of(sequences, vocab_size):
    mask = tiny_prompts(vocab_size, LENGTHS)[1]
    return [row[mask.shape[1] - int(keep.sum()) :] for row, keep in zip(sequences, mask, strict=True)]


@torch.no_grad()
def logits_after(draft, model, text, lengths):
    """Logits `(1, levels, draft vocabulary)` after so many entries of a text, by the forward of training."""
    states, _ = residual_stream(model, text[None])
    aux = torch.cat([states[layer] for layer in draft.layers_of(model.config)], -1)
    if isinstance(draft, DFlashDraftModel):
        return block_logits(draft, model, aux, text[None], lengths)
    count, window = len(draft.setting("tree_widths")), draft.prompt_tokens
    # the rows after the last entries hold masks, whatever the text is
    entries = (
        torch.nn.functional.pad(aux[:, :-1], (0, 0, 0, count)),
        torch.nn.functional.pad(text[None, 1:], (0, count)),
    )
    steps = draft(*entries, count, target=model, window=window, sinks=draft.setting("sinks"))
    return [torch.stack([level[:, length - 1] for level in steps], 1) for length in lengths]


SLIDING = {"layer_windows": [4, None], "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("cls", "name", "settings", "chunk"),
    [
        (DFlashDraftModel, "gemma3", {"window": None, "num_hidden_layers": 2}, 7),
        (DFlashDraftModel, "gpt_oss", {"window": 6, "sinks": 3, "num_tree_nodes": 9, "sample_from_anchor": True}, None),
        (DFlashDraftModel, "qwen3", SLIDING | {"block_window": True, "causal_windows": True, "sinks": 1}, 4),
        (DFlashDraftModel, "llama", SLIDING | {"window": 5, "sinks": 0, "num_tree_nodes": 12}, 6),
        (DFlashDraftModel, "mistral", {"attention_sink_bias": True, "num_hidden_layers": 2, "causal": True}, 5),
        (DFlashDraftModel, "deepseek_v3", {"conv_kernel_size": 2, "draft_vocab_size": 7, "own_head": True}, 5),
        (Eagle3DraftModel, "gemma3", {"mask_token_id": 5, "window": None, "num_hidden_layers": 2}, 7),
        (Eagle3DraftModel, "llama", SLIDING | {"mask_token_id": 5, "layer_windows": [4, 4], "window": None}, 6),
        (Eagle3DraftModel, "qwen3", {"mask_token_id": 5, "window": 5, "sinks": 2}, 4),
    ],
    ids=str,
)
def test_drafting_is_a_forward_over_the_text(target, monkeypatch, cls, name, settings, chunk):
    """Ragged rows; windows that hide tokens; accepted and refused nodes; prompts in chunks."""
    model = target(name, vocab_size=12)
    shape = {"block_size": 4} if cls is DFlashDraftModel else {"tree_widths": [4, 4, 3]}
    draft = random_draft(cls, model, gate=False, **(shape | settings))
    if cls is DFlashDraftModel:
        drafted = watch_levels(monkeypatch, DFlashDrafter, lambda changing: changing[4])
    else:
        drafted = watch_levels(monkeypatch, ParallelEagle3Drafter)
    sequences = generate(model, draft, prefill_chunk_size=chunk, max_new_tokens=12)
    assert 0 < draft.last_speculation.num_accepted_draft_tokens < draft.last_speculation.num_draft_tokens
    if scale := getattr(model.get_input_embeddings(), "embed_scale", None):
        assert scale != 1  # gemma3, whose table is read as it is
    compared = 0
    for row, text in enumerate(texts_of(sequences, 12)):
        # the last token of the text is never a root
        places = {end[row]: levels[0][1][row] for end, levels in drafted if end[row] < len(text) - 2}
        wanted = logits_after(draft, model, text, [end + 1 for end in places])
        for (end, logits), expected in zip(places.items(), wanted, strict=True):
            layers = model.config.num_hidden_layers + 2 * draft.config.num_hidden_layers
            torch.testing.assert_close(logits, expected[0], **rounding(expected, layers), msg=f"row {row}, {end}")
            compared += 1
    assert compared > 12


@pytest.mark.parametrize(
    ("nodes", "settings"),
    few(
        [
            (11, {}),
            (None, {"sample_from_anchor": True, "markov_rank": 5, "markov_head_type": "rnn"}),
            (11, {"sample_from_anchor": True, "markov_rank": 5, "markov_head_type": "rnn"}),
            (11, {"markov_rank": 5, "markov_head_type": "gated", "draft_vocab_size": 7, "own_head": True}),
            (None, {"selector_rank": 4, "selector_top_k": 3}),
            (11, {"selector_rank": 4, "selector_top_k": 3}),
        ],
        3,
    ),
    ids=str,
)
def test_the_tree_has_the_most_probable_paths(target, monkeypatch, nodes, settings):
    """Against all paths, each scored by itself from the states of the block."""
    model = target("llama", vocab_size=9)
    draft = random_draft(DFlashDraftModel, model, block_size=4, num_tree_nodes=nodes, gate=False, **settings)
    trees, hidden = [], []
    propose, block = DFlashDrafter.propose, DFlashDrafter._block
    monkeypatch.setattr(DFlashDrafter, "propose", lambda self, *a: trees.append(propose(self, *a)) or trees[-1])
    monkeypatch.setattr(DFlashDrafter, "_block", lambda self, *a: hidden.append(block(self, *a)) or hidden[-1])
    generate(model, draft, (9, 4), max_new_tokens=6)
    ids, first, last = draft.token_ids.tolist(), draft.config.first_slot, draft.config.block_size
    for tree, states in zip(trees, hidden, strict=True):
        for row in range(2):
            scores = {}
            grow(draft, model, states[row], int(tree.tokens[row, 0]), ids, scores, first, last)
            found = set()
            for node in range(tree.tokens.shape[1]):
                path, at = [], node
                while at > 0:
                    path.append(int(tree.tokens[row, at]))
                    at = int(tree.parents[row, at])
                found.add(tuple(reversed(path)))
            if nodes is None:
                best, wanted = (), {()}
                for _ in range(first, last):
                    best = max((path for path in scores if path[:-1] == best and path), key=scores.get)
                    wanted.add(best)
            else:
                wanted = {(), *sorted((path for path in scores if path), key=scores.get, reverse=True)[: nodes - 1]}
            assert found == wanted


@torch.no_grad()
def grow(draft, model, states, root, ids, scores, first, last):
    """Add the log-probability of every path to `scores`, one path after another."""
    logits, size = draft.logits(states, model), draft.config.block_size
    assert last == size
    memories = {(): draft.first_memory(torch.tensor([[root]]))}
    scores[()] = 0.0
    for depth in range(last - first):
        for path in itertools.product(ids, repeat=depth):
            if scores.get(path, -torch.inf) == -torch.inf:
                continue
            slot, before = first + depth, torch.tensor([[path[-1] if path else root]])
            row, memory = draft.next_logits(logits[None, [slot]], states[None, [slot]], before, memories[path])
            for token, value in zip(ids, row[0, 0].log_softmax(-1).tolist(), strict=True):
                scores[*path, token] = scores[path] + value
                memories[*path, token] = memory


@pytest.mark.parametrize("name", few([*NAMES, "peagle_llama"], 5))
def test_published_layouts_draft_from_a_folder(target, name):
    """Text as without a draft, greedy and sampled; and the chain is that of the logits over the text."""
    model = target("llama", **SIZES)
    cls, folder = (Eagle3DraftModel, PEAGLE) if name.startswith("peagle") else (DFlashDraftModel, FIXTURES / name)
    draft = cls.from_pretrained(folder, target=model, gate=False, on_unsupported="error")
    assert torch.equal(generate(model, draft), reference(model, None))
    check_sampled_text(model, draft, temperature=0.7)
    assert draft.last_speculation.num_draft_tokens > 0
    text = tiny_prompts(97, (15,))[0]
    candidates, _ = draft.candidate_generator(model, max_length=64).get_candidates(text)
    (logits,) = logits_after(draft, model, text[0], [14])
    chain = logits[0, getattr(draft.config, "first_slot", 0) :].argmax(-1)
    if name != "spec_dflash2":  # whose selector chooses after the token before; see the tree's test
        assert candidates[0, 15:].tolist() == draft.token_ids[chain].tolist()
    assert candidates.shape[1] == 15 + len(chain)


def test_the_final_state_of_the_target_is_refused():
    """Projects disagree about the norm."""
    model = tiny_target("llama", **SIZES)
    draft = DFlashDraftModel.from_pretrained(FIXTURES / "zlab_full", target=model)
    draft.generation_config.target_layer_ids = [2, 3, 8]
    draft.generation_config.on_unsupported = "error"
    with pytest.raises(ValueError, match="target_layer_ids has 8, the final state"):
        generate(model, draft)
