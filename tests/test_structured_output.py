"""Structured output: what it allows, and the texts of all drafts under it, and under engines that others wrote."""

import json
import re
from functools import cache
from itertools import cycle, product

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor

from hf_longspec import Batcher, GrammarDraftModel, NgramDraftModel, PlainDraftModel, StructuredOutput
from hf_longspec.generation.special_cases.grammar import GrammarRule
from hf_longspec.modeling.register_draft import DRAFTS
from tests.distributions import p_value
from tests.generation.test_processors import Budget, OfRows
from tests.modeling.test_contract import draft_of
from tests.pairwise import soaked
from tests.robustness.peaked_weights import peak
from tests.robustness.shrunk_configs import shrunk_config
from tests.tiny_targets import tiny_prompts, tiny_target
from tests.tiny_tokenizers import byte_tokenizer, letter_tokenizer

pytest.importorskip("llguidance")
pytestmark = pytest.mark.usefixtures("every_step_speculates")

TOKENIZER = byte_tokenizer()
VOCAB, END, PAD = len(TOKENIZER) + 6, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id  # embeddings for no tokens
SCALAR = {"enum": ["yes", "no", 17, None]}
NESTED = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 10, "maximum": 99},
        "of": {
            "type": "object",
            "properties": {"kind": SCALAR, "ok": {"type": "boolean"}},
            "required": ["kind", "ok"],
            "additionalProperties": False,
        },
    },
    "required": ["id", "of"],
    "additionalProperties": False,
}
BOUNDED = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 4}
DATE, WORDS = r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]", r"(ab|abc|b{2,5})(, (ab|cd)){1,3}"
CHOICES = ["carpenter", "carpet", "librarian"]
STRUCTURES = {
    "nested": {"json_schema": NESTED},
    "enum": {"json_schema": SCALAR},
    "array": {"json_schema": json.dumps(BOUNDED)},
    "date": {"regex": DATE},
    "words": {"regex": WORDS},
    "choices": {"choices": CHOICES},
    "brackets": {"grammar": 'start: "(" start ")" | "[]"'},
}


def allows(name, text):
    """Whether a text has a structure, by other code."""
    if name in ("date", "words"):
        return re.fullmatch(STRUCTURES[name]["regex"], text) is not None
    if name == "choices":
        return text in CHOICES
    if name == "brackets":
        count = text.count("(")
        return text == "(" * count + "[]" + ")" * count
    value = json.loads(text)
    if name == "enum":
        return value in SCALAR["enum"]
    if name == "array":
        return 2 <= len(value) <= 4 and all(type(one) is int and 0 <= one <= 9 for one in value)
    one = value["of"]
    assert [*value] == ["id", "of"] and [*one] == ["kind", "ok"]
    return 10 <= value["id"] <= 99 and one["kind"] in SCALAR["enum"] and isinstance(one["ok"], bool)


@cache
def structure(name):
    return StructuredOutput(TOKENIZER, **STRUCTURES[name])


def generate(model, draft, processors, lengths=(9,), seed=0, **options):
    ids, mask = tiny_prompts(model.config.vocab_size, lengths)
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": END, "pad_token_id": PAD} | options
    torch.manual_seed(seed)
    out = model.generate(ids, attention_mask=mask, assistant_model=draft, logits_processor=processors, **options)
    return out[:, max(lengths) :]


def texts_of(rows):
    return [TOKENIZER.decode(row[: row.index(END)] if END in row else row) for row in rows.tolist()]


def check(model, draft, make, name=None, lengths=(9,), **options):
    """Greedily the text of stock `generate`, sampled that of the plain loop for the seed; all have the structure."""
    plain = PlainDraftModel.from_target(model)
    for beside, do_sample in ((None, False), (plain, True)):
        if do_sample and draft.draws_tokens:
            beside = draft
        both = [
            generate(model, one, [make()], lengths, do_sample=do_sample, top_k=0, **options) for one in (beside, draft)
        ]
        assert both[0].tolist() == both[1].tolist(), (do_sample, texts_of(both[0]), texts_of(both[1]))
        assert draft.last_speculation.num_forwards, draft.last_speculation.reason
        if name is not None:
            assert all(allows(name, text) for row, text in zip(both[1], texts_of(both[1]), strict=True) if END in row)


