"""The simulated device fails where CUDA fails, and counts what CUDA waits for."""

import pytest
import torch

from tests.simulated_cuda import RacingCopy, SimulatedCuda
from tests.simulated_graphs import FreedMemory, NotCapturable, WrongDevice


@pytest.fixture
def cuda():
    with torch.no_grad(), SimulatedCuda() as device:
        yield device


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: x.index_copy_(0, torch.tensor([1]), x[:1]),
        lambda x: torch.randn(3, device="cuda", generator=torch.Generator()),
    ],
)
def test_both_devices_in_one_operation(wrong, cuda):
    with pytest.raises(WrongDevice):
        wrong(cuda.place(torch.zeros(3)))


@pytest.mark.parametrize(
    ("kind", "transfer"),
    [
        ("read", lambda x: x[0].item()),
        ("read", lambda x: x[x > 1]),
        ("read", lambda x: torch.cuda.synchronize()),
        ("read", lambda x: torch.zeros(3).copy_(x)),
        ("write", lambda x: torch.tensor([1, 2], device="cuda")),
        ("write", lambda x: torch.ones(3).to("cuda")),
        ("write", lambda x: x.copy_(torch.ones(3))),
        ("write", lambda x: x[[0, 2]]),
        ("pinned", lambda x: x.copy_(torch.ones(3).pin_memory(), non_blocking=True)),
    ],
)
def test_transfers_are_counted_and_cannot_be_captured(kind, transfer, cuda):
    x = cuda.place(torch.tensor([1.0, 5.0, 2.0]))
    transfer(x)
    assert [found.kind for found in cuda.transfers] == [kind]
    assert "test_simulated_cuda.py" in str(cuda.transfers[0])
    if kind != "pinned":
        with pytest.raises(NotCapturable, match=kind), torch.cuda.graph(torch.cuda.CUDAGraph()):
            transfer(x)


def test_the_source_of_a_pinned_copy_stays_until_the_next_read(cuda):
    source, x = torch.zeros(3).pin_memory(), cuda.place(torch.zeros(3))
    x.copy_(source, non_blocking=True)
    x.sum().item()
    source.fill_(1)
    x.copy_(source, non_blocking=True)
    source.fill_(2)
    with pytest.raises(RacingCopy):
        x.sum().item()


def test_generators_belong_to_a_graph(cuda):
    generator, graph = torch.Generator("cuda").manual_seed(0), torch.cuda.CUDAGraph()
    state = torch.cuda.default_generators[0].clone_state()
    with pytest.raises(NotCapturable, match="generator"), torch.cuda.graph(graph):
        torch.rand(2, device="cuda", generator=generator)
    torch.cuda.default_generators[0].graphsafe_set_state(state)
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        drawn = torch.rand(2, device="cuda", generator=generator)
    graph.replay()
    assert not drawn.host.isnan().any()


def captured(x, pool):
    """A graph of `x @ x`, and its result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        found = x @ x
    return graph, found


def test_memory_of_graphs(cuda):
    """A workspace of cuBLAS ends with the graphs of its pool. A failed capture leaves its generator and its pool."""
    x, pool = cuda.place(torch.eye(2)), torch.cuda.graph_pool_handle()
    first, _ = captured(x, torch.cuda.graph_pool_handle())
    second, _ = captured(x, torch.cuda.graph_pool_handle())
    second.replay()
    del first
    with pytest.raises(FreedMemory):
        second.replay()
    generator = torch.cuda.default_generators[0]
    state = generator.clone_state()
    with pytest.raises(NotCapturable, match="read"), torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
        x.sum().item()
    with pytest.raises(NotCapturable, match="generator"):
        captured(x, pool)
    generator.graphsafe_set_state(state)
    with pytest.raises(NotCapturable, match="already recording"):
        captured(x, pool)
    captured(x, torch.cuda.graph_pool_handle())
