"""Code of users beside a draft: the text, the state and the errors of stock `generate`, whatever the code is.

Each entry of the lists meets several kinds of draft, and each kind many entries; `make soak` runs all of them together.
"""

import copy
import dataclasses
import functools
import itertools
import re

import pytest

from tests.robustness.drafts import ALL_KINDS, make_draft
from tests.robustness.target_changes import CHANGES
from tests.robustness.user_code import ENDS, VOCAB, Applied
from tests.robustness.user_hooks import HOOKS
from tests.robustness.user_processors import PROCESSORS
from tests.tiny_targets import RandomTreeDraftModel, generate, tiny_target

pytestmark = pytest.mark.usefixtures("every_step_speculates")

LISTS = {"processor": PROCESSORS, "hook": HOOKS, "change": CHANGES}
# One prompt that is continued to the limit, and a batch whose rows end at different places.
CALLS = {"single": ((13,), None), "batch": ((13, 3, 9), ENDS)}
WHEN = ("fresh", "after")  # before the first call of a model and a draft, or after a good one
NEW = 10
# Drafts that propose nothing of their own in calls without a structure.
SILENT = ("plain", "grammar")
REJECTING = ("specattn",)  # whose sampled text differs from that of the plain loop, in its distribution alone
COUPLED = [kind for kind in ALL_KINDS if kind not in (*REJECTING, "plain")]
_configs = itertools.count()


def cases_of(names):
    """Cases with a kind of draft in turn, with a draft that is often right, and with sampling; half of them soak."""
    for number, name in enumerate(names):
        kinds = ALL_KINDS[number % len(ALL_KINDS)], ALL_KINDS[(number + 5) % len(ALL_KINDS)]
        cases = [(kinds[0], "single", "fresh"), (kinds[1], "batch", "after"), ("tree", "batch", "fresh")]
        cases += [("tree", "single", "after")]
        for place, case in enumerate(cases):
            is_quick = (place in (0, 3)) == (number % 2 == 0)
            marks = [] if is_quick else [pytest.mark.soak]
            yield pytest.param(name, *case, False, marks=marks, id="-".join((name, *case)))
        sampled = COUPLED[(number + 10) % len(COUPLED)], "batch", "fresh"
        marks = [pytest.mark.soak] if number % 4 else []
        yield pytest.param(name, *sampled, True, marks=marks, id="-".join((name, *sampled, "sampled")))


@functools.cache
def model_of(name="llama", settings=()):
    """A target that nobody changes."""
    return tiny_target(name, vocab_size=VOCAB, **dict(settings))


def fresh(entry):
    """A target with a config of its own, so that nothing is known of it from another one."""
    model = copy.deepcopy(model_of(entry.name, entry.settings))
    model.config.initializer_range = 0.02 + next(_configs) * 1e-9
    return model


def draft_for(kind, model):
    """A draft that is left out of calls that it cannot serve."""
    if kind == "tree":
        draft = RandomTreeDraftModel.from_target(model, gate=False)
        draft.luck = 0.9
    else:
        draft = make_draft(kind, model)
    draft.generation_config.on_unsupported = "plain"
    return draft


@functools.cache
def shared_draft(kind):
    return draft_for(kind, model_of())


def text_of(model, draft, how, do_sample=False, **options):
    """The text of a call, or its error."""
    lengths, ends = CALLS[how]
    options = {"max_new_tokens": NEW, "eos_token_id": ends, "do_sample": do_sample} | options
    try:
        return generate(model, draft, lengths, **options).tolist()
    except Exception as error:  # code of a user may raise anything
        return f"{type(error).__name__}: {error}"


def run(entry, kind, how, when, do_sample, hints=()):
    """The text of a call or its error, the state that a user sees afterwards, and the draft."""
    draft = None
    if entry.is_passed:
        model, draft = model_of(), kind and shared_draft(kind)
    else:
        model = fresh(entry)
        if when == "after":
            draft = kind and draft_for(kind, model)
            text_of(model, draft, how, do_sample, max_new_tokens=4)
    applied = entry.apply(model) or Applied()
    try:
        if kind and draft is None:
            draft = draft_for(kind, model)
        if kind == "tree":
            draft.hints = hints
        return text_of(model, draft, how, do_sample, **applied.options), applied.state(), draft
    except ValueError as error:  # a draft that is not made for such a model
        return f"ValueError: {error}", None, None
    finally:
        applied.undo()


@functools.cache
def reference(of, name, how, when, do_sample=False, kind=None):
    """The text and the state of a call without a draft, or with that of the plain loop."""
    return run(LISTS[of][name], kind, how, when, do_sample)[:2]


def check(of, name, kind, how, when, do_sample):
    """Greedy text is that of stock `generate`, sampled text that of the plain loop at an equal seed."""
    entry = LISTS[of][name]
    if do_sample and kind in REJECTING:
        return
    greedy, start = reference(of, name, how, when)[0], max(CALLS[how][0])
    hints = [] if isinstance(greedy, str) else [row[start:] for row in greedy]
    text, state, draft = run(entry, kind, how, when, do_sample, hints)
    used = draft and draft.last_speculation
    reason = used and used.reason
    loop = "plain" if do_sample and not reason else None  # a refused call is one of stock `generate`
    # a draft that was made before a change may be refused
    expected, state_of_plain = reference(of, name, how, "fresh" if loop else when, do_sample, loop)
    if of == "change" and isinstance(text, str) and (isinstance(expected, str) or text.startswith("ValueError: ")):
        return
    assert text == expected and state == state_of_plain, f"{text} instead of {expected}, {state}, {reason}"
    if entry.drafts:
        assert reason is None and used.num_forwards > 0
        assert kind in SILENT or used.num_draft_tokens > 0
    elif entry.drafts is False and not (entry.is_lie and kind in SILENT):
        assert re.search(entry.reason, reason or "nothing") and used.num_forwards == 0


@pytest.mark.parametrize(("name", "kind", "how", "when", "do_sample"), list(cases_of(PROCESSORS)))
def test_processors(name, kind, how, when, do_sample):
    check("processor", name, kind, how, when, do_sample)


@pytest.mark.parametrize(("name", "kind", "how", "when", "do_sample"), list(cases_of(HOOKS)))
def test_hooks(name, kind, how, when, do_sample):
    """A hook of a library, and one that truly says that it has no state, is used with a draft; no other is."""
    check("hook", name, kind, how, when, do_sample)


@pytest.mark.parametrize(("name", "kind", "how", "when", "do_sample"), list(cases_of(CHANGES)))
def test_changes(name, kind, how, when, do_sample):
    """The text of stock `generate`, or a refusal; an error if stock `generate` has one."""
    check("change", name, kind, how, when, do_sample)


NAMES = [(of, name) for of, entries in LISTS.items() for name in entries]


@pytest.mark.soak
@pytest.mark.parametrize("kind", [*ALL_KINDS, "tree"])
@pytest.mark.parametrize(("of", "name"), NAMES)
def test_every_draft(of, name, kind):
    for how, when, do_sample in itertools.product(CALLS, WHEN, (False, True)):
        check(of, name, kind, how, when, do_sample)


@pytest.mark.parametrize(("of", "name"), NAMES)
def test_effects(of, name):
    """They are those of the lists, which would test nothing otherwise."""
    entry = LISTS[of][name]
    text, _ = reference(of, name, "single", "fresh")
    bare, *_ = run(dataclasses.replace(entry, apply=lambda model: None), None, "single", "fresh", False)
    assert entry.has_effect is None or (text != bare) == entry.has_effect
