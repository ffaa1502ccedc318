"""Steps of fixed shapes: the text of steps that run as they are, one graph per shape, and none after that."""

import pytest
import torch

from hf_longspec import PlainDraftModel
from hf_longspec.generation.compiled import compiled_steps as compiled
from hf_longspec.generation.compiled.compiled_steps import CompiledRunner, runner_of
from hf_longspec.generation.compiled.fused_layers import FusedRunner
from tests.tiny_targets import TINY_TARGETS, RandomTreeDraftModel, tiny_target
from tests.tiny_targets import generate as generate_text

pytestmark = pytest.mark.usefixtures("every_step_speculates")

LENGTHS = (33, 5)
# Types that torch.compile cannot put into one graph, or only with the number of tokens of each expert compiled in.
MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
# Compiled by `make test`, with a layer of each kind: softcaps and windows. `make soak` compiles all.
TELLING = "gemma2"


def generate(model, draft, mode, rows=2, new=24, **options):
    draft.generation_config.compile = mode
    return generate_text(model, draft, LENGTHS[:rows], max_new_tokens=new, **options)


def test_the_text_is_that_of_the_steps_as_they_are(graphs):
    """Ragged rows, greedy and sampled; then longer rows in a larger cache, which build no further graph."""
    llama = tiny_target("llama", num_hidden_layers=1)  # the next test compiles two layers
    draft = PlainDraftModel.from_target(llama)
    for count, options in enumerate(({}, {"do_sample": True})):
        expected = generate(llama, draft, "off", new=11, **options)
        drafted = draft.last_speculation.acceptance_histogram
        assert (graphs.frame_count > 0) is (count > 0)
        assert torch.equal(generate(llama, draft, "compile", new=11, **options), expected)
        assert draft.last_speculation.acceptance_histogram == drafted
    built = graphs.frame_count
    with torch._dynamo.config.patch(error_on_recompile=True):
        generate(llama, draft, "compile", new=40, **options)
    assert draft.last_speculation.num_forwards >= 20
    # rows that are equally long for the first time in this call are another kind of step
    assert graphs.frame_count <= built + 2


@pytest.mark.parametrize(
    "architecture",
    [
        name if name == TELLING else pytest.param(name, marks=pytest.mark.soak)
        for name in TINY_TARGETS
        if name not in MIXTURES
    ],
)
def test_every_architecture_without_experts_is_one_graph(architecture, graphs):
    """Windows, softcaps, partial rotation: a random tree over ragged rows, then a chain in one."""
    model = tiny_target(architecture)
    draft = RandomTreeDraftModel.from_target(model)
    expected = generate(model, draft, "off", new=14)
    assert torch.equal(generate(model, draft, "compile", new=14), expected)
    assert 1 <= graphs.frame_count <= 2  # two: rows of one length for a while


def test_a_graph_serves_another_draft_of_the_same_target(graphs, caplog):
    """It is compiled once, and a line says so before that."""
    model = tiny_target("llama", num_hidden_layers=1)
    with caplog.at_level("INFO", logger="hf_longspec"):
        for _ in range(2):
            generate(model, PlainDraftModel.from_target(model), "compile", rows=1, new=5)
            assert graphs.frame_count == 1
    (line,) = (record.getMessage() for record in caplog.records if "compiling" in record.getMessage())
    assert "compiling step 1 of LlamaForCausalLM" in line


def test_what_cannot_be_compiled_runs_as_it_is(graphs, monkeypatch, caplog):
    model = tiny_target("llama")
    draft = PlainDraftModel.from_target(model)
    expected = generate(model, draft, "off", new=9)
    forward = model.model.layers[1].mlp.forward

    def reads(hidden):
        return forward(hidden) if hidden.sum().item() < torch.inf else hidden

    reads.stateless = True
    monkeypatch.setattr(model.model.layers[1].mlp, "forward", reads)
    with caplog.at_level("WARNING", logger="hf_longspec"):
        assert torch.equal(generate(model, draft, "compile", new=9), expected)
    assert graphs.frame_count == 0 and "could not be compiled in one graph" in caplog.text


def test_modes(monkeypatch):
    model, cpu, cuda = tiny_target("llama"), torch.device("cpu"), torch.device("cuda", 0)
    draft = PlainDraftModel.from_target(model)

    def of(mode, device):
        return runner_of(mode, model, draft, device)

    assert of("off", cpu) is of("auto", cpu) is of("off", cuda) is None
    assert type(of("compile", cpu)) is CompiledRunner
    assert of("graph", cuda).inner is None
    assert type(of("compile", cuda).inner) is CompiledRunner and of("compile", cuda).compiles
    for mode in ("graph", "fused"):
        with pytest.raises(ValueError, match=rf"compile='{mode}'.* cpu"):
            of(mode, cpu)
    monkeypatch.setattr(compiled, "INSTALLED", True)
    assert all(type(of(mode, cuda).inner) is FusedRunner and not of(mode, cuda).compiles for mode in ("auto", "fused"))
    monkeypatch.setattr(compiled, "INSTALLED", False)
    assert of("auto", cuda).inner is None
    with pytest.raises(ValueError, match="needs triton"):
        of("fused", cuda)
    with pytest.raises(ValueError, match="compile='fast'"):
        generate(model, draft, "fast")
