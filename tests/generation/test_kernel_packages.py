"""Hybrid targets whose functions are kernels of fla, mamba-ssm and causal-conv1d: stand-ins, which run on a CPU."""

import copy
import itertools
from functools import cache

import pytest
import torch

from hf_longspec.generation.special_cases.recurrences import limits_steps, mixers
from hf_longspec.generation.target import TargetView
from tests.generation.drafted_calls import ONE, RAGGED, arguments, check_a_commit, drafted, generated
from tests.generation.test_recurrent_states import SEEDS, SOAKED, TYPES
from tests.kernel_packages import CALLS, with_packages
from tests.pairwise import few, pairwise
from tests.robustness.enumeration import build

SEED_TOKENS = 5  # of the drafts of these tests
CASES = pairwise(TYPES, (True, False), (ONE, RAGGED))
CASES += [pytest.param(*one.values, *way, marks=one.marks) for one in SOAKED for way in ((True, RAGGED), (False, ONE))]
EVERY = [*TYPES, *SOAKED]
# Functions over several tokens; a type without one has convolutions alone.
KERNELS = {
    "qwen3_5_text": "chunk_gated_delta_rule",
    "kimi_linear": "chunk_kda",
    "granitemoehybrid": "mamba_chunk_scan_combined",
    "falcon_h1": "mamba_chunk_scan_combined",
    "jamba": "selective_scan_fn",
}
# causal-conv1d has windows of up to 4 inputs, and plain `generate` fails with it on the default ones of this type.
NARROWER = {"lfm3": {"conv_L_cache": 4}}


@pytest.fixture(scope="module")
def made():
    return cache(lambda name: build(name, SEEDS.get(name, 0), **NARROWER.get(name, {})))


def seen(name):
    """Numbers of tokens for which a kernel over several tokens ran."""
    return {tokens for kernel, tokens in CALLS if kernel == name and tokens > 1}


@pytest.mark.parametrize(("name", "chain", "lengths"), few(CASES, 6), ids=str)
def test_text_is_that_of_generate_with_the_same_packages(made, name, chain, lengths):
    """The prompts run their kernels, rows of any lengths in one forward, and the nodes of drafts do not."""
    with with_packages(made(name)) as model:
        inputs = arguments(lengths, do_sample=False)
        text = generated(model, **inputs)  # the first forwards set an attribute of the class
        assert TargetView(model).why_not() == [] and mixers(model)  # after the trial, which runs two tokens
        kernels = {kernel for kernel, tokens in CALLS if tokens == max(lengths)}
        assert "causal_conv1d_fn" in kernels and KERNELS.get(name, "causal_conv1d_fn") in kernels
        CALLS.clear()
        draft = drafted(model, chain, text, max(lengths))
        assert generated(model, **inputs, assistant_model=draft).tolist() == text.tolist()
        # Mamba-2 that limits its step sizes runs rows of different lengths as chains, which are nodes
        runs = len(lengths) == 1 or not limits_steps(model)
        for kernel in kernels - {"causal_conv1d_fn"}:
            assert seen(kernel) == ({max(lengths) - SEED_TOKENS} if runs else set())
        stats = draft.last_speculation
        assert 1 < stats.num_emitted_tokens / stats.num_spec_steps < draft.num_nodes


@pytest.mark.parametrize("name", EVERY)
def test_states_after_a_commit_are_those_of_their_single_steps(made, name):
    with with_packages(made(name)) as model:
        check_a_commit(model)


def transposed(function, *args, **options):
    """A kernel over a text or its tokens that keeps states `[B, H, V, K]`."""
    given = {name: state.mT for name in ("initial_state", "initial_states") if (state := options.get(name)) is not None}
    out, *state = function(*args, **options | given)
    return out, *(None if one is None else one.mT.contiguous() for one in state)


def transposed_in_place(function, state, *args, **options):
    own = state.mT.contiguous()
    out = function(own, *args, **options)
    state.copy_(own.mT)
    return out


def not_in_place(function, x, state, *args, **options):
    return function(x, state.clone(), *args, **options)


MAMBA = {"selective_state_update": transposed_in_place}
FAULTS = [
    ("qwen3_5_text", dict.fromkeys(("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"), transposed)),
    ("kimi_linear", dict.fromkeys(("chunk_kda", "fused_recurrent_kda"), transposed)),
    ("granitemoehybrid", {"mamba_chunk_scan_combined": transposed} | MAMBA),
    ("jamba", {"selective_scan_fn": transposed} | MAMBA),
    ("lfm2_moe", {"causal_conv1d_update": not_in_place}),
]


PRECISIONS = itertools.cycle([torch.bfloat16, torch.float32])


@pytest.mark.parametrize(
    ("name", "faults", "dtype", "length"),
    [(*fault, next(PRECISIONS), length) for length in (37, 5) for fault in FAULTS],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_kernels_with_states_of_another_kind_are_refused_by_name(made, name, faults, dtype, length):
    """Also after a prompt of which a prefill runs nothing. States of fla's kernels are square here."""
    model = copy.deepcopy(made(name)).to(dtype)
    with with_packages(model, **faults) as model:
        inputs = arguments((length,), do_sample=False)
        draft = drafted(model, True, torch.zeros(1, 80, dtype=torch.long), length)
        for _ in range(2):  # a refusal is not forgotten
            with pytest.raises(ValueError, match=rf"{type(model).__name__} cannot be verified: .*recurrent"):
                generated(model, **inputs, assistant_model=draft)
