"""The gated delta rule over a text, and over single tokens."""

from fla.ops import normalised, recurrence
from tests.kernel_packages.counted import counted


@counted(lambda q, *_: q.shape[1])
def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    chunk_indices=None,
    cp_context=None,
    **kwargs,
):
    assert cu_seqlens is None and not (use_beta_sigmoid_in_kernel or allow_neg_eigval or state_v_first)
    if use_qk_l2norm_in_kernel:
        q, k = (normalised(x.float()).to(x.dtype) for x in (q, k))
    out, state = recurrence(q, k, v, g, beta, scale, initial_state)
    return out.to(q.dtype), state if output_final_state else None


@counted(lambda q, *_: q.shape[1])
def fused_recurrent_gated_delta_rule(
    q,
    k,
    v,
    g=None,
    gk=None,
    gv=None,
    beta=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
    **kwargs,
):
    assert gk is None and gv is None and cu_seqlens is None and not state_v_first
    if use_qk_l2norm_in_kernel:
        q, k = normalised(q.float()), normalised(k.float())
    out, state = recurrence(q, k, v, g, beta, scale, initial_state)
    return out.to(v.dtype), state if output_final_state else None
