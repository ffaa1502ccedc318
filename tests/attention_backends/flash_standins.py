"""Stand-ins for flash-attn 2 and 3: the documented arguments, in float64, with the refusals of the real functions."""

import sys
from functools import lru_cache
from types import ModuleType, SimpleNamespace

import torch

from hf_longspec.attention_backends import flash, registry

HALVES = (torch.float16, torch.bfloat16)
# Arguments of flash_attn_with_kvcache in their order: of flash-attn 2.8, and of version 3 (hopper folder).
NAMES = {
    2: "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table "
    "softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse",
    3: "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table "
    "cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale causal "
    "window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin "
    "return_softmax_lse",
}
ARGUMENTS = {version: names.split() for version, names in NAMES.items()}
# Without splits, a row without keys has lse = +inf in version 2.
EMPTY = {2: torch.inf, 3: -torch.inf}
PACKAGES = {2: (8, "flash_attn"), 3: (9, "flash_attn", "flash_attn_interface")}


def stand_in(version, calls):
    """Return `flash_attn_with_kvcache` of a version, which notes its calls."""

    def flash_attn_with_kvcache(q, k_cache, v_cache, **options):
        if unknown := options.keys() - set(ARGUMENTS[version][3:]):
            raise TypeError(f"got an unexpected keyword argument {unknown}")
        calls.append((version, q.shape, k_cache))
        state = attend(version, q, k_cache, v_cache, **options)
        if version == 3:  # partial results of its splits follow, or empty tensors
            state = (*state, torch.tensor([]), torch.tensor([]))
        return state if options.get("return_softmax_lse") else state[0]

    return flash_attn_with_kvcache


def attend(version, q, k_cache, v_cache, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, **options):
    """Return `(B, N, H, D)` and `(B, H, N)` for valid arguments."""
    scale, softcap = options.get("softmax_scale"), options.get("softcap", 0.0)
    for x in (q, k_cache, v_cache):
        assert x.dim() == 4 and x.dtype in HALVES and x.dtype == q.dtype, "only fp16 and bf16, all the same"
        assert x.shape[3] == q.shape[3] and (x is q or cache_batch_idx is not None or x.shape[0] == q.shape[0])
        assert x.stride(-1) == 1, "must have contiguous last dimension"
    assert k_cache.shape == v_cache.shape and k_cache.shape[1] > 0 and q.shape[1] > 0
    assert q.shape[3] <= 256 and q.shape[3] % 8 == 0
    assert q.shape[2] % k_cache.shape[2] == 0, "number of heads in key/value must divide number of heads in query"
    for numbers in (cache_seqlens, cache_batch_idx, cache_leftpad):
        assert numbers is None or numbers.dtype == torch.int32, "seqlens_k must have dtype int32"
        assert numbers is None or (numbers.shape == q.shape[:1] and numbers.is_contiguous())
    assert type(scale) is float and type(softcap) is float and options.get("causal", False) is False
    assert options.get("window_size", (-1, -1)) == (-1, -1), "not modelled here"
    batch, nodes, heads, size = q.shape
    groups = heads // k_cache.shape[2]
    out = torch.zeros(batch, nodes, heads, size, dtype=torch.float64)
    lse = torch.full((batch, heads, nodes), EMPTY[version], dtype=torch.float64)
    for b, length in enumerate(cache_seqlens.tolist()):
        row = b if cache_batch_idx is None else int(cache_batch_idx[b])
        start = 0 if cache_leftpad is None else int(cache_leftpad[b])  # lengths count from slot 0 all the same
        assert 0 <= start <= length <= k_cache.shape[1] and 0 <= row < k_cache.shape[0]
        if start == length:
            continue
        keys, values = (x[row, start:length].double().repeat_interleave(groups, dim=1) for x in (k_cache, v_cache))
        scores = torch.einsum("nhd,shd->hns", q[b].double(), keys) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap > 0.0 else scores
        lse[b] = scores.logsumexp(-1)
        out[b] = torch.einsum("hns,shd->nhd", scores.softmax(-1), values)
    return out.to(q.dtype), lse.float()


class Machine:
    """A GPU and the packages on it. `calls` records the calls of flash-attn, `loaded` what came from the Hub."""

    def __init__(self, patch):
        self.patch, self.calls, self.loaded = patch, [], []
        patch.setattr(registry, "select", lru_cache(registry.choose))

    def __call__(self, capability, *packages):
        for name, version in (("flash_attn", 2), ("flash_attn_interface", 3)):
            module = None  # as if it were not installed
            if name in packages:
                module = ModuleType(name)
                module.flash_attn_with_kvcache = stand_in(version, self.calls)
            self.patch.setitem(sys.modules, name, module)
        self.patch.setitem(sys.modules, "kernels", self._kernels(packages) if "kernels" in packages else None)
        self.patch.setattr(flash, "compute_capability", lambda device: capability)
        flash.flash_function.cache_clear()
        return self.calls

    def _kernels(self, packages):
        """The package `kernels`; of the Hub's builds those that are named, others are not found."""

        def get_kernel(repo_id, *, revision=None, version=None):
            if (revision is None) == (version is None):
                raise ValueError("Either a revision or a version must be specified.")
            if repo_id not in packages:
                raise FileNotFoundError(f"Kernel `{repo_id}` has no build for this torch")
            self.loaded.append((repo_id, version))
            number = {"kernels-community/flash-attn2": 2, "kernels-community/flash-attn3": 3}[repo_id]
            return SimpleNamespace(flash_attn_with_kvcache=stand_in(number, self.calls))

        return SimpleNamespace(get_kernel=get_kernel)
