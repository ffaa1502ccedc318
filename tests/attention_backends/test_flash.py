"""The flash-attn backend against stand-ins for the package, versions 2 and 3.

The stand-ins have the documented signatures, compute in float64, and refuse what the real functions refuse: unknown
arguments, other dtypes and layouts. Where a row has no keys, they return the same values as the real ones.
"""

import copy
import sys
from functools import lru_cache
from itertools import product
from types import ModuleType

import pytest
import torch

from hf_longspec.attention_backends import flash, reference, registry
from hf_longspec.attention_backends.contexts import TreeContext
from hf_longspec.attention_backends.flash import FLASH_BACKEND, compute_capability
from hf_longspec.attention_backends.interface import register
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.registry import AttentionCall
from hf_longspec.generation.cache import SpeculativeCache
from hf_longspec.generation.target import TargetView, chain_of_last_tokens
from hf_longspec.testing import tiny_prompts, tiny_target
from tests.attention_backends.oracle import (
    HALF_FACTOR,
    assert_within_budget,
    layout,
    plain_attention,
    random_tree,
    relative_error,
)
from tests.pairwise import pairwise

HALVES = (torch.float16, torch.bfloat16)
CALL = AttentionCall(torch.device("cpu"), torch.float16, 64, 64)


def attend(q, k_cache, v_cache, cache_seqlens, batch_idx, leftpad, softmax_scale, causal, window_size, softcap, empty):
    """The result of both versions for valid arguments: `(B, N, H, D)` and `(B, H, N)`."""
    for x in (q, k_cache, v_cache):
        assert x.dim() == 4 and x.dtype in HALVES and x.dtype == q.dtype, "only fp16 and bf16, all the same"
        assert x.shape[3] == q.shape[3] and (x is q or batch_idx is not None or x.shape[0] == q.shape[0])
        assert x.stride(-1) == 1, "must have contiguous last dimension"
    assert k_cache.shape == v_cache.shape and k_cache.shape[1] > 0 and q.shape[1] > 0
    assert q.shape[3] <= 256 and q.shape[3] % 8 == 0
    assert q.shape[2] % k_cache.shape[2] == 0, "number of heads in key/value must divide number of heads in query"
    for numbers in (cache_seqlens, batch_idx, leftpad):
        assert numbers is None or numbers.dtype == torch.int32, "seqlens_k must have dtype int32"
        assert numbers is None or (numbers.shape == q.shape[:1] and numbers.is_contiguous())
    assert type(softmax_scale) is float and type(softcap) is float and type(causal) is bool
    assert window_size == (-1, -1) and not causal, "not modelled here"
    batch, nodes, heads, size = q.shape
    groups = heads // k_cache.shape[2]
    out = torch.zeros(batch, nodes, heads, size, dtype=torch.float64)
    lse = torch.full((batch, heads, nodes), empty, dtype=torch.float64)
    for b, length in enumerate(cache_seqlens.tolist()):
        row = b if batch_idx is None else int(batch_idx[b])
        start = 0 if leftpad is None else int(leftpad[b])  # where keys begin; lengths count from slot 0 all the same
        assert 0 <= start <= length <= k_cache.shape[1] and 0 <= row < k_cache.shape[0]
        if start == length:
            continue
        keys, values = (x[row, start:length].double().repeat_interleave(groups, dim=1) for x in (k_cache, v_cache))
        scores = torch.einsum("nhd,shd->hns", q[b].double(), keys) * softmax_scale
        scores = softcap * torch.tanh(scores / softcap) if softcap > 0.0 else scores
        lse[b] = scores.logsumexp(-1)
        out[b] = torch.einsum("hns,shd->nhd", scores.softmax(-1), values)
    return out.to(q.dtype), lse.float()


