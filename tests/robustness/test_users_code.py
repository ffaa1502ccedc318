"""Code of users beside a draft: the text, the state and the errors of stock `generate`, whatever the code is.

The lists are in user_*.py and target_*.py; each entry meets several kinds of draft, and each kind many entries.
"""

import copy
import functools
import itertools
import multiprocessing
import subprocess
import sys

import pytest

# they add to the lists
from tests.robustness import (  # noqa: F401
    target_patches,
    user_declarations,
    user_forwards,
    user_places,
    user_rules,
)
from tests.robustness.drafts import ALL_KINDS, make_draft
from tests.robustness.target_changes import CHANGES
from tests.robustness.user_hooks import HOOKS
from tests.robustness.user_processors import ENDS, PROCESSORS, VOCAB
from tests.tiny_targets import RandomTreeDraftModel, generate, tiny_target

pytestmark = pytest.mark.usefixtures("every_step_speculates")

# One prompt that is continued to the limit, and a batch whose rows end at different places.
CALLS = {"single": ((13,), None), "batch": ((13, 3, 9), ENDS)}
NEW = 10
# Drafts that propose nothing of their own in calls without a structure.
SILENT = ("plain", "grammar")
REJECTING = ("specattn",)  # whose sampled text differs from that of the plain loop, in its distribution alone
COUPLED = [kind for kind in ALL_KINDS if kind not in (*REJECTING, "plain")]
_configs = itertools.count()
WAYS = [(how, do_sample) for how in CALLS for do_sample in (False, True)]


def turned(names):
    """Cases with two greedy kinds of draft and a sampled one for each name; most sampled ones are marked soak."""
    for number, name in enumerate(names):
        for place, (how, do_sample) in enumerate([("single", False), ("batch", False), ("batch", True)]):
            kinds = COUPLED if do_sample else ALL_KINDS
            kind = kinds[(number + 5 * place) % len(kinds)]
            marks = [pytest.mark.soak] if do_sample and number % 6 else []
            sampled = "sampled" if do_sample else "greedy"
            yield pytest.param(name, kind, how, do_sample, marks=marks, id=f"{name}-{kind}-{how}-{sampled}")


@functools.cache
def model_of(name, settings=()):
    """A target that nobody changes."""
    return tiny_target(name, vocab_size=VOCAB, **dict(settings))


def fresh(name="llama", settings=()):
    """A target with a config of its own, so that nothing is known of it from another one."""
    model = copy.deepcopy(model_of(name, settings))
    model.config.initializer_range = 0.02 + next(_configs) * 1e-9
    return model


