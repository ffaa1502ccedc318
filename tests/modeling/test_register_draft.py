"""A draft of another package is registered with one call and then found wherever a draft is looked up."""

import pytest
from transformers import CONFIG_MAPPING, MODEL_MAPPING, AutoModel

import hf_longspec
from hf_longspec import Eagle3DraftModel, LongSpecDraftModel, NgramConfig, NgramDraftModel
from hf_longspec.cli.models import open_draft
from hf_longspec.hub.repository import Card, render
from hf_longspec.modeling.register_draft import DRAFTS, preset_of, weightless_drafts
from hf_longspec.training.methods import TrainingMethod, method_of
from tests.modeling.calls import check_text
from tests.modeling.toy_draft import ToyConfig, ToyDraftModel

HERE = "tests.modeling.test_register_draft"


class ToyMethod(TrainingMethod):
    """A training method, which `training=` names."""


@pytest.fixture
def register():
    """`register_draft`, undone after the test."""
    before = dict(DRAFTS)
    yield hf_longspec.register_draft
    DRAFTS.clear()
    DRAFTS.update(before)
    CONFIG_MAPPING._extra_content.pop("toy", None)
    MODEL_MAPPING._extra_content.pop(ToyConfig, None)


def test_a_draft_of_another_package(register, target, tmp_path):
    register(ToyConfig, ToyDraftModel, card="tests.modeling:toy_card.md")
    model = target("llama", vocab_size=12)
    ToyDraftModel.from_target(model, politeness=3).save_pretrained(tmp_path)
    by_folder, by_name = open_draft(str(tmp_path), model), open_draft("toy", model, {"politeness": 4})
    assert type(by_folder) is type(by_name) is type(AutoModel.from_pretrained(tmp_path)) is ToyDraftModel
    assert (by_folder.setting("politeness"), by_name.setting("politeness")) == (3, 4)
    check_text(model, by_folder)
    card = render(by_folder, Card(base_model="org/target").complete(by_folder, "org/toy"))
    assert "A toy for [org/target]" in card and "It remembers one token." in card and "`politeness=3`" in card


def test_the_lazy_parts_are_found_when_they_are_used(register, target):
    register(ToyConfig, ToyDraftModel, training=f"{HERE}:ToyMethod")
    draft = ToyDraftModel.from_target(target("llama"))
    assert method_of(draft).__name__ == "ToyMethod"
    with pytest.raises(ValueError, match=r"ToyDraftModel was registered without a model card: pass card='package:fi"):
        render(draft, Card(base_model="org/target").complete(draft, "org/toy"))
    register(ToyConfig, ToyDraftModel, training="no_such_package.training:Method")  # nothing is imported here
    with pytest.raises(ImportError, match="no_such_package"):
        method_of(draft)


class LlamaLikeConfig(hf_longspec.DraftConfig):
    model_type = "llama"


class LlamaLikeDraftModel(ToyDraftModel):
    config_class = LlamaLikeConfig


@pytest.mark.parametrize(
    ("config", "model", "options", "message"),
    [
        (NgramConfig, ToyDraftModel, {}, "config_class"),  # by transformers
        (LlamaLikeConfig, LlamaLikeDraftModel, {}, "model_type='llama' belongs to a model of transformers"),
        (ToyConfig, ToyDraftModel, {"aliases": ("ngram",)}, "the name 'ngram' belongs to NgramDraftModel: choose"),
    ],
    ids=["config", "model_type", "alias"],
)
def test_what_cannot_be_registered(register, config, model, options, message):
    before = dict(DRAFTS)
    with pytest.raises(ValueError, match=message):
        register(config, model, **options)
    assert before == DRAFTS


def test_names_on_the_command_line():
    """The folder of each draft without weights, and the names that its authors gave it later."""
    names = weightless_drafts()
    assert {*names.values()} == {draft.model for draft in DRAFTS.values() if not draft.training and not draft.reads}
    assert all(names[model.config_class.short_name()] is model for model in names.values())
    assert names["self-int4"] is names["specattn"]
    assert preset_of("self-int4")["draft_weights"] == "int4" and not preset_of("specattn")
    assert names["ngram"] is NgramDraftModel and names["vegas"] is names["specattn"]
    assert LongSpecDraftModel not in names.values()


@pytest.mark.parametrize("kind", DRAFTS)
def test_every_name_of_a_registered_draft_can_be_resolved(kind):
    draft = DRAFTS[kind]
    assert "## Limits" in draft.card_template()
    for role in ("training", "convert"):
        assert getattr(draft, role) is None or draft.load(role) is not None


def test_a_subclass_that_is_not_registered_reads_its_own_format(target, tmp_path):
    class Own(Eagle3DraftModel):
        config_class = type("OwnConfig", (Eagle3DraftModel.config_class,), {"model_type": "own_eagle3"})

    Own.from_target(target("llama")).save_pretrained(tmp_path)
    assert type(Own.from_pretrained(tmp_path)) is Own
