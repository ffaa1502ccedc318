"""Bounds of pages and the choice among them, against loops over single keys."""

import pytest
import torch

from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND
from hf_longspec.attention_backends.triton.backend import TRITON_BACKEND
from hf_longspec.modeling.quest.pages import KeyPages, PageContext, PageSizes, page_bounds
from tests.attention_backends.conftest import kernel_device  # noqa: F401 - a fixture
from tests.attention_backends.oracle import SCALING, assert_within_budget, double, plain_attention
from tests.attention_backends.reference import tree_attention
from tests.attention_backends.triton.machine import on
from tests.pairwise import pairwise

# 7 eps of float32, for sums of 7 products that are 20 at most
TOLERANCE = 2e-5
BATCH, KV_HEADS, SIZE = 2, 3, 7
BACKENDS = {"torch": TORCH_BACKEND, "triton": TRITON_BACKEND}


def random_case(length, groups, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(BATCH, KV_HEADS * groups, 1, SIZE, generator=generator)
    key, value = (torch.randn(BATCH, KV_HEADS, length, size, generator=generator) for size in (SIZE, 5))
    return query.to(dtype), key.to(dtype), value.to(dtype)


def bounds_by_loops(query, keys, page_size):
    """Return the largest sum of channels that each page could have, `[B][K][P]`, in Python floats."""
    groups, found = query.shape[1] // keys.shape[1], []
    for row_query, row_keys in zip(query.tolist(), keys.tolist(), strict=True):
        found.append([])
        for head, of_head in enumerate(row_keys):
            found[-1].append([])
            for start in range(0, len(of_head), page_size):
                page = of_head[start : start + page_size]
                sums = []
                for group in range(groups):
                    (q,) = row_query[head * groups + group]
                    sums.append(sum(max(x * k[channel] for k in page) for channel, x in enumerate(q)))
                found[-1][-1].append(max(sums))
    return torch.tensor(found)


@pytest.mark.parametrize(
    ("pages", "page_size", "groups", "dtype"),
    pairwise((1, 2, 7), (1, 3, 16), (1, 2, 5), (torch.float32, torch.bfloat16)),
)
def test_bounds(pages, page_size, groups, dtype):
    """They are those of loops over all keys, and no key of a page scores higher with any query of its group."""
    query, keys, _ = random_case(pages * page_size, groups, dtype)
    paged = keys.unflatten(2, (pages, page_size))
    found = page_bounds(query, paged.amin(3), paged.amax(3))
    torch.testing.assert_close(found, bounds_by_loops(query, keys, page_size), rtol=0, atol=TOLERANCE)
    scores = query.float() @ keys.float().repeat_interleave(groups, 1).transpose(2, 3)  # [B, H, 1, S]
    of_entries = found.repeat_interleave(page_size, 2).repeat_interleave(groups, 1)
    assert (scores.squeeze(2) <= of_entries + TOLERANCE).all()


def chosen_by_loops(query, keys, lengths, prefixes, chosen, page_size, num_sinks):
    """Return the slots that every row and KV head attends to, as sets."""
    bounds, found = bounds_by_loops(query, keys, page_size).tolist(), []
    for row, length in enumerate(lengths):
        full = prefixes[row] // page_size
        first = [page for page in range(full) if page * page_size < num_sinks]
        found.append([])
        for of_head in bounds[row]:
            others = sorted(set(range(full)) - set(first), key=lambda page: -of_head[page])
            best = (first + others)[: chosen[row]]
            slots = {page * page_size + k for page in best for k in range(page_size)}
            found[-1].append(slots | set(range(full * page_size, length)))
    return found


@pytest.mark.parametrize(
    ("name", "page_size", "groups", "prefixes", "spare"),
    pairwise(tuple(BACKENDS), (1, 3, 8, 16), (1, 2), ((61, 17), (48, 48), (5, 0)), (0, 2)),
)
def test_a_step(name, page_size, groups, prefixes, spare, request):
    """Attention to the entries that loops choose. Sizes may be larger than needed, and unused slots hold NaN."""
    backend = BACKENDS[name]
    device = request.getfixturevalue("kernel_device") if name == "triton" else torch.device("cpu")
    drafted, num_sinks = 2, 4
    lengths = [prefix + drafted for prefix in prefixes]
    query, key, value = random_case(80, groups, seed=page_size)
    for row, length in enumerate(lengths):
        key[row, :, length:] = value[row, :, length:] = torch.nan
    inputs = here, keys, _ = on(device, query, key, value)
    pages = KeyPages(page_size, num_sinks)
    pages.reserve(4, keys)
    full = [prefix // page_size for prefix in prefixes]
    chosen = [min(end, max(-(-num_sinks // page_size), end // 2)) for end in full]
    positions = torch.tensor(lengths)[:, None] - 1
    ends, counts, positions = on(device, torch.tensor(full), torch.tensor(chosen), positions)
    pages.update(4, keys, torch.zeros_like(ends), ends, max(full))
    most = key.shape[2] // page_size
    sizes = PageSizes(min(most, max(full) + spare), min(most, max(full) + spare, max(chosen) + spare), page_size + 1)
    context = PageContext(SeqLens(lengths), positions, ends, counts, pages, sizes)

    slots, counts = context.slots(4, here)
    known = key.nan_to_num(0.0)
    expected = chosen_by_loops(query, known, lengths, prefixes, chosen, page_size, num_sinks)
    visible = torch.zeros(*query.shape[:3], key.shape[2], dtype=torch.bool)
    for row, heads in enumerate(expected):
        for head, entries in enumerate(heads):
            used = slots.expand(-1, KV_HEADS, -1)[row, head, : counts[row]].tolist()
            assert len(used) == len(set(used)) and set(used) == entries
            visible[row, head * groups : (head + 1) * groups, :, list(entries)] = True
    out = context.attend(backend, 4, *inputs, scaling=SCALING).cpu()
    exact = tree_attention(*double(query, known, value.nan_to_num(0.0)), visible, scaling=SCALING)
    plain = plain_attention(query, known, value.nan_to_num(0.0), visible, scaling=SCALING)
    assert_within_budget((out, exact[1].float()), exact, plain)

    # layers without bounds, and with bounds of other heads than their attention gets, attend to everything
    pages.reserve(6, keys[:, :1])
    places, ends = torch.arange(key.shape[2]), torch.tensor(lengths)[:, None]
    for layer, window in ((5, 9), (6, None)):
        out = context.attend(backend, layer, *inputs, scaling=SCALING, sliding_window=window).cpu()
        near = (places < ends) & (places >= ends - (window or 80))
        seen = near[:, None, None].expand_as(visible)
        exact = tree_attention(*double(query, known, value.nan_to_num(0.0)), seen, scaling=SCALING)
        plain = plain_attention(query, known, value.nan_to_num(0.0), seen, scaling=SCALING)
        assert_within_budget((out, exact[1].float()), exact, plain)
    assert len(context.calls) == 3
