"""The lists of docs/models.md: they agree with the code, and the types in them are what they say."""

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_longspec.modeling.mtp.convert_mtp import FAMILIES, REFUSED
from hf_longspec.modeling.mtp.modeling_mtp import MtpConfig, decoder_like
from tests.robustness.enumeration import outcome_of, quiet, stock_of
from tests.robustness.models_table import DRAFTS, between, lists, table
from tests.robustness.shrunk_configs import shrunk_config

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
# With a config class of transformers; others have the layers of one of these.
TYPES = [kind for family in FAMILIES.values() for kind in family.types if kind in CONFIG_MAPPING]


def test_the_page_has_the_lists_of_the_code():
    """`python -m tests.robustness.models_table --page docs/models.md --lists` writes them."""
    assert between(PAGE.read_text(), "lists")[1] == lists()


def test_types_with_the_same_outcomes_share_a_line():
    """Those that run under every draft have none."""
    whole = dict.fromkeys(DRAFTS, ("identical", ""))
    some, refused = whole | {"longspec": ("refused", "MLA")}, dict.fromkeys(DRAFTS, ("refused", "not causal"))
    text = table({"a": some, "b": whole, "c": refused, "d": some, "e": {"unbuildable": "no such layer"}})
    assert "| `a`, `d` | yes | yes | yes | yes | no | yes | MLA |" in text and "| `c` | not causal |" in text
    assert "`b`" not in text and text.endswith(": `e`.")


@pytest.mark.parametrize("model_type", TYPES)
def test_layers_of_listed_types_can_be_mtp_layers(model_type):
    with torch.device("meta"):
        decoder_like(MtpConfig.from_target(shrunk_config(model_type)))
    assert not model_type.startswith(tuple(REFUSED))


@pytest.mark.parametrize(
    ("model_type", "is_run"), [("gpt2", True), ("gemma3n_text", False), ("modernbert-decoder", False)]
)
def test_dflash_runs_where_eagle3_does(model_type, is_run):
    """Without a rotary embedding of the target, not with several streams of states, nor without a final norm."""
    with quiet():
        stock = stock_of(model_type)
        found = [outcome_of(stock, kind, "ragged") for kind in ("eagle3", "dflash")]
    assert found[0] == found[1]
    assert found[0].kind == ("identical" if is_run else "refused")
