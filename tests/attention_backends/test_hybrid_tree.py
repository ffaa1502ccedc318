"""TreeContext.attend against one dense attention over prefix and path, in float64."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from hf_longspec.attention_backends import torch_hybrid
from hf_longspec.attention_backends.contexts import CallCounter, TreeContext
from hf_longspec.attention_backends.merge import merge_attention_states
from hf_longspec.attention_backends.reference import REFERENCE_BACKEND, tree_attention
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND
from tests.attention_backends.oracle import assert_within_budget, plain_attention, random_tree

PARTS_BACKEND = replace(TORCH_BACKEND, hybrid_attention=None)
BACKENDS = [
    pytest.param(REFERENCE_BACKEND, id="reference"),
    pytest.param(TORCH_BACKEND, id="torch"),
    pytest.param(PARTS_BACKEND, id="torch_parts"),
]
LENGTHS = ((0,), (90,), (50, 50), (0, 90, 33))
SCALING = 0.3


class Capture:
    def __init__(self):
        self.collected = []

    def collect(self, layer_idx, query, key, lse, **options):
        self.collected.append((layer_idx, query, key, lse, options))


def build(lengths, nodes, kv_heads=2, groups=3, size=16, value_size=16, dtype=torch.float32, seed=0):
    """A context, the queries of its nodes, and a cache with junk behind them."""
    generator = torch.Generator().manual_seed(seed)
    mask, depths = random_tree(len(lengths), nodes, generator)
    context = TreeContext(torch.tensor(lengths), lengths, depths, mask)
    query = torch.randn(len(lengths), nodes, kv_heads * groups, size, generator=generator).transpose(1, 2)
    # Scores of at most unit variance, as a model's: the lse is held to an absolute error, whatever its size
    query = query * min(1.0, 1 / (SCALING * size**0.5))
    slots = max(lengths) + nodes + 5
    key = torch.randn(len(lengths), kv_heads, slots, size, generator=generator)
    value = torch.randn(len(lengths), kv_heads, slots, value_size, generator=generator)
    for b, length in enumerate(lengths):
        key[b, :, length + nodes :] = torch.nan
        value[b, :, length + nodes :] = torch.nan
    return context, query.to(dtype), key.to(dtype), value.to(dtype)


def visible_slots(context, slots, window):
    """`(B, 1, N, slots)`: the prefix and the path of every node, as far as the window reaches."""
    batch, nodes = context.depths.shape
    visible = torch.zeros(batch, 1, nodes, slots, dtype=torch.bool)
    for b, length in enumerate(context.host_lengths):
        for n in range(nodes):
            position = length + int(context.depths[b, n])
            seen = [(j, j) for j in range(length)]
            seen += [(length + m, length + int(context.depths[b, m])) for m in range(nodes) if context.mask[b, n, m]]
            for slot, key_position in seen:
                visible[b, 0, n, slot] = window is None or position - key_position < window
    return visible


def expected(context, query, key, value, window, softcap, sinks):
    visible = visible_slots(context, key.shape[2], window)
    options = {"scaling": SCALING, "softcap": softcap}
    exact = tree_attention(query.double(), key.double(), value.double(), visible, **options)
    exact = merge_attention_states([exact], None if sinks is None else sinks.double())
    plain = plain_attention(query, key, value, visible, **options)
    return exact, plain


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("window", "softcap", "sinks", "value_size"),
    [
        (None, None, False, 16),
        (4, None, True, 16),
        (92, None, False, 16),
        (40, None, False, 16),
        (400, 3.0, True, 16),
        (4, 3.0, False, 12),
    ],
)
@pytest.mark.parametrize("nodes", [1, 5, 33])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_node_sees_the_prefix_and_its_path(lengths, nodes, window, softcap, sinks, value_size, backend):
    context, query, key, value = build(lengths, nodes, value_size=value_size)
    context.capture = Capture()
    sinks = torch.linspace(-2.0, 3.0, 6) if sinks else None
    exact, plain = expected(context, query, key, value, window, softcap, sinks)
    options = {"scaling": SCALING, "sliding_window": window, "softcap": softcap, "sinks": sinks}
    out = context.attend(backend, 7, query, key, value, **options)
    (layer_idx, captured_query, captured_key, lse, rest), *others = context.capture.collected
    assert_within_budget((out, lse), exact, plain)
    assert (layer_idx, captured_query is query, captured_key is key, others) == (7, True, True, [])
    where = {"lengths": context.lengths, "host_lengths": lengths}
    assert rest == {"scaling": SCALING, "softcap": softcap, **where}
    assert context.calls.total == 1


@pytest.mark.parametrize("dense_keys", [0, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4, 7])
@pytest.mark.parametrize(("nodes", "size"), [(3, 8), (7, 40), (17, 64), (69, 256)])
@pytest.mark.parametrize("lengths", [(64,), (50, 50)], ids=str)
def test_both_ways_of_the_torch_backend(lengths, nodes, size, groups, dtype, dense_keys, monkeypatch):
    monkeypatch.setattr(torch_hybrid, "DENSE_KEYS", dense_keys)
    context, query, key, value = build(lengths, nodes, 2, groups, size, size, dtype)
    exact, plain = expected(context, query, key, value, None, None, None)
    positions = {"positions": context.positions, "host_lengths": lengths, "memo": {}}
    options = {"scaling": SCALING, "sliding_window": None, "softcap": None}
    state = torch_hybrid.hybrid_attention(query, key, value, context.mask, **positions, **options)
    assert_within_budget(state, exact, plain)


def test_layers_with_different_windows_share_a_context(monkeypatch):
    context, query, key, value = build((90, 90), 17)
    for dense_keys in (0, 60, 4096):
        context = replace(context)
        monkeypatch.setattr(torch_hybrid, "DENSE_KEYS", dense_keys)
        # 92: slot 0 of the 90 is hidden from the deepest nodes only
        for layer, window in enumerate((None, 3, 40, 92, None, 200, 3)):
            context.capture = Capture()
            exact, plain = expected(context, query, key, value, window, None, None)
            out = context.attend(TORCH_BACKEND, layer, query, key, value, scaling=SCALING, sliding_window=window)
            assert_within_budget((out, context.capture.collected[0][3]), exact, plain)


def test_the_mask_of_a_step_is_built_once(monkeypatch):
    context, query, key, value = build((90,), 5)
    built = []
    monkeypatch.setattr(torch_hybrid, "pack_mask", lambda *args: built.append(1) or torch.zeros(1, 1, 15, 95))
    for layer in range(6):
        context.attend(TORCH_BACKEND, layer, query, key, value, scaling=SCALING)
    assert (len(built), context.calls.total) == (1, 6)


@pytest.mark.parametrize(("backend", "nodes"), [(REFERENCE_BACKEND, 1), (TORCH_BACKEND, 5)], ids=["reference", "torch"])
def test_a_step_compiles_into_one_graph(backend, nodes):
    """And into one more when the prefix grows, not into one per length."""
    torch.compiler.reset()
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def step(context, query, key, value):
        return [context.attend(backend, layer, query, key, value, scaling=SCALING) for layer in range(2)]

    with torch.no_grad():
        for length in (20, 21, 30):
            context, query, key, value = build((length,), nodes)
            key, value = key.nan_to_num(), value.nan_to_num()
            outs = step(replace(context), query, key, value)
            expected = context.attend(backend, 0, query, key, value, scaling=SCALING)
            torch.testing.assert_close(outs, [expected, expected])
    assert counter.frame_count <= 2


def test_padding_nodes_see_only_themselves():
    """And never matter to a real node, whatever they hold."""
    context, query, key, value = build((20,), 5)
    context.mask[0, 3:], context.mask[0, :, 3:] = False, False
    context.mask[0, [3, 4], [3, 4]] = True
    out = context.attend(TORCH_BACKEND, 0, query, key, value, scaling=SCALING)
    key[:, :, 23:25] += 1.0
    value[:, :, 23:25] += 1.0
    fresh = replace(context)
    assert torch.equal(fresh.attend(TORCH_BACKEND, 0, query, key, value, scaling=SCALING)[:, :, :3], out[:, :, :3])


def test_to_moves_the_tensors_and_shares_the_rest():
    capture, calls = Capture(), CallCounter()
    context = replace(build((4,), 3)[0], capture=capture, calls=calls)
    assert context.to("cpu") is context
    assert context.to(torch.device("cpu"), non_blocking=True) is context
    moved = context.to("meta")
    assert {moved.lengths.device.type, moved.depths.device.type, moved.mask.device.type} == {"meta"}
    assert (moved.capture, moved.calls, moved.host_lengths) == (capture, calls, (4,))
    assert context.to("meta") is moved  # one copy per device and step, however many layers ask
    assert moved.to("meta") is moved