def draft_for(kind, model):
    """A draft that is left out of calls that it cannot serve."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if kind == "tree":
        draft = RandomTreeDraftModel.from_target(model, gate=False)
        draft.luck = 0.9
    else:
        draft = make_draft(kind, model)
    draft.generation_config.on_unsupported = "plain"
    return draft


def text_of(model, draft, how, do_sample, **options):
    """The text of a call, or its error."""
    lengths, ends = CALLS[how]
    options = {"max_new_tokens": NEW, "eos_token_id": ends, "do_sample": do_sample} | options
    try:
        return generate(model, draft, lengths, **options).tolist()
    except Exception as error:  # code of a user may raise anything
        return f"{type(error).__name__}: {error}"


def is_refused(draft):
    """Whether the last call was decoded without the draft."""
    return draft is not None and draft.last_speculation is not None and draft.last_speculation.reason is not None


def loop_of(draft, do_sample):
    """The kind of draft whose text is expected: `None` for that of stock `generate`, in greedy and refused calls."""
    return "plain" if do_sample and not is_refused(draft) else None


def check_same(expected, found, draft):
    """Compare texts or states without and with a draft; the message says how the draft was used."""
    how = "an error" if isinstance(found, str) else "a refusal" if is_refused(draft) else "silence"
    assert found == expected, f"another outcome, in {how}: {found} instead of {expected}"


# Logits processors.


@functools.cache
def draft_of(kind):
    return draft_for(kind, model_of("llama"))


def processed(name, draft, how, do_sample):
    """The text of a call with processors, or its error; and their state afterwards."""
    model = model_of("llama")
    made = PROCESSORS[name].make(model)
    text = text_of(model, draft, how, do_sample, logits_processor=made.processors, **made.kwargs)
    return text, made.state()


@functools.cache
def reference_of_processors(name, how, do_sample=False, draft=None):
    return processed(name, draft and draft_of(draft), how, do_sample)


def check_processors(name, kind, how, do_sample):
    entry, draft = PROCESSORS[name], draft_of(kind)
    if do_sample and (kind in REJECTING or not entry.is_sampled):
        return
    found = processed(name, draft, how, do_sample)
    expected = reference_of_processors(name, how, do_sample, loop_of(draft, do_sample))
    check_same(expected[0], found[0], draft)
    check_same(expected[1], found[1], draft)
    if entry.is_declared and kind not in SILENT:
        assert draft.last_speculation.num_draft_tokens > 0, draft.last_speculation.reason


@pytest.mark.parametrize(("name", "kind", "how", "do_sample"), list(turned(PROCESSORS)))
def test_processors(name, kind, how, do_sample):
    """Greedy text is that of stock `generate`, sampled text that of the plain loop at an equal seed."""
    check_processors(name, kind, how, do_sample)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_with_every_draft(name, kind):
    for way in WAYS:
        check_processors(name, kind, *way)


@pytest.mark.parametrize("name", PROCESSORS)
def test_list_of_processors(name):
    """They have the effect that the list says; otherwise it would test nothing."""
    how, wanted = ("batch", True) if PROCESSORS[name].has_effect == "batch" else ("single", PROCESSORS[name].has_effect)
    assert (reference_of_processors(name, how)[0] != bare_text(how)) == bool(wanted)


@pytest.mark.soak
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_are_made_again_as_they_were(name):
    for how in CALLS:
        assert processed(name, None, how, False) == processed(name, None, how, False)


@functools.cache
def bare_text(how, name="llama", settings=()):
    """The greedy text of a target that nobody has changed."""
    return text_of(model_of(name, settings), None, how, False)


# Hooks and patched forwards.


def hooked(name, kind, how, do_sample):
    """The text of a call with a hook, or its error; the state of the hook afterwards, and the draft."""
    entry = HOOKS[name]
    model = entry.model() if entry.model else fresh()
    draft = draft_for(kind, model) if kind else None
    if entry.is_late:
        text_of(model, draft, how, do_sample, max_new_tokens=4)
    remove, state = entry.put(model)
    try:
        text = text_of(model, draft, how, do_sample, **(entry.kwargs if how == "batch" else {}))
    finally:
        remove()
    return text, state and state(), draft


@functools.cache
def reference_of_hooks(name, how, do_sample=False, kind=None):
    return hooked(name, kind, how, do_sample)[:2]


def check_hooks(name, kind, how, do_sample):
    if do_sample and kind in REJECTING:
        return
    entry = HOOKS[name]
    *found, draft = hooked(name, kind, how, do_sample)
    expected = reference_of_hooks(name, how, do_sample, loop_of(draft, do_sample))
    check_same(expected[0], found[0], draft)
    check_same(expected[1], found[1], draft)
    used = draft.last_speculation
    if entry.drafts:
        assert used.reason is None and used.num_forwards > 0
        assert kind in SILENT or used.num_draft_tokens > 0
    elif not (entry.is_lie and kind in SILENT):  # whose trees are single nodes, as the tokens of generate
        assert used.reason and entry.name in used.reason and used.num_forwards == 0
        assert entry.is_lie or "stateless" in used.reason


@pytest.mark.parametrize(("name", "kind", "how", "do_sample"), list(turned(HOOKS)))
def test_hooks(name, kind, how, do_sample):
    """A hook of a library, and one that truly says that it has no state, is used with a draft; no other is."""
    check_hooks(name, kind, how, do_sample)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_with_every_draft(name, kind):
    for way in WAYS:
        check_hooks(name, kind, *way)


@pytest.mark.parametrize("name", HOOKS)
def test_list_of_hooks(name):
    """They have the effect that the list says."""
    entry = HOOKS[name]
    bare = text_of(entry.model(), None, "single", False) if entry.model else bare_text("single")
    assert entry.has_effect in (None, reference_of_hooks(name, "single")[0] != bare)


@pytest.mark.soak
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_put_on_again_as_they_were(name):
    for how in CALLS:
        assert hooked(name, None, how, False) == hooked(name, None, how, False)
    assert text_of(model_of("llama"), None, "single", False) == bare_text("single")


# Changes of a target.


def changed(name, kind, how, when, do_sample=False, hints=None):
    """The text of a call of a changed model, or its error; and the draft."""
    entry, draft = CHANGES[name], None
    model = fresh(entry.name, entry.settings)
    if when == "after":
        draft = draft_for(kind, model) if kind else None
        text_of(model, draft, how, do_sample, max_new_tokens=4)
    undo = entry.change(model)
    try:
        try:
            draft = draft_for(kind, model) if kind and draft is None else draft
        except ValueError as error:
            return f"ValueError: {error}", None
        if kind == "tree":
            draft.hints = hints
        return text_of(model, draft, how, do_sample), draft
    except ValueError as error:  # a draft that is not made for such a model
        return f"ValueError: {error}", None
    finally:
        if undo is not None:
            undo()


@functools.cache
def reference_of_changes(name, how, when, do_sample=False, kind=None):
    return changed(name, kind, how, when, do_sample)[0]


def check_changes(name, kind, how, when, do_sample=False):
    """The text of stock `generate`, or a refusal; an error if stock `generate` has one."""
    if do_sample and kind in REJECTING:
        return
    greedy, start = reference_of_changes(name, how, when), max(CALLS[how][0])
    hints = None if isinstance(greedy, str) else [row[start:] for row in greedy]
    found, draft = changed(name, kind, how, when, do_sample, hints)
    loop = loop_of(draft, do_sample)  # one that was made before the change may be refused
    expected = reference_of_changes(name, how, "fresh" if loop else when, do_sample, loop)
    has_refused = isinstance(found, str) and (isinstance(expected, str) or found.startswith("ValueError: "))
    if not has_refused:
        check_same(expected, found, draft)


def cases_of_changes():
    """Fresh models and used ones, each with a kind of draft in turn and with a draft that is often right."""
    for number, name in enumerate(CHANGES):
        kinds = (ALL_KINDS[number % len(ALL_KINDS)], ALL_KINDS[(number + 5) % len(ALL_KINDS)], "tree", "tree")
        ways = (("single", "fresh"), ("batch", "after"), ("batch", "fresh"), ("single", "after"))
        for place, (kind, way) in enumerate(zip(kinds, ways, strict=True)):
            is_quick = (place in (0, 3)) == (number % 2 == 0)
            marks = [] if is_quick else [pytest.mark.soak]
            yield pytest.param(name, kind, *way, marks=marks, id="-".join((name, kind, *way)))


@pytest.mark.parametrize(("name", "kind", "how", "when"), list(cases_of_changes()))
def test_changes(name, kind, how, when):
    check_changes(name, kind, how, when)


@pytest.mark.soak
@pytest.mark.parametrize("kind", [*ALL_KINDS, "tree"])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_with_every_draft(name, kind):
    for way, when in itertools.product(WAYS, ("fresh", "after")):
        check_changes(name, kind, way[0], when, way[1])


@pytest.mark.parametrize("name", CHANGES)
def test_list_of_changes(name):
    """They have the effect that the list says."""
    entry = CHANGES[name]
    bare = bare_text("single", entry.name, entry.settings)
    assert entry.has_effect in (None, reference_of_changes(name, "single", "fresh") != bare)


@pytest.mark.soak
@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_made_again_as_they_were(name):
    """And are taken back from what other models use."""
    for how, when in itertools.product(CALLS, ("fresh", "after")):
        assert changed(name, None, how, when) == changed(name, None, how, when)
    assert text_of(model_of("llama"), None, "single", False) == bare_text("single")


def check_subclass(override):
    """A model whose class is the user's from the beginning."""
    base = model_of("llama")
    name = override.__name__
    mine = type("Mine", (type(base),), {name: override(getattr(type(base), name))})
    model = mine(copy.deepcopy(base.config)).eval()
    model.load_state_dict(base.state_dict())
    expected, draft = text_of(model, None, "single", False), draft_for("tree", model)
    draft.hints = [row[max(CALLS["single"][0]) :] for row in expected]
    check_same(expected, text_of(model, draft, "single", False), draft)


def check_fresh_processes():
    """Check changes and classes, each in a process that has made no model yet."""
    jobs = {name: functools.partial(check_changes, name, "tree", "single", "fresh") for name in CHANGES}
    jobs |= {f"class with {one.__name__}": functools.partial(check_subclass, one) for one in target_patches.METHODS}
    failed = []
    for name, job in jobs.items():
        process = multiprocessing.get_context("fork").Process(target=job)
        process.start()
        process.join()
        failed += [name] * bool(process.exitcode)
    assert not failed, failed


@pytest.mark.soak
def test_changes_in_fresh_processes():
    code = "from tests.robustness.test_users_code import check_fresh_processes; check_fresh_processes()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
