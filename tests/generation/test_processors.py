"""What processors and constraints are asked about, and processors that are called as plain `generate` calls them."""

from functools import cache, partial

import pytest
import torch
from transformers import LogitsProcessor, WatermarkingConfig
from transformers.generation import logits_process
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor, TemperatureLogitsWarper

from hf_longspec import ContextualPenaltyLogitsProcessor, PlainDraftModel
from hf_longspec.generation.sampling import HISTORY_FREE
from hf_longspec.generation.special_cases.processors import STATELESS, is_known
from hf_longspec.modeling.register_draft import DRAFTS
from tests.modeling.test_contract import FEW_TOKENS, VARIANTS, draft_of
from tests.pairwise import few
from tests.robustness.enumeration import build
from tests.robustness.user_processors import PROCESSORS, Last
from tests.tiny_targets import TINY_TARGETS, generate, tiny_prompts, tiny_target
from tests.user_objects import Answer

pytestmark = pytest.mark.usefixtures("every_step_speculates")

VOCAB, END = FEW_TOKENS["vocab_size"], 11
LENGTHS = (13, 3, 9)
# The rows have no words in common, and some words begin as others do.
WORDS = [
    [(3, 4, 5, 6, 7, 8, 3, 4), (3, 4, 5, 6, 9), (3, 7, 3, 7, 3)],
    [(4, 4, 4, 4, 4, 4, 5), (4, 5, 6, 7), (5, 4, 4, 4)],
    [(6, 3, 6, 3, 6, 3, 8, 8), (6, 3, 7), (7, 8, 9, 3, 3, 4)],
]


def tries(after_end):
    """A constraint per row that knows its own words alone; `after_end` is the answer about rows that have ended.

    Without one, it is declared to have no state, so that it is not asked about these.
    """
    following = [{} for _ in WORDS]
    for row, words in enumerate(WORDS):
        for word in words:
            for place, token in enumerate((*word, END)):
                following[row].setdefault(word[:place], set()).add(token)

    def allowed(row, ids):
        text = tuple(ids[max(LENGTHS) :].tolist())
        return after_end if END in text else sorted(following[row].get(text, ()))

    allowed.stateless = not after_end
    return allowed


def constrained(model, draft, lengths, after_end=(), **options):
    input_ids, mask = tiny_prompts(VOCAB, (max(LENGTHS), *lengths[1:]))
    options |= {"max_new_tokens": 20, "eos_token_id": END, "pad_token_id": 0, "attention_mask": mask}
    torch.manual_seed(5)
    return model.generate(
        input_ids, assistant_model=draft, prefix_allowed_tokens_fn=tries(list(after_end)), **options
    ).tolist()


@cache
def plainly_constrained(model, lengths):
    """The greedy text of `generate`, and the sampled one of the plain loop."""
    plain = PlainDraftModel.from_target(model)
    greedy = constrained(model, None, lengths, after_end=[0], do_sample=False)
    return greedy, constrained(model, plain, lengths, do_sample=True, top_k=0)


TREES = [(kind, settings) for kind, name, settings in VARIANTS if name in ("llama", "qwen3")]


@pytest.mark.parametrize(("kind", "settings"), few([*((kind, {}) for kind in DRAFTS), *TREES], 7), ids=str)
def test_constraints_are_asked_what_plain_decoding_asks(target, kind, settings):
    """An empty list, as of a text that plain decoding does not reach, is an error."""
    model = target("llama", **FEW_TOKENS)
    draft = draft_of(kind, model, **settings)
    for lengths in (LENGTHS[:1], LENGTHS):
        greedy, sampled = plainly_constrained(model, lengths)
        for after_end in ((), [0]):
            assert constrained(model, draft, lengths, after_end, do_sample=False) == greedy
            assert constrained(model, draft, lengths, after_end, do_sample=True, top_k=0) == sampled


class Budget(LogitsProcessor):
    """Forces a token at its 9th call, as a thinking budget does."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return forced(scores, self.calls)


def forced(scores, count):
    return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([7]), 0) if count == 9 else scores


class OfRows(Budget):
    """Has a list for each row."""

    def __init__(self):
        self.seen = [[] for _ in LENGTHS]

    def __call__(self, input_ids, scores):
        for row, text in zip(self.seen, input_ids, strict=False):
            row.append(int(text[-1]))
        return forced(scores, len(self.seen[0]))


class Watching:
    """Notes all that it is given."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        assert scores.dtype == torch.float32 and input_ids.is_contiguous()
        self.seen.append((input_ids, scores.clone()))
        return scores


@pytest.mark.parametrize("kind", few(DRAFTS, 3))
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5_text"])
def test_a_processor_gets_what_plain_generate_gives_it(target, kind, name):
    """Also the scores of rows that have ended, whose text is padding from there on."""
    model = target(name, **FEW_TOKENS) if name in TINY_TARGETS else build(name, 0)
    ends = list(range(1, model.config.vocab_size, 5))
    draft = draft_of(kind if name in TINY_TARGETS else "longspec_ngram", model)
    seen, texts = [], []
    for one in (None, draft):
        processor = Watching()
        more = {"max_new_tokens": 24, "eos_token_id": ends, "pad_token_id": 2, "logits_processor": [processor]}
        texts.append(generate(model, one, LENGTHS, **more))
        seen.append(processor.seen)
    assert torch.equal(*texts)
    ends = [
        next((place for place, token in enumerate(row) if token in (1, 4, 9)), 99) for row in texts[0][:, 13:].tolist()
    ]
    assert min(ends) < max(ends) - 1, "no row ends before the others"
    stats = draft.last_speculation
    assert len(seen[0]) == len(seen[1]) == stats.num_processed_nodes and stats.processor_seconds > 0
    for (ids, scores), (own_ids, own_scores) in zip(*seen, strict=True):
        assert torch.equal(ids, own_ids)
        torch.testing.assert_close(scores, own_scores, atol=1e-3, rtol=0)


