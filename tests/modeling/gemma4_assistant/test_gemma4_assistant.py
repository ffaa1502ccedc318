"""Assistants of Gemma 4 against the outputs of transformers' own class, and against its text."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedTextConfig,
)

from hf_longspec import Gemma4AssistantDraftModel
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.cli.models import open_draft
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.modeling.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantDrafter, layers_read
from tests.modeling.calls import LENGTHS, check_text, generate, watch_levels
from tests.pairwise import few
from tests.robustness.peaked_weights import peak
from tests.tiny_targets import random_draft, tiny_target
from tests.watching import after

FIXTURE = Path(__file__).parent / "fixture"
KINDS = ("full_attention", "sliding_attention")
# float32 sums in another order
CLOSE = {"atol": 1e-4, "rtol": 0}
# Wide, as the weights are random.
TREE, CHAIN = [24, 12], [1, 1, 1]


# Of targets like that of the fixture, which transformers cannot run: its layers share keys without inputs of their own.
# The small ones that are published share, the large ones do not.
TARGETS = {"shared": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}}
TARGETS |= {"own": {"num_kv_shared_layers": 0, "attention_k_eq_v": True}}


@pytest.fixture(scope="module")
def published():
    return AutoModelForCausalLM.from_pretrained(FIXTURE / "target").eval()


@pytest.fixture(scope="module")
def gemma(request):
    fields = json.loads((FIXTURE / "target" / "config.json").read_text()) | TARGETS[request.param]
    target = Gemma4ForCausalLM(Gemma4TextConfig(**fields)).eval()
    peak(target, 96)
    return target


@pytest.fixture
def assistant(published):
    return Gemma4AssistantDraftModel.from_pretrained(FIXTURE / "assistant", on_unsupported="error")


def fixture_round(number):
    """State, token, keys and values, and the logits of the three steps."""
    found = load_file(FIXTURE / "expected.safetensors")
    shared = {kind: [found[f"round_{number}_{kind}_{part}"][None] for part in ("keys", "values")] for kind in KINDS}
    length = shared[KINDS[0]][0].shape[2]
    wanted = torch.stack([found[f"round_{number}_step_{step}_logits"] for step in range(3)])
    return found["ids"], found[f"round_{number}_target_hidden"].view(1, 1, -1), length, shared, wanted


@torch.no_grad()
def chain(draft, target, state, token, shared, steps=3):
    """Logits `(steps, V)` of a greedy chain after a text, whose keys and values are `shared`."""
    length, found, token = shared[KINDS[0]][0].shape[2], [], token.view(1, 1)
    for _ in range(steps):
        embedded, rotary = target.get_input_embeddings()(token).to(state), draft.rotary_embedding(state.device)
        position, lengths = torch.tensor([[length]]), SeqLens.equal(length, 1)
        logits, state = draft(embedded, state, position, rotary, shared, lengths)
        token = logits.argmax(-1)
        found.append(logits[0, 0])
    return torch.stack(found)


@pytest.mark.parametrize("number", [0, 1])
def test_logits_are_those_of_the_publisher(published, assistant, number):
    """With more tokens than the window has; the state and the keys are those that the target computes."""
    ids, state, length, shared, wanted = fixture_round(number)
    assert length > assistant.config.layer.sliding_window
    torch.testing.assert_close(chain(assistant, published, state, ids[length], shared), wanted, **CLOSE)

    with torch.no_grad():
        found = published(ids[None, :length], output_hidden_states=True)
    torch.testing.assert_close(found.hidden_states[-1][:, -1:], state, **CLOSE)
    full = found.past_key_values.layers[1]
    torch.testing.assert_close([full.keys, full.values], shared["full_attention"], **CLOSE)


def own_class(unified, **fields):
    """A random assistant of transformers' own class, which 5.23 refuses to build."""
    kinds = (Gemma4UnifiedTextConfig, Gemma4UnifiedAssistantConfig, Gemma4UnifiedAssistantForCausalLM)
    text, config, model = kinds if unified else (Gemma4TextConfig, Gemma4AssistantConfig, Gemma4AssistantForCausalLM)
    raw = json.loads((FIXTURE / "assistant" / "config.json").read_text())
    layer = raw["text_config"] | {"model_type": text.model_type}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "kv_sharing_modes", property(lambda self: ["reuse"] * self.num_hidden_layers))
        made = model(config(text_config=text(**layer), backbone_hidden_size=32, num_centroids=12, **fields)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.4)
    return made


