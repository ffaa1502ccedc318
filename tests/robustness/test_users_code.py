"""Code of users beside a draft: the text, the state and the errors of stock `generate`, whatever the code is.

The lists are in user_*.py and target_*.py; each entry meets several kinds of draft, and each kind many entries.
"""

import functools
import itertools

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
NEW = 14
# Drafts that propose nothing of their own in calls without a structure.
SILENT = ("plain", "grammar")
REJECTING = ("specattn", "quest")  # whose sampled text differs from that of the plain loop, in its distribution alone
COUPLED = [kind for kind in ALL_KINDS if kind not in (*REJECTING, "plain")]
WAYS = [(how, do_sample) for how in CALLS for do_sample in (False, True)]


def turned(names):
    """Cases with two greedy kinds of draft and a sampled one for each name; two of three sampled ones are soak."""
    for number, name in enumerate(names):
        for place, (how, do_sample) in enumerate([("single", False), ("batch", False), ("batch", True)]):
            kinds = COUPLED if do_sample else ALL_KINDS
            kind = kinds[(number + 5 * place) % len(kinds)]
            marks = [pytest.mark.soak] if do_sample and number % 3 else []
            sampled = "sampled" if do_sample else "greedy"
            yield pytest.param(name, kind, how, do_sample, marks=marks, id=f"{name}-{kind}-{how}-{sampled}")


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


def check_same(expected, found, draft):
    """Compare texts or states without and with a draft; the message says how the draft was used."""
    used = draft.last_speculation
    how = "an error" if isinstance(found, str) else "a refusal" if used and used.reason else "silence"
    assert found == expected, f"another outcome, in {how}: {found} instead of {expected}"


# Logits processors.


@functools.cache
def target():
    return tiny_target("llama", vocab_size=VOCAB)


@functools.cache
def draft_of(kind):
    return draft_for(kind, target())


def processed(name, draft, how, do_sample):
    """The text of a call with processors, or its error; and their state afterwards."""
    made = PROCESSORS[name].make(target())
    text = text_of(target(), draft, how, do_sample, logits_processor=made.processors, **made.kwargs)
    return text, made.state()


def check_processors(name, kind, how, do_sample):
    entry, draft = PROCESSORS[name], draft_of(kind)
    if do_sample and (kind in REJECTING or not entry.is_sampled):
        return
    expected = processed(name, draft_of("plain") if do_sample else None, how, do_sample)
    found = processed(name, draft, how, do_sample)
    check_same(expected[0], found[0], draft)
    check_same(expected[1], found[1], draft)
    if entry.is_declared and kind not in SILENT:
        assert draft.last_speculation.num_draft_tokens > 0, draft.last_speculation.reason


@pytest.mark.parametrize(("name", "kind", "how", "do_sample"), turned(PROCESSORS))
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
    """They can be made again as they were, and have an effect; otherwise the list would test nothing."""
    how, wanted = ("batch", True) if PROCESSORS[name].has_effect == "batch" else ("single", PROCESSORS[name].has_effect)
    first, second = (processed(name, None, how, False) for _ in range(2))
    assert first == second
    assert (first[0] != text_of(target(), None, how, False)) == bool(wanted)


# Hooks and patched forwards.


def hooked(name, kind, how, do_sample):
    """The text of a call with a hook, or its error; the state of the hook afterwards, and the draft."""
    entry = HOOKS[name]
    model = entry.model() if entry.model else tiny_target("llama", vocab_size=VOCAB)
    draft = draft_for(kind, model) if kind else None
    if entry.is_late:
        text_of(model, draft, how, do_sample)
    remove, state = entry.put(model)
    try:
        text = text_of(model, draft, how, do_sample, **(entry.kwargs if how == "batch" else {}))
    finally:
        remove()
    return text, state and state(), draft


def check_hooks(name, kind, how, do_sample):
    if do_sample and kind in REJECTING:
        return
    entry = HOOKS[name]
    *expected, _ = hooked(name, "plain" if do_sample else None, how, do_sample)
    *found, draft = hooked(name, kind, how, do_sample)
    check_same(expected[0], found[0], draft)
    check_same(expected[1], found[1], draft)
    used = draft.last_speculation
    if entry.drafts:
        assert used.reason is None and used.num_forwards > 0
        assert kind in SILENT or used.num_draft_tokens > 0
    else:
        assert used.reason and entry.name in used.reason and used.num_forwards == 0
        assert entry.is_lie or "stateless" in used.reason


@pytest.mark.parametrize(("name", "kind", "how", "do_sample"), turned(HOOKS))
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
    """They can be put on again as they were, and have an effect."""
    first, second = (hooked(name, None, "single", False)[:2] for _ in range(2))
    assert first == second
    model = HOOKS[name].model() if HOOKS[name].model else tiny_target("llama", vocab_size=VOCAB)
    has_effect = first[0] != text_of(model, None, "single", False)
    assert HOOKS[name].has_effect in (None, has_effect)


# Changes of a target.

# Each model has a config of its own, so that nothing is known of it from another one.
_configs = itertools.count()


def changed(name, kind, how, when, do_sample=False, hints=None, is_changed=True):
    """The text of a call of a changed model, or its error; and the draft."""
    entry, draft = CHANGES[name], None
    own = 0.02 + next(_configs) * 1e-9
    model = tiny_target(entry.name, vocab_size=VOCAB, initializer_range=own, **entry.settings)
    if when == "after":
        draft = draft_for(kind, model) if kind else None
        text_of(model, draft, how, do_sample)
    undo = entry.change(model) if is_changed else None
    try:
        if kind and draft is None:
            try:
                draft = draft_for(kind, model)
            except ValueError as error:
                return f"ValueError: {error}", None
        if kind == "tree":
            draft.hints = hints
        return text_of(model, draft, how, do_sample), draft
    finally:
        if undo is not None:
            undo()


def check_changes(name, kind, how, when, do_sample=False):
    """The text of stock `generate`, or a refusal; an error if stock `generate` has one."""
    if do_sample and kind in REJECTING:
        return
    expected, _ = changed(name, "plain" if do_sample else None, how, when, do_sample)
    start = max(CALLS[how][0])
    hints = None if isinstance(expected, str) else [row[start:] for row in expected]
    found, draft = changed(name, kind, how, when, do_sample, hints)
    is_refused = isinstance(found, str) and (isinstance(expected, str) or found.startswith("ValueError: "))
    if not is_refused:
        check_same(expected, found, draft)


def cases_of_changes():
    """Fresh models and single prompts, used ones and batches; and the other way with a draft that is often right."""
    for number, name in enumerate(CHANGES):
        kinds = (ALL_KINDS[number % len(ALL_KINDS)], ALL_KINDS[(number + 5) % len(ALL_KINDS)], "tree", "tree")
        ways = (("single", "fresh"), ("batch", "after"), ("batch", "fresh"), ("single", "after"))
        yield from ((name, kind, *way) for kind, way in zip(kinds, ways, strict=True))


@pytest.mark.parametrize(("name", "kind", "how", "when"), cases_of_changes())
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
    texts = [changed(name, None, "single", "fresh", is_changed=is_changed)[0] for is_changed in (True, True, False)]
    assert texts[0] == texts[1]
    assert CHANGES[name].has_effect in (None, texts[0] != texts[2])