ROWS = cycle(((9,), (9, 2, 5)))
# Every draft with two structures, one row and ragged three; other kinds of attention with some drafts.
CASES = [(kind, "llama", name, next(ROWS)) for kind, name in zip([*DRAFTS] * 2, cycle(STRUCTURES), strict=False)]
CASES += [("longspec", "gemma3", "nested", (9,)), ("longspec_eagle3", "mistral", "nested", (9, 2, 5))]
CASES += [("longspec_ngram", "gpt_oss", "words", (9, 2, 5)), ("longspec_grammar", "qwen3_5_text", "nested", (9,))]
CASES += [("longspec_ngram", "granitemoehybrid", "date", (9,))]
ALL = [*product(DRAFTS, ("llama", "mistral", "gemma3"), STRUCTURES, ((9,), (9, 2, 5)))]


@cache
def target_of(name):
    if name in ("qwen3_5_text", "granitemoehybrid"):
        with torch.random.fork_rng(devices=[]):
            config = shrunk_config(name, vocab_size=VOCAB)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        peak(model, VOCAB)
        return model
    return tiny_target(name, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("kind", "target", "name", "lengths"),
    [*CASES, *soaked(ALL)],
    ids=str,
)
def test_texts_under_a_structure(kind, target, name, lengths):
    model = target_of(target)
    check(model, draft_of(kind, model), lambda: structure(name), name, lengths)


class Alone(LogitsProcessor):
    """A structure that the loop knows as any processor, so that it is called and nothing else."""

    def __init__(self, structure):
        self.structure = structure

    def __call__(self, input_ids, scores):
        return self.structure(input_ids, scores)


@pytest.mark.parametrize("kind", ["longspec_grammar", "longspec_ngram", "longspec", "specattn", "longspec_assistant"])
@pytest.mark.parametrize("eos", [None, VOCAB - 1])
def test_text_after_the_end_of_a_structure_is_free(kind, eos):
    """Where the end token of the structure does not end the text; the structure could go on in its place."""
    model = target_of("llama")
    plain, draft = PlainDraftModel.from_target(model), draft_of(kind, model)
    more = {"regex": "[ab](ab)*", "eos_token_id": END}
    options = {"eos_token_id": eos, "max_new_tokens": 30, "lengths": (9, 2, 5)}
    for beside, do_sample in ((None, False), (plain, True)):
        texts = [
            generate(model, one, [make(StructuredOutput(TOKENIZER, **more))], do_sample=do_sample, top_k=0, **options)
            for one, make in ((beside, Alone), (draft, lambda one: one))
        ]
        assert texts[0].tolist() == texts[1].tolist()
        assert draft.last_speculation.num_forwards, draft.last_speculation.reason
        assert any(len(set(row[row.index(END) :])) > 3 for row in texts[0].tolist() if END in row)


BATCHED = ["longspec_plain", "longspec_grammar", "longspec_ngram", "specattn"]


@pytest.mark.parametrize("kind", [*BATCHED, *soaked(kind for kind in DRAFTS if kind not in BATCHED)])
def test_requests_of_a_batch_have_structures_of_their_own(kind):
    """Beside others with and without one, and with a processor that keeps state: text and steps of each alone."""
    model = target_of("llama")
    # Beside a grammar a draft model runs the accepted tokens again, so that a window drops tokens at other steps than
    # alone, and some proposals differ. In float64 they differ likewise; without a window or forced tokens none do.
    draft = draft_of(kind, model, **({"window": None} if kind == "longspec_assistant" else {}))
    words, nested = structure("words"), structure("nested")
    makers = [list, lambda: [nested], lambda: [words], lambda: [Budget()], list, lambda: [nested]]
    cases = [
        (tiny_prompts(VOCAB, (length,))[0], make, {"do_sample": row % 2 == 1, "max_new_tokens": 24, "top_k": 0})
        for row, (length, make) in enumerate(zip((9, 2, 5, 7, 11, 3), makers, strict=True))
    ]
    same = {"eos_token_id": END, "pad_token_id": PAD}
    with Batcher(model, draft, rows=2, max_length=50, chunk_size=8) as batcher:
        futures = [
            batcher.submit(ids, seed=row, logits_processor=make(), **how, **same)
            for row, (ids, make, how) in enumerate(cases)
        ]
    for row, (ids, make, how) in enumerate(cases):
        torch.manual_seed(row)
        alone = model.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=draft, logits_processor=make(), **how, **same
        )
        assert futures[row].result().tolist() == alone.tolist(), row
        found, expected = futures[row].speculation, draft.last_speculation
        assert found.reason is None, row
        assert found.emitted_per_step == expected.emitted_per_step, row