@pytest.mark.parametrize(("gemma", "unified"), [("shared", False), ("own", True)], indirect=["gemma"])
def test_clusters_of_tokens(gemma, unified, tmp_path):
    """Logits of transformers' own class for the tokens of the best clusters; all others are out of the question."""
    own = own_class(unified, use_ordered_embeddings=True, centroid_intermediate_top_k=3)
    own.masked_embedding.token_ordering.copy_(torch.randperm(96, generator=torch.Generator().manual_seed(2)))
    own.save_pretrained(tmp_path)
    draft = Gemma4AssistantDraftModel.from_pretrained(tmp_path, target=gemma)
    ids, state, length, shared, _ = fixture_round(1)
    embedded = gemma.get_input_embeddings()(ids[length].view(1, 1))
    with torch.no_grad():
        outputs = own(
            inputs_embeds=torch.cat([embedded, state], -1),
            position_ids=torch.tensor([[length]]),
            shared_kv_states=shared,
        )
    logits = chain(draft, gemma, state, ids[length], shared, 1).view(1, 1, -1)
    kept = logits.isfinite()
    assert int(kept.sum()) == 3 * 96 // 12
    torch.testing.assert_close(logits[kept], outputs.logits[kept], **CLOSE)
    assert bool((outputs.logits[~kept] < logits[kept].min()).all())
    draft.generation_config.update(tree_widths=TREE, on_unsupported="error")
    check_text(gemma, draft)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"centroid_intermediate_top_k": 13}, "centroid_intermediate_top_k=13"),
        ({"num_centroids": 7}, "num_centroids=7"),
        ({}, "token_ordering leaves out tokens"),
    ],
    ids=str,
)
def test_clusters_that_are_refused(fields, error, tmp_path):
    own_class(False, use_ordered_embeddings=True, centroid_intermediate_top_k=3).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=error):
        Gemma4AssistantDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("gemma", "widths", "options", "chunk"),
    few([("shared", CHAIN, {}, 7), ("own", TREE, {"do_sample": True}, 5), ("own", TREE, {}, None)], 2),
    indirect=["gemma"],
)
def test_drafting_is_a_forward_over_the_text(gemma, assistant, widths, options, chunk, monkeypatch):
    """Of the most likely token of every level, after a text of any length, with what a plain cache holds.

    In float64, as chained steps amplify differences of rounding.
    """
    gemma, assistant = copy.deepcopy(gemma).double(), assistant.double()
    drafted = watch_levels(monkeypatch, Gemma4AssistantDrafter, lambda changing: changing[2])
    assistant.generation_config.tree_widths = widths
    if options:
        torch.manual_seed(2)
    text = generate(gemma, assistant, max_new_tokens=14, prefill_chunk_size=chunk, **options)
    stats, compared = assistant.last_speculation, 0
    assert widths is CHAIN or 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    for row, length in enumerate(LENGTHS):
        ids = text[row : row + 1, max(LENGTHS) - length :]
        for lengths, levels in drafted:
            known = lengths[row]
            if known + 1 >= ids.shape[1]:  # the row has ended
                continue
            with torch.no_grad():
                cache = DynamicCache()  # without windows
                outputs = gemma(ids[:, :known], **{CACHE_NAME: cache}, output_hidden_states=True)
            state, first = outputs.hidden_states[-1][:, -1:], len(cache.layers) - 2  # of two types in turn
            shared = {KINDS[1 - j]: (cache.layers[first + j].keys, cache.layers[first + j].values) for j in range(2)}
            depth = 1 if options else len(levels)  # the noise decides which token is the first of its level
            expected = chain(assistant, gemma, state, ids[:, known], shared, depth)
            for (logits, *_), wanted in zip(levels, expected, strict=False):
                torch.testing.assert_close(logits[row, 0], wanted, **CLOSE)
                compared += 1
    assert compared > 20


def test_layers_that_are_read(published):
    """The last of each type with a cache of its own; the last two of the fixture's target share those of the others."""
    assert layers_read(published.config) == {"sliding_attention": 0, "full_attention": 1}
    assert layers_read(tiny_target("gemma3").config) == {"sliding_attention": 2, "full_attention": 1}
    assert layers_read(tiny_target("llama").config) == {"full_attention": 1}


@pytest.mark.parametrize("gemma", ["own"], indirect=True)
def test_a_folder_given_by_its_name(gemma, monkeypatch):
    """To `generate`, which loads it once, and to the option `--draft` of the commands."""
    folder, loaded = FIXTURE / "assistant", []
    after(monkeypatch, Gemma4AssistantDraftModel, "from_pretrained", lambda draft, *_, **__: loaded.append(draft))
    opened = open_draft(str(folder), gemma, {"tree_widths": TREE})
    assert isinstance(opened, Gemma4AssistantDraftModel)
    check_text(gemma, opened)
    for name in (str(folder), folder):
        assert torch.equal(generate(gemma, name), generate(gemma, None))
    assert len(loaded) == 2 and loaded[1].last_speculation.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input=8: expected 0"),
        ({"layer_types": ["chunked_attention", "sliding_attention", "full_attention"]}, "chunked_attention"),
        ({"model_type": "llama"}, "layers of 'llama'"),
        ({"intermediate_size": 2**30}, "intermediate_size=1073741824: expected from"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_files_that_are_refused(published, changes, error, tmp_path):
    raw = json.loads((FIXTURE / "assistant" / "config.json").read_text())
    raw["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(load_file(FIXTURE / "assistant" / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=error):
        Gemma4AssistantDraftModel.from_pretrained(tmp_path, target=published)


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ({"hidden_size": 48}, "backbone_hidden_size=32, but the target has 48"),
        ({"hidden_size": 32, "vocab_size": 96, "head_dim": 8}, "head_dim=16, but the target has 8"),
        (
            {"hidden_size": 32, "vocab_size": 96, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8},
            "multiple of",
        ),
    ],
    ids=str,
)
def test_another_target_is_refused(sizes, error):
    target = tiny_target("gemma3", **sizes)
    with pytest.raises(ValueError, match=error):
        Gemma4AssistantDraftModel.from_pretrained(FIXTURE / "assistant", target=target)


def test_a_target_without_a_type_of_layer_is_refused():
    gemma3, llama = (tiny_target(name, num_hidden_layers=3) for name in ("gemma3", "llama"))
    draft = random_draft(Gemma4AssistantDraftModel, gemma3)
    draft.config.target = None
    draft.generation_config.on_unsupported = "error"
    with pytest.raises(ValueError, match="sliding_attention, and the target has none"):
        generate(llama, draft)


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "config.json").write_text((FIXTURE / "assistant" / "config.json").read_text())
    torch.save(load_file(FIXTURE / "assistant" / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="contains no weights"):
        Gemma4AssistantDraftModel.from_pretrained(tmp_path)
