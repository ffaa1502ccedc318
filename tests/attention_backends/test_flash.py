"""The flash-attn backend against stand-ins for the package: what is called, with what, and what is refused."""

import pytest
import torch

from hf_longspec.attention_backends import flash, registry
from hf_longspec.attention_backends.flash import FLASH_BACKEND, compute_capability
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.registry import AttentionCall
from tests.attention_backends.oracle import layout, tensors

HUB_2, HUB_3 = "kernels-community/flash-attn2", "kernels-community/flash-attn3"
CALL = AttentionCall(torch.device("cpu"), torch.float16, 64, 64)


@pytest.mark.parametrize(("window", "told"), [(None, True), (9, True), (66, True), (67, True), (67, False)])
def test_one_call_on_the_cache_itself(window, told, calls):
    """A row per query head of a key head, or per node where a window hides a slot: the deepest is at position 66."""
    lengths, nodes, groups = (0, 5, 60), 7, 3
    query, key, value = tensors(3, 2, groups, nodes, 70, 16, torch.float16)
    key, value = layout(key, "buffer"), layout(value, "buffer")
    where = {"positions": torch.tensor(lengths)[:, None] + torch.arange(nodes), "sliding_window": window}
    lens = SeqLens(lengths if told else None, torch.tensor(lengths))
    FLASH_BACKEND.prefix_attention(query, key, value, lens, scaling=0.25, **where)
    ((_, shape, seen),) = calls
    hides = window is not None and not (told and max(lengths) + nodes <= window)
    assert shape == ((3 * nodes, groups, 2, 16) if hides else (3, groups * nodes, 2, 16))
    assert seen.data_ptr() == key.data_ptr()  # no copy


@pytest.mark.parametrize(
    ("capability", "packages", "version"),
    [
        (9, ("kernels", HUB_2, HUB_3), 3),
        (8, ("kernels", HUB_2, HUB_3), 2),
        (10, ("kernels", HUB_3), None),
        (9, ("flash_attn", "kernels", HUB_3), 2),  # what is installed comes first
        (9, ("flash_attn", "flash_attn_interface"), 3),
        (10, ("flash_attn", "flash_attn_interface"), 2),  # version 3 is for Hopper
        (9, (), None),
    ],
)
def test_which_version_runs(machine, capability, packages, version):
    calls = machine(capability, *packages)
    query, key, value = tensors(1, 2, 2, 3, 7, 8, torch.float16)
    if version is None:
        missing = " cannot be imported, and the package kernels found no build of it on the Hub"
        assert flash.why_not(CALL) in (
            f"flash-attn{missing}",
            f"flash-attn (version 2, or 3 from its hopper folder){missing}",
        )
    else:
        assert flash.why_not(CALL) is None
        FLASH_BACKEND.prefix_attention(query, key, value, SeqLens([7]), scaling=1.0)
        assert [call[0] for call in calls] == [version]
        from_the_hub = [] if "flash_attn" in packages else [{2: (HUB_2, 4), 3: (HUB_3, 1)}[version]]
        assert machine.loaded == from_the_hub


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "dtype is torch.float32, expected one of torch.float16, torch.bfloat16"),
        ({"head_dim": 192, "value_dim": 128}, "head_dim is 192 and value_dim 128, expected equal ones"),
        ({"head_dim": 36, "value_dim": 36}, "divisible by 8"),
        ({"head_dim": 320, "value_dim": 320}, "at most 256"),
        ({"sliding_window": 4096}, None),
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


def test_it_runs_only_by_name(calls):
    assert registry.select(CALL).name == "hf_longspec_torch"
    assert registry.select(CALL, "hf_longspec_fa") is FLASH_BACKEND
