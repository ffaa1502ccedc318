"""SpecAttn on a backend that writes scores while it verifies: right selections, right text, one pass over the keys.

The kernels run interpreted, in float32, on ragged batches.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from hf_longspec import SpecAttnDraftModel
from hf_longspec.attention_backends.contexts import TreeContext
from hf_longspec.attention_backends.scores import ScoreCapture
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND
from hf_longspec.attention_backends.triton import backend
from hf_longspec.generation import compiled_steps as compiled
from hf_longspec.generation import cuda_graphs as captured
from hf_longspec.generation import decoding
from hf_longspec.generation.selection import SINK_TOKENS, SelectedCache
from hf_longspec.generation.target import TargetView
from hf_longspec.testing import tiny_prompts, tiny_target

pytestmark = pytest.mark.usefixtures("kernel_device", "small_tiles", "every_step_speculates")

LENGTHS = (29, 3)
NEW = 5
GAMMA = 3
# Interpreted kernels take long. Two layers: one with a window and one without, where a model has both.
LAYERS = {"num_hidden_layers": 2}
SHALLOW = {"num_hidden_layers": 1}
# Sums of up to 64 products, or of 8 exponentials, in float32. Neighbours in the order are mostly 1e-2 apart.
SCORE_ERROR = {"rtol": 1e-5, "atol": 1e-5}


class Watched:
    """Counts of one call: how often scores came with the attention (`written`) and from a second pass
    (`computed`), and per layer and phase what was selected (`selected`)."""

    def __init__(self, patch):
        self.written, self.computed, self.selected = [], [], []
        for name, seen in (("keep_scores", self.written), ("collect", self.computed)):
            patch.setattr(ScoreCapture, name, self._noting(getattr(ScoreCapture, name), seen))
        fill = SelectedCache.fill

        def kept(cache, layer_idx, chosen):
            counts = tuple(cache.counts)
            self.selected.append((layer_idx, [chosen[row, :, :count].clone() for row, count in enumerate(counts)]))
            return fill(cache, layer_idx, chosen)

        patch.setattr(SelectedCache, "fill", kept)

    @staticmethod
    def _noting(method, seen):
        def noted(capture, layer_idx, *args, **options):
            if layer_idx not in capture.skipped_layers:
                seen.append(layer_idx)
            return method(capture, layer_idx, *args, **options)

        return noted


def generate(model, settings, lengths=LENGTHS):
    """Text, number of verifications, and what was watched."""
    model.set_attn_implementation("hf_longspec_triton")
    draft = SpecAttnDraftModel.from_target(
        model, num_assistant_tokens=GAMMA, sparse_min_tokens=8, sparse_ratio=0.3, **settings
    )
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch)
        text = plain_text(model, lengths, assistant_model=draft)
    return text, draft.last_speculation.num_forwards, watched


def plain_text(model, lengths=LENGTHS, **options):
    input_ids, mask = tiny_prompts(model.config.vocab_size, lengths)
    options |= {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    return model.generate(input_ids, attention_mask=mask, **options)


@pytest.fixture
def second_pass(monkeypatch):
    """The scores of a second pass over the same keys by the same queries, per layer and phase, and row."""
    expected = {}
    scored = TreeContext._scored
    collect = ScoreCapture.collect  # before anybody watches it

    def both(context, layer):
        state = scored(context, layer)
        if state is not None and context.lengths.host:
            _, lse = context._unscored(layer._replace(backend=TORCH_BACKEND))
            own = ScoreCapture(**{**vars(context.capture), "scores": {}})
            collect(own, layer.layer_idx, layer.query, layer.key, lse, lengths=context.lengths, **layer.options)
            rows = [own.scores[layer.layer_idx][row, :, :length] for row, length in enumerate(context.lengths.host)]
            expected.setdefault(layer.layer_idx, []).append(rows)
        return state

    monkeypatch.setattr(TreeContext, "_scored", both)
    return expected


def assert_best_entries(selected, expected):
    """Selected is what has the highest scores of the second pass, ties within SCORE_ERROR aside, and all sinks."""
    phases = {layer: iter(rows) for layer, rows in expected.items()}
    compared = 0
    for layer, chosen in selected:
        for entries, scores in zip(chosen, next(phases[layer]), strict=True):
            scores[:, :SINK_TOKENS] = 1e3  # above all others
            found = scores.gather(-1, entries.expand(len(scores), -1)).sort(-1, descending=True).values
            best = scores.topk(entries.shape[-1], -1).values
            torch.testing.assert_close(found, best, **SCORE_ERROR)
            compared += entries.shape[-1] < scores.shape[-1]
    assert compared > 0


@pytest.mark.parametrize(
    ("score", "granularity"),
    [
        ("logits", "kv_head"),
        pytest.param("weights", "layer", marks=pytest.mark.soak),  # the defaults, as in the next test
        pytest.param("weights", "kv_head", marks=pytest.mark.soak),
        pytest.param("logits", "layer", marks=pytest.mark.soak),
    ],
)
def test_selections_and_text(score, granularity, second_pass):
    model = tiny_target("llama", **LAYERS)
    expected = plain_text(model)
    text, forwards, watched = generate(model, {"score": score, "granularity": granularity})
    assert torch.equal(text, expected)
    assert_best_entries(watched.selected, second_pass)
    # every layer, of the prompt's end and of every verification; and no key was read twice
    assert len(watched.written) == model.config.num_hidden_layers * (forwards + 1)
    assert not watched.computed


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", pytest.param("deepseek_v3", marks=pytest.mark.soak)])
def test_other_architectures(name, second_pass):
    """Softcap, windows, sinks, keys made for the call; layers with a window are not scored."""
    model = tiny_target(name, attn_implementation="eager", **LAYERS)
    expected = plain_text(model)
    text, forwards, watched = generate(model, {})
    assert torch.equal(text, expected)
    assert_best_entries(watched.selected, second_pass)
    scored = set(range(model.config.num_hidden_layers)) - TargetView(model).sliding_layers
    assert set(watched.written) == scored and not watched.computed
    assert len(watched.written) == len(scored) * (forwards + 1)


@pytest.mark.parametrize(
    "selection",
    ["last_accepted", *(pytest.param(name, marks=pytest.mark.soak) for name in ("window", "all_rows", "pages"))],
)
def test_other_selections_take_the_way_they_had(selection):
    model = tiny_target("llama", **LAYERS)
    expected = plain_text(model)
    text, forwards, watched = generate(model, {"selection": selection})
    assert torch.equal(text, expected)
    passes = 0 if selection == "window" else model.config.num_hidden_layers * (forwards + 1)
    assert not watched.written and len(watched.computed) == passes


def test_a_wrong_last_node_is_seen(monkeypatch, second_pass):
    """Proof that the comparison can fail: scores of the first node alone select other entries."""
    hybrid_op = backend.hybrid_op

    def first_twice(*args):
        last_node = None if args[7] is None else torch.zeros_like(args[7])
        return hybrid_op(*args[:7], last_node, *args[8:])

    monkeypatch.setattr(backend, "hybrid_op", first_twice)
    _, _, watched = generate(tiny_target("llama", **SHALLOW), {})
    with pytest.raises(AssertionError):
        assert_best_entries(watched.selected, second_pass)


def assert_like_steps_as_they_are(sizes, monkeypatch, runner_of, lengths=LENGTHS):
    model = tiny_target("llama", **sizes)
    expected, forwards, loose = generate(model, {}, lengths)
    monkeypatch.setattr(decoding, "runner_of", runner_of)
    text, fixed_forwards, fixed = generate(model, {}, lengths)
    assert torch.equal(text, expected) and forwards == fixed_forwards
    assert fixed.written == loose.written and not fixed.computed
    return forwards, loose.selected, fixed.selected


def assert_same_entries(loose, fixed):
    for (layer, chosen), (other_layer, other) in zip(fixed, loose, strict=True):
        assert layer == other_layer
        for one, two in zip(chosen, other, strict=True):
            assert torch.equal(one.sort(-1).values, two.sort(-1).values)


def test_captured_steps(monkeypatch):
    """Scores leave a graph, one per entry, and another one selects. A stand-in replays; lengths cross a bucket."""
    replays = []

    def capture(function, device, target):
        outputs = function()

        def replay():
            replays.append(True)
            for old, new in zip(captured._tensors(outputs), captured._tensors(function()), strict=True):
                old.copy_(new)

        return outputs, replay

    monkeypatch.setattr(captured, "capture", capture)
    monkeypatch.setattr(captured, "SMALLEST_BUCKET", 32)
    runner_of = lambda _, *pair: captured.CapturedRunner(*pair[:2])  # noqa: E731
    forwards, loose, fixed = assert_like_steps_as_they_are(SHALLOW, monkeypatch, runner_of)
    assert len(replays) >= forwards and len(fixed) < len(loose)


@pytest.mark.parametrize("lengths", [LENGTHS, pytest.param((29,), marks=pytest.mark.soak)], ids=["ragged", "one"])
def test_compiled_steps(lengths, monkeypatch):
    """Traced whole, the scores included; drafting and verifying are one graph each."""
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    monkeypatch.setattr(compiled, "BACKEND", graphs)
    runner = compiled.CompiledRunner()
    _, loose, fixed = assert_like_steps_as_they_are(SHALLOW, monkeypatch, lambda *_: runner, lengths)
    assert_same_entries(loose, fixed)
    torch._dynamo.reset()
    assert graphs.frame_count >= 2
