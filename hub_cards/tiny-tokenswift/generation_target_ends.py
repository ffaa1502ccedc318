# Published with a draft by hf_longspec, Apache-2.0.
"""The two ends of a target that every trained draft shares: embedding and language-model head.

The modules are the target's own, found and called, never copied. What differs between architectures outside of them is
the rows of data below; tests/generation/test_target_parts.py compares each with the target's own hidden states and
logits.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

_GRANITE = ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared")

# Factor, by config field, between the embedding module and the first layer (where the module does not apply it).
EMBEDDING_FACTORS = dict.fromkeys((*_GRANITE, "hyperclovax"), "embedding_multiplier")

# Between the head module and the logits, by config field: a factor, a divisor.
LOGIT_FACTORS = dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), "logit_scale") | {"hyperclovax": "logits_scaling"}
LOGIT_DIVISORS = dict.fromkeys(_GRANITE, "logits_scaling")


class TargetEnds:
    """Embedding and language-model head of a target, with the factors around them.

    Args:
        model (`PreTrainedModel`): A causal language model, used as it is.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.config = model.config.get_text_config(decoder=True)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the target's first layer gets for `tokens` `(B, N)`: `(B, N, hidden)`."""
        hidden = self.model.get_input_embeddings()(tokens)
        factor = EMBEDDING_FACTORS.get(self.config.model_type)
        return hidden if factor is None else hidden * getattr(self.config, factor)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `(..., vocab)` of hidden states `(..., hidden)`; the target's final norm is not applied."""
        logits = self.model.get_output_embeddings()(hidden)
        kind = self.config.model_type
        if kind in LOGIT_FACTORS:
            logits = logits * getattr(self.config, LOGIT_FACTORS[kind])
        if kind in LOGIT_DIVISORS:
            logits = logits / getattr(self.config, LOGIT_DIVISORS[kind])
        softcap = getattr(self.config, "final_logit_softcapping", None)
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def device_of(module: nn.Module, default: torch.device) -> torch.device:
    """Where a module of a target runs; `default` for one without parameters."""
    # accelerate: weights may wait elsewhere than they run, and the modules that hold them know where that is
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    device = next((device for device in devices if device is not None), None)
    if device is None:
        device = next((parameter.device for parameter in module.parameters()), default)
    return torch.device(device)