@pytest.mark.parametrize("name", STRUCTURES)
def test_what_is_allowed(name):
    """Against a search over all bytes: after a token that is allowed, some text of the structure follows."""
    processor, model = StructuredOutput(TOKENIZER, **STRUCTURES[name]), target_of("llama")
    for seed in range(4):
        (row,) = generate(model, None, [processor], do_sample=True, temperature=3.0, top_k=0, seed=seed)
        assert allows(name, texts_of(row[None])[0])
    free = torch.zeros(1, VOCAB)
    prompt = torch.tensor([[5, 6, 7]])
    first = processor(prompt, free)[0].isfinite()
    assert not first[len(TOKENIZER) :].any() and not first[END]
    begins = {
        "nested": "{",
        "enum": '"1n',
        "array": "[",
        "date": "12",
        "words": "ab",
        "choices": "cl",
        "brackets": "([",
    }
    assert {TOKENIZER.decode([token]) for token in first.nonzero().flatten().tolist()} == set(begins[name])


def test_a_processor_is_used_again_and_rows_end():
    processor = StructuredOutput(TOKENIZER, choices=["ab", "cd"], eos_token_id=[END, 90])
    free = torch.zeros(1, VOCAB)

    def allowed(*tokens):
        return set(processor(torch.tensor([tokens]), free)[0].isfinite().nonzero().flatten().tolist())

    a, b, c, d = (TOKENIZER.convert_tokens_to_ids(token) for token in "abcd")
    assert allowed(5, 5) == {a, c} and allowed(5, 5, a) == {b} and allowed(5, 5, a, b) == {END, 90}
    assert allowed(5, 5, a, b, END) == {*range(VOCAB)} - {*range(len(TOKENIZER) // 32 * 32 + 32, VOCAB)}
    assert allowed(5, 5, a) == {a, c}  # another prompt
    assert allowed(5, 5, a, c) == {d}
    with pytest.raises(ValueError, match="does not follow the structure"):
        allowed(5, 5, a, c, c)
    bound = processor.bound(1)
    assert bound(torch.tensor([[5, a], [5, c]]), free.expand(2, -1)).isfinite().nonzero().tolist() == [[0, b], [1, d]]


WRONG = [
    ({}, r"structures \[\]: expected exactly one"),
    ({"regex": "a", "choices": ["a"]}, "expected exactly one"),
    ({"regex": "(a"}, r"regex='\(a' cannot be followed: .* error: unclosed group"),
    ({"json_schema": {"type": "strange"}}, "json_schema=.* cannot be followed"),
    ({"grammar": "begin: x"}, "grammar='begin: x' cannot be followed"),
    ({"choices": []}, r"choices=\[\]: expected a list"),
    ({"choices": "ab"}, "choices='ab': expected a list"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=str)
def test_wrong_structures(given, message):
    with pytest.raises(ValueError, match=message):
        StructuredOutput(TOKENIZER, **given)


def test_json_as_a_model_writes_it():
    pydantic = pytest.importorskip("pydantic")
    shape = pydantic.create_model("Shape", id=(int, ...), ok=(bool, ...))
    processor = StructuredOutput(TOKENIZER, json_schema=shape)
    assert TOKENIZER.decode(processor.position(0).forced()) == '{"id": '
    loose = StructuredOutput(TOKENIZER, json_schema=shape, whitespace=True)
    assert TOKENIZER.decode(loose.position(0).forced()) == "{" and loose.position(0).seek(
        TOKENIZER.encode('{ \n "id" :1 , "ok": true}')
    )


def test_forced_tokens_are_drafted():
    """A grammar alone takes a forward for each choice; tokens that the model may split otherwise are not accepted."""
    model = target_of("llama")
    draft = GrammarDraftModel.from_target(model)
    rows = generate(model, draft, [structure("nested")])
    text, stats = texts_of(rows)[0], draft.last_speculation
    assert json.loads(text) and stats.num_forwards <= 9 < rows.shape[1] - 9
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens
    draft.generation_config.forced_tokens = 0
    assert torch.equal(generate(model, draft, [structure("nested")]), rows)
    assert draft.last_speculation.num_forwards == rows.shape[1] - 1


def test_drafted_tokens_are_allowed(monkeypatch):
    """Before they are verified, as the draft ranks its candidates after the masks."""
    model, trees = target_of("llama"), []
    accept = GrammarRule.accept

    def kept(self, tree, *arguments, **more):
        trees.append((self, tree, [*self.sequences.generated[0]]))
        return accept(self, tree, *arguments, **more)

    monkeypatch.setattr(GrammarRule, "accept", kept)
    draft = draft_of("longspec", model, tree_widths=[1, 1, 1], forced_tokens=0)
    generate(model, draft, [structure("date")])
    position = structure("date").bound(0).position(0)
    drafted = [(text, tree.best_chain().tolist()) for _, tree, text in trees if tree.num_nodes > 1]
    assert len(drafted) > 2
    for text, chain in drafted:
        chain = chain[: chain.index(END)] if END in chain else chain
        assert position.seek(text) and (END in text or position.seek([*text, *chain[: 10 - len(text)]]))


def test_other_processors_beside_a_structure():
    """Those that depend on the text, keep state, or change scores before and after it."""
    model = target_of("llama")
    for kind, beside in (("longspec", Budget), ("specattn", OfRows), ("longspec_ngram", None)):
        options = {} if beside else {"repetition_penalty": 1.3, "no_repeat_ngram_size": 5}
        for lengths in ((9,), (9, 2, 5)):
            texts = [
                generate(
                    model,
                    draft,
                    [structure("words"), *([beside()] if beside else [])],
                    lengths,
                    max_new_tokens=8,
                    **options,
                )
                for draft in (None, draft_of(kind, model))
            ]
            assert texts[0].tolist() == texts[1].tolist(), kind


@pytest.mark.parametrize("kind", ["specattn", pytest.param("longspec", marks=pytest.mark.soak)])
def test_distribution_under_a_grammar(kind):
    """Sampled texts of three tokens of a vocabulary of eight, by rejection, beside the enumerated ones."""
    tokenizer = letter_tokenizer("abcde")
    model = tiny_target("qwen3", 1, vocab_size=8)
    processor = StructuredOutput(tokenizer, regex="(a[bc]|b[a-d]?|ca?)e")
    ids, end, rows = tiny_prompts(8, (7,))[0], tokenizer.eos_token_id, 800
    joint = torch.zeros(8, 8, 8, dtype=torch.double)
    more = {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 1, "do_sample": True}
    more |= {"eos_token_id": end, "pad_token_id": 0, "temperature": 1.5, "top_k": 0}

    def after(text, p):
        if len(text) == 3 or end in text:
            joint[tuple(text + [0] * (3 - len(text)))] += p
            return
        bound = processor.bound(7)
        out = model.generate(torch.tensor([[*ids[0].tolist(), *text]]), logits_processor=[bound], **more)
        for token, share in enumerate(out.scores[0][0].double().softmax(-1).tolist()):
            if share:
                after([*text, token], p * share)

    after([], 1.0)
    del more["output_scores"], more["return_dict_in_generate"]
    draft = draft_of(kind, model, **({"acceptance": "rejection"} if kind == "specattn" else {}))
    torch.manual_seed(3)
    more |= {"max_new_tokens": 3, "assistant_model": draft}
    out = model.generate(ids.expand(rows, -1), logits_processor=[processor], **more)
    assert draft.last_speculation.num_accepted_draft_tokens > rows / 50
    texts = torch.nn.functional.pad(out[:, 7:], (0, 10 - out.shape[1]))
    wrong = joint**0.5 / (joint**0.5).sum()
    assert p_value(texts, joint) > 1e-4 > p_value(texts, wrong)


class OfLlguidance(LogitsProcessor):
    """The processor that its documentation shows: a matcher for each row, which advances with each call."""

    def __init__(self, name):
        import llguidance

        own = structure(name)
        self.matchers, self.make = [], lambda: llguidance.LLMatcher(own.vocabulary, own.grammar)

    def __call__(self, input_ids, scores):
        import llguidance.torch as engine

        if not self.matchers:
            self.matchers = [self.make() for _ in input_ids]
        else:
            for matcher, token in zip(self.matchers, input_ids[:, -1].tolist(), strict=True):
                if not matcher.is_stopped():
                    assert matcher.consume_token(token)
        bits = engine.allocate_token_bitmask(len(scores), len(TOKENIZER))
        for row, matcher in enumerate(self.matchers):
            engine.fill_next_token_bitmask(matcher, bits, row)
        is_allowed = (bits[..., None] >> torch.arange(32) & 1).bool().flatten(1)
        is_allowed = torch.nn.functional.pad(is_allowed, (0, VOCAB))[:, : scores.shape[1]]
        return scores.masked_fill(~is_allowed, -torch.inf)


def test_a_matcher_that_advances_with_each_call():
    """N-grams are drafted beside it."""
    model = target_of("llama")
    for kind, name, lengths in (("longspec", "nested", (9,)), ("longspec_ngram", "date", (9, 2, 5))):
        check(model, draft_of(kind, model), lambda name=name: OfLlguidance(name), name, lengths)
    draft = NgramDraftModel.from_target(model)
    generate(model, draft, [OfLlguidance("words")])
    assert draft.last_speculation.num_processed_nodes >= draft.last_speculation.num_emitted_tokens
