"""Buffers and graphs that calls leave for the next one: when they are used again, and when they must not be."""

import gc
import logging

import pytest
import torch

from hf_longspec import SpeculativeCache
from hf_longspec.generation.compiled import cuda_graphs
from hf_longspec.generation.compiled.cuda_graphs import CapturedRunner, state_of
from hf_longspec.generation.target import TargetView
from hf_longspec.modeling.register_draft import DRAFTS
from tests.generation.test_on_simulated_cuda import generate, simulated
from tests.tiny_targets import random_eagle3_draft, randomize, tiny_prompts, tiny_target

pytestmark = pytest.mark.usefixtures("every_step_speculates")


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def pair():
    """A target and a LongSpec draft for it."""
    model = tiny_target("llama", vocab_size=24)
    draft = DRAFTS["longspec"].model.from_target(model, window=8, tree_widths=[3, 2])
    randomize(draft)
    return model, draft


def text_of(model, draft, prompts, **options):
    draft.generation_config.compile = "off"
    text = generate(model, draft, *prompts, False, **options)
    draft.generation_config.compile = "graph"
    return text


class TestNextCall:
    def test_a_returned_cache_belongs_to_the_caller(self, pair):
        model, draft = pair
        prompts = tiny_prompts(24, (21,))
        expected = text_of(model, draft, prompts)
        with simulated() as cuda:
            cuda.place(model), cuda.place(draft)
            out = generate(model, draft, *cuda.place(prompts), False, return_dict_in_generate=True)
            assert isinstance(out.past_key_values, SpeculativeCache)
            keys = out.past_key_values.layers[0].keys
            before = cuda.fetch(keys).clone()
            other = torch.flip(prompts[0][:, 1:], [1])  # a shorter text, for which that cache would do
            again = generate(model, draft, *cuda.place((other, torch.ones_like(other))), False)
            assert again.shape[1] == 34
            assert torch.equal(cuda.fetch(keys), before)
            assert torch.equal(cuda.fetch(out.sequences), expected)

    def test_a_longer_call_replaces_the_buffers(self, pair):
        model, draft = pair
        short, long = tiny_prompts(24, (21,)), tiny_prompts(24, (60,))
        expected = [text_of(model, draft, prompts) for prompts in (short, long)]
        with simulated() as cuda:
            cuda.place(model), cuda.place(draft)
            for prompts, text in zip((short, long, short), (*expected, expected[0]), strict=True):
                assert torch.equal(cuda.fetch(generate(model, draft, *cuda.place(prompts), False)), text)

    @pytest.mark.parametrize("drop", ["release", "memory"])
    def test_buffers_are_dropped(self, pair, drop, monkeypatch, caplog):
        """Every call captures its steps again, in the memory that the graphs of the target share."""
        model, draft = pair
        draft.generation_config.compile = "graph"
        prompts = tiny_prompts(24, (21,))
        if drop == "memory":
            monkeypatch.setattr(cuda_graphs, "MOST_MEMORY", 1e-8)
        monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
        with simulated() as cuda:
            cuda.place(model), cuda.place(draft)
            captured, replayed = [], []
            for _ in range(3):
                generate(model, draft, *cuda.place(prompts), False)
                captured.append(len(cuda.graphs))
                replayed.append(cuda.replays)
                if drop == "release":
                    draft.release_buffers()
            first, second, third = captured
            assert second >= 2 * first - 2 and third - second == second - first  # some are kept with the target
            assert replayed == [replayed[0], 2 * replayed[0], 3 * replayed[0]]
        assert "could not be captured" not in caplog.text


def test_buffers_belong_to_one_call_at_a_time(pair):
    """A second call, in another thread, gets none before the first one has left them."""
    model, draft = pair
    runner, cache = CapturedRunner(model, draft), SpeculativeCache(model.config, 1, 64)
    runner.keep(runner.workspace(1, 64), cache)
    first, second = (runner.workspace(1, 64) for _ in range(2))
    assert first.cache is cache and second.cache is None


def test_settings_that_change_between_calls_reach_the_graphs():
    """A graph keeps the settings that it was captured with, so a changed one needs new graphs."""
    model, captured = tiny_target("llama", vocab_size=24), []
    draft = random_eagle3_draft(model, tree_widths=[9, 6])
    draft.generation_config.compile = "graph"
    with simulated() as cuda:
        cuda.place(model), cuda.place(draft)
        for norm_output in (False, False, True):
            draft.generation_config.norm_output = norm_output
            generate(model, draft, *cuda.place(tiny_prompts(24, (21,))), False)
            captured.append(len(cuda.graphs))
    assert 0 < captured[0] == captured[1] < captured[2]


