"""TokenSwift's heads written out in float64, one number after the other."""

import torch


def restated_heads(tensors, prefix, hidden, num_heads, eps, chained):
    """What the language-model head gets of every head, `(num_heads, *hidden.shape)`, from tensors by their names."""

    def norm(states, scale):
        return states / (states.pow(2).mean(-1, keepdim=True) + eps).sqrt() * scale.double()

    first = hidden.double()
    states, current = [], first
    for head in range(num_heads):
        own = {
            name: tensors[f"{prefix}{head}.{name}.weight"] for name in ("input_layernorm", "linear", "post_layernorm")
        }
        before = current if chained else first
        current = before + norm(before, own["input_layernorm"]) @ own["linear"].double().T
        states.append(norm(current, own["post_layernorm"]))
    return torch.stack(states)
