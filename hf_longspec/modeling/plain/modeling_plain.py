"""Drafts that draft nothing by themselves.

[`PlainDraftModel`] is the decoding loop without drafted tokens, the autoregressive baseline of every benchmark.
[`GrammarDraftModel`] is this loop with the tokens that the grammar of a call forces.
"""

from typing import Any, ClassVar

from ...generation.drafter import RootDrafter
from ...generation.target import TargetView
from ..base import DraftModel
from ..configuration_base import DraftConfig
from ..settings import COMMON


class PlainConfig(DraftConfig):
    model_type = "longspec_plain"


class PlainDraftModel(DraftModel):
    """Run the decoding loop without drafting: one token per forward, on the same cache and kernels.

    ```python
    plain = PlainDraftModel.from_target(target)
    target.generate(**inputs, assistant_model=plain)
    ```
    """

    config_class = PlainConfig
    drafter_class = RootDrafter
    weightless: ClassVar[bool] = True
    takes_ngrams: ClassVar[bool] = False  # the baseline stays one token per forward
    settings: ClassVar[dict[str, Any]] = {"forced_tokens": 0}

    def max_nodes(self, target: TargetView) -> int:
        return 1


class GrammarConfig(DraftConfig):
    model_type = "longspec_grammar"


class GrammarDraftModel(PlainDraftModel):
    """Propose the tokens that a grammar forces: braces, the keys of a JSON schema, the rest of a choice.

    All drafts propose these in a call with a [`StructuredOutput`]; this one proposes nothing else, but for n-grams, and
    decodes one token per forward without a grammar.

    ```python
    structure = StructuredOutput(tokenizer, json_schema=schema)
    target.generate(**inputs, logits_processor=[structure], assistant_model=GrammarDraftModel.from_target(target))
    ```
    """

    config_class = GrammarConfig
    takes_ngrams: ClassVar[bool] = True
    settings: ClassVar[dict[str, Any]] = {"forced_tokens": COMMON["forced_tokens"]}
