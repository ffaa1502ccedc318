"""Kimi Delta Attention over a text, and over single tokens."""

import torch

from fla.ops import normalised, recurrence
from tests.kernel_packages.counted import counted


@counted(lambda q, *_: q.shape[1])
def chunk_kda(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    safe_gate=False,
    lower_bound=None,
    disable_recompute=False,
    return_intermediate_states=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    cp_context=None,
    use_graph=False,
    max_num_seqs=None,
    **kwargs,
):
    assert cu_seqlens is None and not (use_gate_in_kernel or use_beta_sigmoid_in_kernel or state_v_first)
    if initial_state is not None:
        assert initial_state.dtype == torch.float32, "initial_state must be in float32."
    if use_qk_l2norm_in_kernel:
        q, k = (normalised(x.float()).to(x.dtype) for x in (q, k))
    out, state = recurrence(q, k, v, g, beta, scale, initial_state)
    return out.to(q.dtype), state if output_final_state else None


@counted(lambda q, *_: q.shape[1])
def fused_recurrent_kda(
    q,
    k,
    v,
    g,
    beta,
    A_log=None,
    dt_bias=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    lower_bound=None,
    state_v_first=False,
    cu_seqlens=None,
    **kwargs,
):
    assert cu_seqlens is None and not (use_gate_in_kernel or use_beta_sigmoid_in_kernel or state_v_first)
    if use_qk_l2norm_in_kernel:
        q, k = normalised(q.float()), normalised(k.float())
    out, state = recurrence(q, k, v, g, beta, scale, initial_state)
    return out.to(v.dtype), state if output_final_state else None
