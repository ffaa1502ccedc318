"""The look-up of the method that trains a draft."""

import pytest

from hf_longspec import Eagle3DraftModel, LongSpecDraftModel, SpecAttnDraftModel, TokenSwiftDraftModel
from hf_longspec.training.method import TrainingMethod, method_of, trained_drafts


def test_every_name_leads_to_the_method_of_the_draft(draft, heads, target):
    kinds = {"longspec": LongSpecDraftModel, "tokenswift": TokenSwiftDraftModel, "longspec_eagle3": Eagle3DraftModel}
    assert trained_drafts() == kinds
    eagle3 = Eagle3DraftModel.from_target(target)
    for model, name in ((draft, "LongSpecMethod"), (heads, "TokenSwiftMethod"), (eagle3, "Eagle3Method")):
        method = method_of(model)
        assert issubclass(method, TrainingMethod) and method.__name__ == name


def test_every_function_of_the_base_class_is_implemented():
    functions = {"prepare", "items", "loss", "evaluate", "summary", "facts", "stored"}
    for draft_class in trained_drafts().values():
        method = method_of(draft_class.__new__(draft_class))
        assert all(getattr(method, name) is not getattr(TrainingMethod, name) for name in functions)


def test_a_draft_that_is_not_trained_is_refused_with_those_that_are(target):
    classes = ("Eagle3DraftModel", "LongSpecDraftModel", "TokenSwiftDraftModel")
    calls = " or ".join(rf"{name}.from_target\(target\)" for name in classes)
    for model in (SpecAttnDraftModel.from_target(target), target):
        with pytest.raises(ValueError, match=rf"{type(model).__name__}, which cannot be trained.*{calls}"):
            method_of(model)
