"""SpecAttn on a backend that writes scores while it verifies: text and drafts are the same, in one pass over the keys.

The kernels run interpreted, in float32, on ragged batches. test_scores.py compares the scores and what they select, and
tests/generation/test_on_simulated_cuda.py captures such steps.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from hf_longspec import SpecAttnDraftModel
from hf_longspec.attention_backends.scores import ScoreCapture
from hf_longspec.generation import compiled_steps as compiled
from hf_longspec.generation import decoding
from hf_longspec.generation.sparse_caches import SelectedCache
from hf_longspec.generation.target import TargetView
from hf_longspec.testing import tiny_prompts, tiny_target

pytestmark = pytest.mark.usefixtures("kernel_device", "small_tiles", "every_step_speculates")

LENGTHS, NEW, GAMMA = (29, 3), 5, 3


class Watched:
    """Layers whose scores came with the attention (`written`) and from a second pass (`computed`), and selections."""

    def __init__(self, patch):
        self.written, self.computed, self.selected = [], [], []
        for name, seen in (("keep_scores", self.written), ("collect", self.computed)):
            patch.setattr(ScoreCapture, name, self._noting(getattr(ScoreCapture, name), seen))
        fill = SelectedCache.fill

        def kept(cache, layer_idx, chosen):
            rows = [chosen[row, :, :count].sort(-1).values for row, count in enumerate(tuple(cache.counts))]
            self.selected.append((layer_idx, rows))
            return fill(cache, layer_idx, chosen)

        patch.setattr(SelectedCache, "fill", kept)

    @staticmethod
    def _noting(method, seen):
        def noted(capture, layer_idx, *args, **options):
            if layer_idx not in capture.skipped_layers:
                seen.append(layer_idx)
            return method(capture, layer_idx, *args, **options)

        return noted


def generate(model, settings, lengths=LENGTHS, implementation="hf_longspec_triton"):
    """Text, statistics, and what was watched."""
    model.set_attn_implementation(implementation)
    draft = SpecAttnDraftModel.from_target(
        model, num_assistant_tokens=GAMMA, sparse_min_tokens=8, sparse_ratio=0.3, **settings
    )
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch)
        text = plain_text(model, lengths, assistant_model=draft)
    return text, draft.last_speculation, watched


def plain_text(model, lengths=LENGTHS, **options):
    input_ids, mask = tiny_prompts(model.config.vocab_size, lengths)
    options |= {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    return model.generate(input_ids, attention_mask=mask, **options)


def assert_same_entries(some, others):
    assert len(some) == len(others) > 0
    for (layer, chosen), (other_layer, other) in zip(some, others, strict=True):
        assert layer == other_layer and all(map(torch.equal, chosen, other))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gemma2", {"score": "logits", "granularity": "kv_head"}),
        ("gpt_oss", {}),
        pytest.param("llama", {"score": "weights", "granularity": "kv_head"}, marks=pytest.mark.soak),
        pytest.param("llama", {"score": "logits", "granularity": "layer"}, marks=pytest.mark.soak),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.soak),
    ],
)
def test_selections_and_text(name, settings):
    """Softcap, windows, sinks, keys made for the call; layers with a window are not scored."""
    model = tiny_target(name, attn_implementation="eager")
    expected = plain_text(model)
    text, stats, watched = generate(model, settings)
    assert torch.equal(text, expected)
    scored = set(range(model.config.num_hidden_layers)) - TargetView(model).sliding_layers
    assert set(watched.written) == scored and not watched.computed
    # of the prompt's end and of every verification
    assert len(watched.written) == len(scored) * (stats.num_forwards + 1)
    _, other_stats, other = generate(model, settings, implementation="hf_longspec_torch")
    assert not other.written and other.computed == watched.written and other_stats.num_forwards == stats.num_forwards
    assert_same_entries(watched.selected, other.selected)


@pytest.mark.parametrize(
    "selection",
    ["last_accepted", *(pytest.param(name, marks=pytest.mark.soak) for name in ("window", "all_rows"))],
)
def test_other_selections_take_the_way_they_had(selection):
    model = tiny_target("llama", num_hidden_layers=1)
    expected = plain_text(model)
    text, stats, watched = generate(model, {"selection": selection})
    assert torch.equal(text, expected)
    passes = 0 if selection == "window" else model.config.num_hidden_layers * (stats.num_forwards + 1)
    assert not watched.written and len(watched.computed) == passes


@pytest.mark.parametrize("lengths", [LENGTHS, pytest.param((29,), marks=pytest.mark.soak)], ids=["ragged", "one"])
def test_compiled_steps(lengths, monkeypatch):
    """Traced whole, the scores included; drafting and verifying are one graph each."""
    model = tiny_target("llama", num_hidden_layers=1)
    expected, stats, loose = generate(model, {}, lengths)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    monkeypatch.setattr(compiled, "BACKEND", graphs)
    runner = compiled.CompiledRunner()
    monkeypatch.setattr(decoding, "runner_of", lambda *_: runner)
    text, fixed_stats, fixed = generate(model, {}, lengths)
    torch._dynamo.reset()
    assert torch.equal(text, expected) and stats.num_forwards == fixed_stats.num_forwards
    assert fixed.written == loose.written and not fixed.computed
    assert_same_entries(loose.selected, fixed.selected)
    assert graphs.frame_count >= 2
