"""SpecAttnDraftModel: training-free self-speculation with verification-guided sparse attention."""

from dataclasses import fields
from typing import Any, ClassVar

from ...attention_backends.scores import GRANULARITIES
from ...generation.drafter import Binding, Drafter
from ...generation.target import TargetView
from ..base import DraftModel
from ..tree_choices import other_trees
from .configuration_specattn import SpecAttnConfig
from .generation_specattn import SELECTIONS, SpecAttnDrafter, SpecAttnSettings

CHOICES = {
    "selection": SELECTIONS,
    "score": ("logits", "weights"),
    "granularity": GRANULARITIES,
    "acceptance": ("rejection", "coupled"),
}


class SpecAttnDraftModel(DraftModel):
    """Draft with the target model itself on a small part of its cache (SpecAttn, later renamed Vegas).

    The draft has no weights. A published one consists of a config and the settings that were tuned for a target.

    ```python
    draft = SpecAttnDraftModel.from_target(target, num_assistant_tokens=6, sparse_ratio=0.07)
    target.generate(**inputs, assistant_model=draft)
    ```

    Source: https://huggingface.co/papers/2602.07223.
    """

    config_class = SpecAttnConfig
    weightless: ClassVar[bool] = True
    settings: ClassVar[dict[str, Any]] = {
        "num_assistant_tokens": 4,
        "tree_choices": None,
        "sparse_ratio": 0.07,
        "sparse_min_tokens": 256,
        "selection": "two_rows",
        # On real text 2.5 tokens are accepted with the paper's raw logits and 3.8 with weights: benchmarks/results.
        "score": "weights",
        "granularity": "layer",
        "acceptance": "rejection",
    }

    def make_drafter(self, binding: Binding) -> Drafter:
        """Return a drafter with the present settings."""
        settings = SpecAttnSettings(**{field.name: self.setting(field.name) for field in fields(SpecAttnSettings)})
        return SpecAttnDrafter(binding, settings, self._gammas()[1:])

    def max_nodes(self, target: TargetView) -> int:
        """Return the number of nodes of the longest chain, root included."""
        return max(self._gammas()) + 1

    def _gammas(self) -> list[int]:
        """Return the number of drafted tokens of all chains, the configured one first."""
        gamma = int(self.setting("num_assistant_tokens"))
        return [gamma, *other_trees(gamma, self.setting("tree_choices"), "num_assistant_tokens")]

    def check_settings(self, target: TargetView) -> None:
        """Refuse unknown choices, numbers out of range, and per-head selection if heads share their cache."""
        if self.setting("selection") == "quest":
            raise ValueError(
                "selection='quest': this selection is called 'pages', since it is made once per verification by the "
                "queries of that verification, and Quest selects anew in every drafting step. Set selection='pages'."
            )
        for name, choices in CHOICES.items():
            if (value := self.setting(name)) not in choices:
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(choices)}.")
        for name in ("num_assistant_tokens", "sparse_min_tokens"):
            if not isinstance(value := self.setting(name), int) or value < 1:
                raise ValueError(f"{name}={value!r}: expected an integer of at least 1.")
        for gamma in self._gammas()[1:]:
            if type(gamma) is not int or gamma < 1:
                raise ValueError(f"tree_choices: num_assistant_tokens={gamma!r}: expected an integer of at least 1.")
        if not isinstance(ratio := self.setting("sparse_ratio"), int | float) or not 0 < ratio <= 1:
            raise ValueError(f"sparse_ratio={ratio!r}: expected a number in (0, 1].")
        if target.has_latent_cache and self.setting("granularity") == "kv_head":
            raise ValueError(
                "granularity='kv_head': this target caches one latent for all heads (MLA), which cannot be selected "
                "per head. Use granularity='layer'."
            )

    def check_sampling(self) -> None:
        """Refuse n-grams together with drawn tokens, as rejection sampling supports chains of drawn tokens only."""
        if self.setting("acceptance") == "rejection" and (candidates := self.setting("ngram_candidates")):
            raise ValueError(
                f"acceptance='rejection' with ngram_candidates={candidates}: when sampling, drafted tokens that are "
                "drawn from a distribution cannot share a tree with n-grams. Use acceptance='coupled', or "
                "ngram_candidates=0."
            )
