"""TokenSwift's heads written out in float64, one number after the other."""

import torch


def restated_heads(tensors, prefix, hidden, num_heads, eps, chained, embedded=None):
    """What every head gives to the language-model head; head i (from 1) at t sees `embedded[..., t + i, :]`."""

    def norm(states, name):
        scale = tensors[f"{prefix}{head}.{name}.weight"].double()
        return states / (states.pow(2).mean(-1, keepdim=True) + eps).sqrt() * scale

    def linear(states, name):
        return states @ tensors[f"{prefix}{head}.{name}.weight"].double().T

    first = hidden.double()
    states, current = [], first
    for head in range(num_heads):
        before = current if chained else first
        given = norm(before, "input_layernorm")
        if embedded is not None:
            seen = torch.zeros_like(first)
            for place in range(first.shape[-2] - head - 1):
                seen[..., place, :] = embedded[..., place + head + 1, :]
            fused = linear(torch.cat([given, norm(seen, "token_layernorm")], -1), "fusion")
            given = fused / (1 + (-fused).exp())
        current = before + linear(given, "linear")
        states.append(norm(current, "post_layernorm"))
    return torch.stack(states)