def version_2(calls):
    """flash-attn 2.8, `flash_attn`."""

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
    ):
        calls.append((2, q.shape, k_cache))
        where, how = (cache_seqlens, cache_batch_idx, cache_leftpad), (softmax_scale, causal, window_size, softcap)
        # without splits, a row without keys has lse = +inf
        state = attend(q, k_cache, v_cache, *where, *how, torch.inf)
        return state if return_softmax_lse else state[0]

    return flash_attn_with_kvcache


def version_3(calls):
    """flash-attn 3, `flash_attn_interface`."""

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        qv=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        page_table=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None,
        rotary_seqlens=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=0,
        pack_gqa=None,
        sm_margin=0,
        return_softmax_lse=False,
    ):
        calls.append((3, q.shape, k_cache))
        where, how = (cache_seqlens, cache_batch_idx, cache_leftpad), (softmax_scale, causal, window_size, softcap)
        state = attend(q, k_cache, v_cache, *where, *how, -torch.inf)
        return state if return_softmax_lse else state[0]

    return flash_attn_with_kvcache


class Machine:
    """A GPU and the packages on it. `calls` records the calls of flash-attn."""

    def __init__(self, patch):
        self.patch, self.calls = patch, []
        patch.setattr(registry, "select", lru_cache(registry.choose))

    def __call__(self, capability, *packages):
        makers = {"flash_attn": version_2, "flash_attn_interface": version_3}
        for name, maker in makers.items():
            module = None  # as if it were not installed
            if name in packages:
                module = ModuleType(name)
                module.flash_attn_with_kvcache = maker(self.calls)
            self.patch.setitem(sys.modules, name, module)
        self.patch.setattr(flash, "compute_capability", lambda device: capability)
        flash.flash_function.cache_clear()
        return self.calls


@pytest.fixture
def machine(monkeypatch):
    yield Machine(monkeypatch)
    flash.flash_function.cache_clear()


@pytest.fixture(params=[2, 3])
def calls(request, machine):
    return machine(8, "flash_attn") if request.param == 2 else machine(9, "flash_attn", "flash_attn_interface")


def double(*tensors):
    return tuple(x.double() for x in tensors)


def make_tensors(batch, groups, nodes, slots, size, dtype, kv_heads=2):
    generator = torch.Generator().manual_seed(nodes)
    query = torch.randn(batch, nodes, kv_heads * groups, size, generator=generator).transpose(1, 2)
    key, value = (torch.randn(batch, kv_heads, slots, size, generator=generator) for _ in range(2))
    return tuple(x.to(dtype) for x in (query, key, value))