def test_the_gate_does_not_count_captures(pair):
    model, draft = pair
    runner = CapturedRunner(model, draft)
    target = TargetView(model, runner)
    before = target.clock()
    runner.seconds += 100
    assert target.clock() - before < 0


class TestState:
    """Beside the structure of a model (test_structure.py). Its use is shown by test_on_simulated_cuda.py."""

    @pytest.fixture
    def model(self):
        return tiny_target("llama", vocab_size=24)

    def test_it_stays_the_same_for_other_values_of_weights(self, model):
        before = state_of(model)
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        assert state_of(model) == before

    @pytest.mark.parametrize(
        "change",
        [
            lambda model: model.train(),
            lambda model: setattr(model.config, "hidden_act", "gelu"),
            lambda model: model.model.register_forward_pre_hook(print),
            lambda model: setattr(model.model.norm, "weight", torch.nn.Parameter(model.model.norm.weight.clone())),
        ],
    )
    def test_it_changes_with_what_is_computed(self, model, change):
        before = state_of(model)
        change(model)
        assert state_of(model) != before

    def test_it_changes_with_the_mode_of_the_call(self, model, monkeypatch):
        """Tensors of inference mode cannot be changed outside of it, and autocast chooses other dtypes."""
        found = [state_of(model)]
        with torch.inference_mode():
            found.append(state_of(model))
        for half in (torch.bfloat16, torch.float16):
            monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: device_type == "cuda")
            monkeypatch.setattr(torch, "get_autocast_dtype", lambda device_type, half=half: half)
            found.append(state_of(model))
        monkeypatch.undo()
        assert len({*found}) == 4 and state_of(model) == found[0]


def test_results_lie_outside_of_the_memory_that_graphs_share(pair):
    """An older graph, replayed before they are read, would overwrite them."""
    made = []
    with simulated() as cuda:
        numbers = cuda.place(torch.arange(5.0))

        def doubled():
            made.append(numbers * 2)
            return [made[-1], None], "settings"

        (found, settings), replay = cuda_graphs.capture(doubled, numbers.device, pair[0])
        assert found[0].data_ptr() not in {tensor.data_ptr() for tensor in made}
        numbers += 1
        replay()
        assert cuda.fetch(found[0]).tolist() == [2, 4, 6, 8, 10] and (found[1], settings) == (None, "settings")


class TestCapture:
    """Captures of one process do not disturb each other, under the rules of `tests/simulated_graphs.py`."""

    @pytest.fixture
    def cuda(self):
        with simulated() as device:
            yield device

    def product(self, cuda, target=None):
        """Capture `x @ x`; return its result, the replay and the target."""
        x, target = cuda.place(torch.eye(3)), target or torch.nn.Module()
        return *cuda_graphs.capture(lambda: [x @ x], x.device, target), target

    def fail(self, cuda, target):
        x = cuda.place(torch.eye(3))
        calls = []

        def reads_in_the_capture():
            calls.append(gc.isenabled())
            return [x * x.sum().item()] if len(calls) > cuda_graphs.WARM_UP else [x]

        with pytest.raises(RuntimeError, match="while a graph is captured"):
            cuda_graphs.capture(reads_in_the_capture, x.device, target)
        return calls

    def test_after_a_failure(self, cuda):
        _, replay, target = self.product(cuda)
        stream = torch.cuda.current_stream()
        for _ in range(2):
            self.fail(cuda, target)
            assert torch.cuda.current_stream() is stream
            (found,), replay_again, _ = self.product(cuda, target)
            replay(), replay_again()
            assert cuda.fetch(found).equal(torch.eye(3))

    def test_after_the_graphs_of_another_target_have_ended(self, cuda):
        _, replay, target = self.product(cuda)
        (found,), other_replay, _other = self.product(cuda)
        del replay, target
        other_replay()
        assert cuda.fetch(found).equal(torch.eye(3))

    def test_after_all_graphs_of_the_target_have_ended(self, cuda):
        _, replay, target = self.product(cuda)
        del replay
        (found,), replay, _ = self.product(cuda, target)
        replay()
        assert cuda.fetch(found).equal(torch.eye(3))

    def test_after_others_have_cleared_the_workspaces_of_cublas(self, cuda):
        (found,), replay, _ = self.product(cuda)
        torch._C._cuda_clearCublasWorkspaces()
        replay()
        assert cuda.fetch(found).equal(torch.eye(3))

    def test_nothing_is_collected_meanwhile(self, cuda):
        assert not any(self.fail(cuda, torch.nn.Module())) and gc.isenabled()

    def test_two_devices(self):
        for first in (0, 1):
            with simulated(index=1) as cuda:
                for index in (first, 1 - first):
                    cuda.device = torch.device("cuda", index)
                    (found,), replay, _ = self.product(cuda)
                    replay()
                    assert cuda.fetch(found).equal(torch.eye(3))