class Shared:
    """A processor, a stopping criterion and a streamer that count on each other."""

    def __init__(self):
        self.events = []

    def __call__(self, input_ids, scores):
        self.events.append(f"processor {input_ids.shape[1]}")
        return forced(scores, sum(event.startswith("stream") for event in self.events))

    def stops(self, input_ids, scores):
        self.events.append(f"criterion {input_ids.shape[1]}")
        return torch.tensor([len(self.events) > 30 + 5 * row for row in range(len(input_ids))])

    def put(self, value):
        self.events.append(f"stream {value.tolist() if value.dim() == 1 else ''}")

    def end(self):
        self.events.append("end")


@pytest.mark.parametrize("kind", few(DRAFTS, 3))
def test_processor_criterion_and_streamer_are_called_in_the_order_of_plain_generate(target, kind):
    model = target("llama", **FEW_TOKENS)
    for lengths in ((13,), LENGTHS):
        made, texts = [], []
        for one in (None, draft_of(kind, model)):
            shared = Shared()
            more = {"logits_processor": [shared], "stopping_criteria": [Answer(shared.stops)], "streamer": shared}
            texts.append(generate(model, one, lengths, max_new_tokens=24, eos_token_id=None, **more))
            made.append(shared.events)
        assert torch.equal(*texts) and made[0] == made[1]


class Renamed(TemperatureLogitsWarper):
    """Has the name of its base."""


Renamed.__name__ = "TemperatureLogitsWarper"


class Declaring(ContextualPenaltyLogitsProcessor):
    """Declares what its own call depends on."""

    stateless = True

    def __call__(self, input_ids, scores):
        return super().__call__(input_ids, scores)


def test_what_is_known(monkeypatch):
    """Classes of transformers as they are, and what is declared for the `__call__` that runs."""
    for name, entry in PROCESSORS.items():
        made = entry.apply(tiny_target("llama")).options.get("logits_processor", [])
        assert not made or all(map(is_known, made)) == bool(entry.drafts), name
    marked, grammar = partial(Last()), Budget()
    marked.stateless = grammar.is_grammar = True
    known = [Declaring(1.2, 3), TemperatureLogitsWarper(0.7), PrefixConstrainedLogitsProcessor(marked, 1), grammar]
    assert all(map(is_known, known))
    changed = TemperatureLogitsWarper(0.7)
    changed.temperature = print
    assert not any(map(is_known, [Renamed(0.7), changed, PrefixConstrainedLogitsProcessor(Last.__call__, 1), print]))
    monkeypatch.setattr(TemperatureLogitsWarper, "__call__", lambda self, input_ids, scores: scores)
    assert not is_known(TemperatureLogitsWarper(0.7))


def test_a_processor_that_says_it_has_no_history_runs_once_per_step(plain_run):
    class Shift(Budget):
        history_free = True

        def __call__(self, input_ids, scores):
            self.calls += 1
            return scores + torch.arange(scores.shape[1]) % 3

    processor = Shift()
    run = plain_run("llama", LENGTHS, max_new_tokens=10, logits_processor=[processor])
    processor.calls, draft = 0, run.draft("tree")
    assert run.again(draft).tolist() == run.sequences.tolist()
    assert processor.calls == draft.last_speculation.num_forwards + 1  # and once for the prompt


def test_processors_that_generate_makes_are_known(target):
    assert all(hasattr(logits_process, name) for name in (*STATELESS, *HISTORY_FREE - {"TopHLogitsWarper"}))
    options = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9, "top_h": 0.5}
    options |= {"epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3}
    options |= {"encoder_repetition_penalty": 1.1, "encoder_no_repeat_ngram_size": 3, "bad_words_ids": [[5], [6, 7]]}
    options |= {"sequence_bias": {(5,): 2.0}, "min_length": 9, "min_new_tokens": 4, "forced_bos_token_id": 3}
    options |= {"forced_eos_token_id": 2, "exponential_decay_length_penalty": (3, 1.2), "suppress_tokens": [5]}
    options |= {"begin_suppress_tokens": [4], "remove_invalid_values": True, "renormalize_logits": True}
    options |= {"eos_token_id": 2, "do_sample": True, "watermarking_config": WatermarkingConfig(bias=4.0)}
    made = []

    def keep(model, input_ids, logits_processor, *_, **__):
        made.extend(logits_processor)
        return input_ids

    target("llama").generate(torch.ones(1, 5, dtype=torch.long), custom_generate=keep, max_new_tokens=8, **options)
    assert len(made) > 20 and [type(one).__name__ for one in made if not is_known(one)] == []