SIZES = (8, 64, 40)
LENGTHS = ((33,), (0, 5, 60), (50, 50), (0, 0), (1, 7))
LAYOUTS = ("buffer", "transposed", "contiguous", "columns")
SOFTCAPS = (None, 3.0, None)
# Every node count with every group size; the other axes rotate.
CASES = [
    pytest.param(*case, id="N{}-G{}-D{}-L{}-{}-cap{}-{}".format(*case))
    for case in (
        (
            *shape,
            SIZES[i % 3],
            LENGTHS[i % 5],
            LAYOUTS[(i + i // 4) % 4],
            SOFTCAPS[i // 2 % 3],
            HALVES[(i + i // 4) % 2],
        )
        for i, shape in enumerate(product((1, 3, 17), (1, 2, 4, 7)))
    )
]


@pytest.mark.parametrize(("nodes", "groups", "size", "lengths", "form", "softcap", "dtype"), CASES)
def test_prefix(nodes, groups, size, lengths, form, softcap, dtype, calls):
    query, key, value = make_tensors(len(lengths), groups, nodes, 70, size, dtype)
    options = {"scaling": size**-0.5, "softcap": softcap}
    on_host, lengths = lengths, torch.tensor(lengths)
    exact = reference.prefix_attention(*double(query, key, value), SeqLens(on_host), **options)
    visible = (torch.arange(70) < lengths[:, None])[:, None, None].expand(-1, 1, nodes, -1)
    plain = plain_attention(query, key, value, visible, **options)
    key, value = layout(key, form), layout(value, form)
    for known in (None, on_host):
        state = FLASH_BACKEND.prefix_attention(query, key, value, SeqLens(known, lengths), **options)
        assert_within_budget(state, exact, plain)
    assert len(calls) == 2
    _, shape, seen = calls[0]
    assert shape == (len(on_host), groups * nodes, 2, size)  # packed: one row per query head of a key head
    assert form == "columns" or seen.data_ptr() == key.data_ptr()  # the cache itself, no copy


@pytest.mark.parametrize(
    ("shape", "window", "dtype"),
    pairwise(((1, 4, (60, 8)), (7, 3, (0, 5, 60)), (5, 1, (33,))), (1, 2, 9, 33, 60), HALVES),
)
def test_prefix_in_a_window(shape, window, dtype, calls):
    """Depths out of order, as in a tree: every node has its own first key, and some see nothing of the prefix."""
    nodes, groups, lengths = shape
    query, key, value = make_tensors(len(lengths), groups, nodes, 70, 16, dtype)
    depths = torch.randint(0, nodes, (len(lengths), nodes), generator=torch.Generator().manual_seed(window))
    on_host, lengths = lengths, torch.tensor(lengths)
    options = {"scaling": 0.25, "positions": lengths[:, None] + depths, "sliding_window": window}
    exact = reference.prefix_attention(*double(query, key, value), SeqLens(on_host), **options)
    slots = torch.arange(70)
    visible = (slots < lengths[:, None])[:, None] & (slots > options["positions"][..., None] - window)
    plain = plain_attention(query, key, value, visible[:, None], scaling=0.25)
    key, value = layout(key, "buffer"), layout(value, "buffer")
    for known in (None, on_host):
        state = FLASH_BACKEND.prefix_attention(query, key, value, SeqLens(known, lengths), **options)
        assert_within_budget(state, exact, plain)
    one_row_per_node, packed = (len(on_host) * nodes, groups, 2, 16), (len(on_host), groups * nodes, 2, 16)
    shapes = [queries for _, queries, _ in calls]
    # a window that hides nothing is none, where the lengths are known
    assert shapes == [one_row_per_node, packed if max(on_host) + nodes <= window else one_row_per_node]
    assert all(seen.data_ptr() == key.data_ptr() for _, _, seen in calls)  # the cache itself, no copy


def test_a_window_that_just_hides_nothing(calls):
    """The deepest node of 4 after 6 tokens is at position 9: a window of 10 holds slot 0, one of 9 does not."""
    query, key, value = make_tensors(1, 2, 4, 7, 8, torch.float16)
    options = {"scaling": 1.0, "positions": torch.tensor([[6, 7, 8, 9]])}
    for window, rows in ((10, 1), (9, 4)):
        FLASH_BACKEND.prefix_attention(query, key, value, SeqLens([6]), sliding_window=window, **options)
        assert calls[-1][1][0] == rows


@pytest.mark.parametrize(
    ("lengths", "window", "softcap", "dtype"), pairwise(((40, 0, 13), (21,)), (None, 6, 30), (None, 3.0), HALVES)
)
def test_hybrid_tree_attention(lengths, window, softcap, dtype, calls):
    """Prefix by flash-attn, tree by torch, merged: against one softmax over both in float64."""
    nodes, size, batch = 9, 16, len(lengths)
    query, key, value = make_tensors(batch, 2, nodes, max(lengths) + nodes, size, dtype)
    mask, depths = random_tree(batch, nodes, torch.Generator().manual_seed(1))
    visible = torch.zeros(batch, nodes, key.shape[2], dtype=torch.bool)
    for b, length in enumerate(lengths):
        visible[b, :, :length] = True
        visible[b, :, length : length + nodes] = mask[b]
        if window is not None:
            own, of_nodes = length + depths[b][:, None], length + depths[b]
            place = torch.arange(key.shape[2]).index_copy(0, torch.arange(length, length + nodes), of_nodes)
            visible[b] &= own - place < window
    options = {"scaling": size**-0.5, "softcap": softcap}
    exact = reference.tree_attention(*double(query, key, value), visible, **options)
    plain = plain_attention(query, key, value, visible[:, None], **options)
    context = TreeContext(SeqLens(lengths), torch.tensor(lengths)[:, None] + depths, mask)
    out = context.attend(FLASH_BACKEND, 0, query, key, value, **options, sliding_window=window)
    assert_within_budget((out, exact[1].float()), exact, plain)
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_sparse(dtype, calls):
    query, key, value = make_tensors(3, 2, 3, 60, 16, dtype)
    generator = torch.Generator().manual_seed(1)
    indices = torch.stack([torch.randperm(60, generator=generator)[:20] for _ in range(6)]).view(3, 2, 20)
    counts = torch.tensor([20, 0, 7])
    exact = reference.sparse_attention(*double(query, key, value), indices, counts, scaling=0.25)
    plain = reference.sparse_attention(query, key, value, indices, counts, scaling=0.25)[0]
    assert_within_budget(FLASH_BACKEND.sparse_attention(query, key, value, indices, counts, scaling=0.25), exact, plain)
    assert len(calls) == 1


def test_nothing_to_do(calls):
    query, key, value = make_tensors(2, 2, 3, 7, 8, torch.float16)
    for nodes, slots in ((0, 7), (3, 0)):
        cut = query[:, :, :nodes], key[:, :, :slots], value[:, :, :slots]
        out, lse = FLASH_BACKEND.prefix_attention(*cut, SeqLens([0, 0]), scaling=1.0)
        assert (out.shape, lse.shape) == ((2, 4, nodes, 8), (2, 4, nodes))
        assert not out.any() and (lse == -torch.inf).all()
    assert calls == []  # the real functions divide by these


@pytest.mark.parametrize(
    ("capability", "packages", "version"),
    [
        (9, ("flash_attn", "flash_attn_interface"), 3),
        (9, ("flash_attn",), 2),
        (8, ("flash_attn", "flash_attn_interface"), 2),
        (10, ("flash_attn", "flash_attn_interface"), 2),  # version 3 is for Hopper
        (10, ("flash_attn_interface",), None),
        (8, ("flash_attn_interface",), None),
        (9, (), None),
    ],
)
def test_which_version_runs(machine, capability, packages, version):
    calls = machine(capability, *packages)
    query, key, value = make_tensors(1, 2, 3, 7, 8, torch.float16)
    if version is None:
        assert flash.why_not(CALL) in (
            "flash-attn is not installed, or does not import",
            "flash-attn (version 2, or 3 from its hopper folder) is not installed, or does not import",
        )
        with pytest.raises(ValueError, match=r"not installed.*\. Use attn_implementation=\"hf_longspec\"\."):
            FLASH_BACKEND.prefix_attention(query, key, value, SeqLens([7]), scaling=1.0)
    else:
        assert flash.why_not(CALL) is None
        FLASH_BACKEND.prefix_attention(query, key, value, SeqLens([7]), scaling=1.0)
        assert [call[0] for call in calls] == [version]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "dtype is torch.float32, expected one of torch.float16, torch.bfloat16"),
        ({"head_dim": 192, "value_dim": 128}, "head_dim is 192 and value_dim 128, expected equal ones"),
        ({"head_dim": 36, "value_dim": 36}, "divisible by 8"),
        ({"head_dim": 320, "value_dim": 320}, "at most 256"),
        ({"sliding_window": 4096}, None),  # cache_leftpad
        ({"softcap": 30.0, "sinks": True, "dtype": torch.bfloat16}, None),  # sinks enter after the merge
    ],
)
def test_why_not(changes, reason, calls):
    found = flash.why_not(CALL._replace(**changes))
    assert found is reason is None or reason in found


def test_why_not_without_such_a_gpu(machine):
    assert compute_capability(torch.device("cpu")) is None
    assert flash.why_not(CALL) == "device is cpu, expected an NVIDIA GPU"
    machine(7, "flash_attn")
    assert flash.why_not(CALL) == "the GPU has compute capability 7.x, expected 8.0 or higher"


def test_a_window_is_not_dropped(calls):
    query, key, value = make_tensors(1, 2, 3, 7, 8, torch.float16)
    with pytest.raises(ValueError, match="sliding_window is 4, but positions is None"):
        FLASH_BACKEND.prefix_attention(query, key, value, SeqLens([7]), scaling=1.0, sliding_window=4)
    assert not calls


def test_versions_before_left_padding_take_no_window(machine):
    machine(8, "flash_attn")
    new = sys.modules["flash_attn"].flash_attn_with_kvcache

    def old(q, k_cache, v_cache, cache_seqlens=None, softmax_scale=None, window_size=(-1, -1)):
        return new(q, k_cache, v_cache, cache_seqlens=cache_seqlens)

    sys.modules["flash_attn"].flash_attn_with_kvcache = old
    assert flash.why_not(CALL) is None
    reason = flash.why_not(CALL._replace(sliding_window=9))
    assert reason == "sliding_window is 9, and this flash-attn is too old for it, expected 2.6 or newer"


def test_it_runs_only_by_name(calls):
    assert registry.select(CALL).name == "hf_longspec_torch"
    assert registry.select(CALL, "hf_longspec_fa") is FLASH_BACKEND


def test_by_name_on_this_machine():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="hf_longspec_fa: device is cpu, expected an NVIDIA GPU"):
        registry.select(CALL, "hf_longspec_fa")


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_a_model_by_its_name(name, calls):
    """A tree over a cache, from transformers down to flash-attn: as close to float32 as sdpa in bfloat16, up to 2."""
    register()
    model, nodes = tiny_target(name).to(torch.bfloat16), 6
    input_ids, _ = tiny_prompts(model.config.vocab_size, (40, 40))
    with torch.no_grad():
        plain = model(input_ids).logits[:, -nodes:]
        exact = copy.deepcopy(model).float()(input_ids).logits[:, -nodes:].double()
    model.set_attn_implementation("hf_longspec_fa")
    with torch.no_grad():
        target, cache = TargetView(model), SpeculativeCache(model.config, 2, 40, tree_slots=nodes)
        target.prefill(input_ids[:, :-nodes], cache, None)
        assert not calls  # the prompt is not a prefix of anything
        cache.set_lengths([34, 34])
        actual = target.verify(chain_of_last_tokens(list(input_ids), nodes)[0], cache).logits
    assert relative_error(actual, exact) <= HALF_FACTOR * relative_error(plain, exact)
    assert len(calls) == model.config.num_hidden_layers


def test_the_stand_ins_are_strict(calls):
    """The checks of this file are able to fail."""
    function = flash.flash_function(9 if "flash_attn_interface" in sys.modules else 8)
    states = [x.transpose(1, 2) for x in make_tensors(1, 2, 3, 7, 8, torch.float16)]
    options = {"softmax_scale": 1.0, "window_size": (-1, -1), "softcap": 0.0}
    good = {"cache_seqlens": torch.tensor([7], dtype=torch.int32), **options}
    assert function(*states, **good).shape == (1, 3, 4, 8)
    with pytest.raises(TypeError, match="unexpected keyword"):
        function(*states, **good, scaling=1.0)
    with pytest.raises(AssertionError, match="int32"):
        function(*states, **good | {"cache_seqlens": torch.tensor([7])})
    with pytest.raises(AssertionError, match="fp16"):
        function(*(x.float() for x in states), **good)
    with pytest.raises(AssertionError, match="contiguous"):
        function(states[0], *(x.transpose(2, 3).contiguous().transpose(2, 3) for x in states[1:]), **good)
