"""SpecAttnDraftModel: training-free self-speculation with verification-guided sparse attention."""

from dataclasses import fields
from typing import Any, ClassVar

from ...attention_backends.scores import GRANULARITIES
from ...generation.drafter import Binding, Drafter
from ...generation.target import TargetView
from ..self_draft import SelfDraftModel
from .configuration_specattn import SpecAttnConfig
from .generation_specattn import SELECTIONS, SpecAttnDrafter, SpecAttnSettings

CHOICES = {
    "selection": SELECTIONS,
    "score": ("logits", "weights"),
    "granularity": GRANULARITIES,
}


class SpecAttnDraftModel(SelfDraftModel):
    """Draft with the target model itself on a small part of its cache (SpecAttn, later renamed Vegas).

    The draft has no weights. A published one consists of a config and the settings that were tuned for a target.

    ```python
    draft = SpecAttnDraftModel.from_target(target, num_assistant_tokens=6, sparse_ratio=0.07)
    target.generate(**inputs, assistant_model=draft)
    ```

    Source: https://huggingface.co/papers/2602.07223.
    """

    config_class = SpecAttnConfig
    settings: ClassVar[dict[str, Any]] = SelfDraftModel.settings | {
        "selection": "two_rows",
        # On real text 2.5 tokens are accepted with the paper's raw logits and 3.8 with weights: benchmarks/results.
        "score": "weights",
        "granularity": "layer",
    }

    def make_drafter(self, binding: Binding) -> Drafter:
        """Return a drafter with the present settings."""
        settings = SpecAttnSettings(**{field.name: self.setting(field.name) for field in fields(SpecAttnSettings)})
        return SpecAttnDrafter(binding, settings, self.gammas()[1:])

    def check_settings(self, target: TargetView) -> None:
        """Refuse unknown choices, numbers out of range, and per-head selection if heads share their cache."""
        if self.setting("selection") == "quest":
            raise ValueError(
                "selection='quest': this selection is called 'pages', since it is made once per verification by the "
                "queries of that verification, and Quest selects anew in every drafting step. Set selection='pages', "
                "or draft with QuestDraftModel."
            )
        for name, choices in CHOICES.items():
            self.check_choice(name, choices)
        super().check_settings(target)
        if target.has_latent_cache and self.setting("granularity") == "kv_head":
            raise ValueError(
                "granularity='kv_head': this target caches one latent for all heads (MLA), which cannot be selected "
                "per head. Use granularity='layer'."
            )
