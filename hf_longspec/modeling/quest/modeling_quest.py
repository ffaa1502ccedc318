"""QuestDraftModel."""

from typing import Any, ClassVar

from ...generation.target import TargetView
from ..configuration_base import DraftConfig
from ..settings import Setting
from ..shared.self_drafts import SelfDraftModel
from .generation_quest import QuestDrafter


class QuestConfig(DraftConfig):
    model_type = "longspec_quest"


class QuestDraftModel(SelfDraftModel):
    """Draft with the target model itself on the pages of its cache that fit the query of every step.

    The draft has no weights. A published one consists of a config and the settings that were chosen for a target.

    ```python
    draft = QuestDraftModel.from_target(target, num_assistant_tokens=6, sparse_ratio=0.1)
    target.generate(**inputs, assistant_model=draft)
    ```

    Sources: the selection is that of Quest, https://huggingface.co/papers/2406.10774; drafting with it is a draft of
    MagicDec, https://huggingface.co/papers/2408.11049.
    """

    config_class = QuestConfig
    drafter_class = QuestDrafter
    settings: ClassVar[dict[str, Any]] = {
        "page_size": Setting(16, "Tokens of a page.", int),
        "num_dense_layers": Setting(2, "Number of first layers that read the whole prefix.", int, least=0),
    }

    def check_settings(self, target: TargetView) -> None:
        super().check_settings(target)
        if target.has_latent_cache:
            raise ValueError(
                "this target caches one latent for all heads (MLA) and computes the keys from it in every step, so "
                "there are no pages of keys to choose from. Use SpecAttnDraftModel, or another draft."
            )
