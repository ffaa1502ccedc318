"""GrammarDraftModel: drafting from the grammar of a structured output alone."""

from typing import ClassVar

from ...generation.drafter import RootDrafter
from ...generation.target import TargetView
from ..base import DraftModel
from ..configuration_base import DraftConfig


class GrammarConfig(DraftConfig):
    """Configuration of [`GrammarDraftModel`]: the target's shapes only, as there are no weights."""

    model_type = "longspec_grammar"


class GrammarDraftModel(DraftModel):
    """Propose the tokens that a grammar forces: braces, the keys of a JSON schema, the rest of a choice.

    All drafts propose these in a call with a [`StructuredOutput`]; this one proposes nothing else, but for n-grams, and
    decodes one token per forward without a grammar. It has no weights.

    ```python
    structure = StructuredOutput(tokenizer, json_schema=schema)
    target.generate(**inputs, logits_processor=[structure], assistant_model=GrammarDraftModel.from_target(target))
    ```
    """

    config_class = GrammarConfig
    drafter_class = RootDrafter  # the loop appends what the grammar of a call forces
    weightless: ClassVar[bool] = True

    def max_nodes(self, target: TargetView) -> int:
        return 1
