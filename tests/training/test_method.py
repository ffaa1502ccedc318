"""The look-up of the method that trains a draft."""

import pytest

from hf_longspec import LongSpecDraftModel, SpecAttnDraftModel, TokenSwiftDraftModel
from hf_longspec.training.method import TrainingMethod, method_of, trained_drafts


def test_every_name_leads_to_the_method_of_the_draft(draft, heads):
    assert trained_drafts() == {"longspec": LongSpecDraftModel, "tokenswift": TokenSwiftDraftModel}
    for model, name in ((draft, "LongSpecMethod"), (heads, "TokenSwiftMethod")):
        method = method_of(model)
        assert issubclass(method, TrainingMethod) and method.__name__ == name


def test_every_function_of_the_base_class_is_implemented():
    functions = {"prepare", "items", "loss", "evaluate", "summary", "facts", "stored"}
    for draft_class in trained_drafts().values():
        method = method_of(draft_class.__new__(draft_class))
        assert functions <= set(vars(method))


def test_a_draft_that_is_not_trained_is_refused_with_those_that_are(target):
    calls = r"LongSpecDraftModel.from_target\(target\) or TokenSwiftDraftModel.from_target\(target\)"
    for model in (SpecAttnDraftModel.from_target(target), target):
        with pytest.raises(ValueError, match=rf"{type(model).__name__}, which cannot be trained.*{calls}"):
            method_of(model)
