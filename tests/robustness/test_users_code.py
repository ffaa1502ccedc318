"""Code of users beside a draft: the text, the state and the errors of stock `generate`, whatever the code is."""

import functools
from itertools import product

import pytest

# they add to the list of processors
from tests.robustness import user_declarations, user_places, user_rules  # noqa: F401
from tests.robustness.drafts import ALL_KINDS, make_draft
from tests.robustness.user_processors import ENDS, PROCESSORS, VOCAB
from tests.tiny_targets import generate, tiny_target

pytestmark = pytest.mark.usefixtures("every_step_speculates")

# One prompt that is continued to the limit, and a batch whose rows end at different places.
CALLS = {"single": ((13,), None), "batch": ((13, 3, 9), ENDS)}
NEW = 14
# Drafts that propose nothing of their own in calls without a structure.
SILENT = ("plain", "grammar")
REJECTING = ("specattn", "quest")  # whose sampled text differs from that of the plain loop, in its distribution alone


def turned(names, every=3):
    """Cases with two greedy kinds of draft and a sampled one for each name; most sampled ones are marked soak.

    The kinds take turns, so that each meets many names.
    """
    coupled = [kind for kind in ALL_KINDS if kind not in (*REJECTING, "plain")]
    for number, name in enumerate(names):
        for place, (how, do_sample) in enumerate([("single", False), ("batch", False), ("batch", True)]):
            kinds = coupled if do_sample else ALL_KINDS
            kind = kinds[(number + 5 * place) % len(kinds)]
            marks = [pytest.mark.soak] if do_sample and number % every else []
            sampled = "sampled" if do_sample else "greedy"
            yield pytest.param(name, kind, how, do_sample, marks=marks, id=f"{name}-{kind}-{how}-{sampled}")


@functools.cache
def target():
    return tiny_target("llama", vocab_size=VOCAB)


@functools.cache
def draft_of(kind):
    draft = make_draft(kind, target())
    draft.generation_config.on_unsupported = "plain"
    return draft


def outcome(make, draft, how, do_sample):
    """The text of a call, or its error; and the state of the user's objects afterwards."""
    lengths, ends = CALLS[how]
    made = make(target())
    options = {"max_new_tokens": NEW, "eos_token_id": ends, "do_sample": do_sample} | made.kwargs
    try:
        text = generate(target(), draft, lengths, logits_processor=made.processors, **options).tolist()
    except Exception as error:  # code of a user may raise anything
        text = f"{type(error).__name__}: {error}"
    return text, made.state()


def check_same(expected, found, draft):
    """Compare outcomes without and with a draft; the message says how the draft was used."""
    used = draft.last_speculation
    how = "an error" if isinstance(found[0], str) else "a refusal" if used and used.reason else "silence"
    assert found[0] == expected[0], f"another text, in {how}: {found[0]} instead of {expected[0]}"
    assert found[1] == expected[1], f"another state, in {how}: {found[1]} instead of {expected[1]}"


def check_processors(name, kind, how, do_sample):
    entry, draft = PROCESSORS[name], draft_of(kind)
    if do_sample and not entry.is_sampled:
        return
    expected = outcome(entry.make, draft_of("plain") if do_sample else None, how, do_sample)
    found = outcome(entry.make, draft, how, do_sample)
    check_same(expected, found, draft)
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
    for how, do_sample in product(CALLS, (False, True)):
        if not (do_sample and kind in REJECTING):
            check_processors(name, kind, how, do_sample)


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_of_the_list(name):
    """They can be made again as they were, and have an effect; otherwise the list would test nothing."""
    entry, how = PROCESSORS[name], "batch" if PROCESSORS[name].has_effect == "batch" else "single"
    first, second = (outcome(entry.make, None, how, False) for _ in range(2))
    assert first == second
    assert (first[0] != bare_text(how)) == bool(entry.has_effect)


@functools.cache
def bare_text(how):
    lengths, ends = CALLS[how]
    return generate(target(), None, lengths, max_new_tokens=NEW, eos_token_id=ends).tolist()
