"""SpecAttnDraftModel."""

from typing import Any, ClassVar

from ...attention_backends.scores import GRANULARITIES
from ...generation.target import TargetView
from ..configuration_base import DraftConfig
from ..settings import Setting
from ..shared.self_drafts import SelfDraftModel
from .generation_specattn import SELECTIONS, SpecAttnDrafter


class SpecAttnConfig(DraftConfig):
    model_type = "specattn"


class SpecAttnDraftModel(SelfDraftModel):
    """Draft with the target model itself on a small part of its cache (SpecAttn, later renamed Vegas).

    The draft has no weights. A published one consists of a config and the settings that were chosen for a target.

    ```python
    draft = SpecAttnDraftModel.from_target(target, num_assistant_tokens=6, sparse_ratio=0.07)
    target.generate(**inputs, assistant_model=draft)
    ```

    Source: https://huggingface.co/papers/2602.07223.
    """

    config_class = SpecAttnConfig
    drafter_class = SpecAttnDrafter
    settings: ClassVar[dict[str, Any]] = {
        "selection": Setting(
            "two_rows",
            "Rows of the verification that score the prefix: the first and the last (`two_rows`, as in the paper), "
            "`all_rows`, `accepted_rows` or `last_accepted`. `window` uses no scores and takes the last entries. `all` "
            "reads every entry in place, for short contexts.",
            choices=SELECTIONS,
        ),
        "score": Setting(
            "logits",
            "`logits` sums products of queries and keys over heads (Eq. 3 of the paper). `weights` takes attention "
            "probabilities, which cost more.",
            choices=("logits", "weights"),
        ),
        "granularity": Setting("layer", "One selection per `layer`, or one per `kv_head`.", choices=GRANULARITIES),
    }

    def check_settings(self, target: TargetView) -> None:
        super().check_settings(target)
        if target.has_latent_cache and self.setting("granularity") == "kv_head":
            raise ValueError(
                "granularity='kv_head': this target caches one latent for all heads (MLA), which cannot be selected "
                "per head. Use granularity='layer'."
            )
