"""What an EAGLE-3 draft reads of its target."""

import torch


@torch.no_grad()
def residual_stream(model, ids):
    """Return the input of every layer and of the final norm, after which `hidden_states` has its last entry; logits."""
    final = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, inputs: final.append(inputs[0]))
    out = model(ids, output_hidden_states=True)
    handle.remove()
    return [*out.hidden_states[:-1], *final], out.logits
