"""Distribution of sampled texts of whole calls: that of stock `generate`, enumerated, under every draft.

With rejection sampling nothing else shows that the text is right. Each comparison is repeated with a mistake, a factor
of 0.6 on scores, which must be seen. `pytest -m soak` tries every draft under all options.
"""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_longspec import (
    AssistantDraftModel,
    ContextualPenaltyLogitsProcessor,
    Eagle3DraftModel,
    LongSpecDraftModel,
    NgramDraftModel,
    SpecAttnDraftModel,
    TokenSwiftDraftModel,
)
from hf_longspec.generation import sampling, verification
from hf_longspec.modeling.assistant.generation_assistant import AssistantDrafter
from hf_longspec.modeling.specattn.generation_specattn import SpecAttnDrafter
from tests.distributions import p_value
from tests.pairwise import few, soaked
from tests.robustness.peaked_weights import peak
from tests.robustness.shrunk_configs import shrunk_config
from tests.tiny_targets import TINY_TARGETS, RandomTreeDraftModel, random_draft, tiny_prompts, tiny_target

pytestmark = pytest.mark.usefixtures("every_step_speculates")

# The first token comes from the prompt alone, the others from speculation.
TOKENS, VOCAB = 3, 6
ROWS, FEW_ROWS = 4096, 1024
NEVER = 999  # no token of the vocabulary
RIGHT, WRONG = 1e-4, 1e-6  # a right sampler is below the first once in 10,000 comparisons; the seeds are fixed
FACTOR = 0.6

SPARSE = {"num_assistant_tokens": 2, "sparse_ratio": 0.3, "sparse_min_tokens": 2}
DRAWN = {"num_assistant_tokens": 2, "acceptance": "rejection"}
PENALTY = ContextualPenaltyLogitsProcessor(1.5, 2)
OPTIONS = {
    "free": {"temperature": 1.5, "top_k": 0},
    "warped": {"temperature": 1.5, "top_k": 5, "top_p": 0.95},
    "history": {"temperature": 1.5, "top_k": 0, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "penalised": {"temperature": 1.6, "top_k": 0, "eta_cutoff": 0.02, "logits_processor": [PENALTY]},
    "truncated": {"temperature": 1.6, "top_k": 0, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.4},
}


def assistant(model, small, **settings):
    return AssistantDraftModel.from_model(small, model, **settings)


# Drafter, tokens of the prompt with which a wrong distribution shows most, and maker.
REJECTION = {
    "specattn": (SpecAttnDrafter, 7, lambda model, small: SpecAttnDraftModel.from_target(model, **SPARSE | DRAWN)),
    "window": (AssistantDrafter, 5, lambda model, small: assistant(model, small, **DRAWN, window=3, sinks=1)),
    "PARD": (AssistantDrafter, 5, lambda model, small: assistant(model, small, **DRAWN, pard_token=VOCAB - 1)),
}
COUPLED = {
    "random trees": lambda model, small: RandomTreeDraftModel.from_target(model),
    "assistant, tree": lambda model, small: assistant(model, small, tree_widths=[3, 4]),
    "specattn": lambda model, small: SpecAttnDraftModel.from_target(model, **SPARSE, acceptance="coupled"),
    "longspec": lambda model, small: random_draft(LongSpecDraftModel, model, tree_widths=[3, 3], window=8),
    "eagle3": lambda model, small: random_draft(Eagle3DraftModel, model, tree_widths=[3, 3], draft_vocab_size=5),
    "tokenswift": lambda model, small: random_draft(TokenSwiftDraftModel, model, tree_branching=[1, 3, 2]),
    "n-grams": lambda model, small: NgramDraftModel.from_target(model, ngram_size=1, num_assistant_tokens=2),
}


@cache
def models(target="qwen3"):
    small = tiny_target("llama", 5, vocab_size=VOCAB, num_hidden_layers=1)
    if target in TINY_TARGETS:
        return tiny_target(target, 1, vocab_size=VOCAB), small
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(shrunk_config(target, vocab_size=VOCAB), dtype=torch.float32).eval()
    peak(model, VOCAB)
    return model, small


@cache
def stock_distribution(name, length, target="qwen3"):
    """Joint distribution `(VOCAB,) * TOKENS` by stock `generate`, which processes the scores after every text."""
    texts, joint = tiny_prompts(VOCAB, (length,))[0], torch.ones(1, dtype=torch.double)
    for _ in range(TOKENS):
        more = {"output_scores": True, "return_dict_in_generate": True}
        out = generate(texts, None, name, 1, target, **more)
        joint = (joint[:, None] * out.scores[0].double().softmax(-1)).flatten()
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(texts))[:, None]], 1)
    return joint.view([VOCAB] * TOKENS)


def generate(texts, draft, name, new, target="qwen3", **more):
    more |= {"do_sample": True, "max_new_tokens": new, "eos_token_id": NEVER, "pad_token_id": NEVER}
    more |= {"attention_mask": torch.ones_like(texts), "assistant_model": draft}
    return models(target)[0].generate(texts, **OPTIONS[name], **more)


def p_of(make, length, name, rows, target="qwen3"):
    """p-value of the texts of equal prompts."""
    draft = make(*models(target))
    torch.manual_seed(11)
    prompts = tiny_prompts(VOCAB, (length,))[0].expand(rows, -1)
    texts = generate(prompts, draft, name, TOKENS, target)
    accepted = draft.last_speculation.num_accepted_draft_tokens
    assert rows / 50 < accepted < draft.last_speculation.num_draft_tokens - rows / 50  # some taken, and some refused
    return p_value(texts[:, length:], stock_distribution(name, length, target))


def scale_q(monkeypatch, drafter):
    """Report another distribution of the drafted tokens than that which they were drawn from."""
    propose = drafter.propose

    def wrong(self, root):
        tree = propose(self, root)
        q = tree.q**FACTOR
        return replace(tree, q=q / q.sum(-1, keepdim=True).clamp_min(1e-9))

    monkeypatch.setattr(drafter, "propose", wrong)


def scale_races(monkeypatch):
    """Let the target choose by flatter scores."""
    draw = verification.drawn
    for module in (verification, sampling):
        monkeypatch.setattr(module, "drawn", lambda scores, noise: draw(FACTOR * scores, noise))


def check(break_rule, *call):
    assert p_of(*call) > RIGHT
    break_rule()
    assert p_of(*call) < WRONG


# Where no n-gram may occur again, none is accepted.
PAIRS = [pair for pair in product(COUPLED, OPTIONS) if pair != ("n-grams", "history")]


@pytest.mark.parametrize(
    ("kind", "name", "rows"),
    [
        *few([(kind, name, FEW_ROWS) for kind, name in zip(REJECTION, OPTIONS, strict=False)], 2),
        *soaked(product(REJECTION, OPTIONS, [ROWS])),
    ],
)
def test_rejection_sampling(kind, name, rows, monkeypatch):
    drafter, length, make = REJECTION[kind]
    check(lambda: scale_q(monkeypatch, drafter), make, length, name, rows)


@pytest.mark.parametrize(
    ("kind", "name", "rows"),
    [
        *(("random trees", name, FEW_ROWS // 2) for name in ("history", "truncated")),
        *soaked((kind, name, ROWS) for kind, name in PAIRS),
    ],
)
def test_coupled_drafts(kind, name, rows, monkeypatch):
    check(lambda: scale_races(monkeypatch), COUPLED[kind], 7, name, rows)


@pytest.mark.parametrize("target", few(["granitemoehybrid", "qwen3_5_text"], 1))
def test_rejection_sampling_with_recurrent_states(target, monkeypatch):
    """Of the gated delta rule and of Mamba-2, whose copies the drafting steps change."""
    drafter, length, make = REJECTION["specattn"]
    check(lambda: scale_q(monkeypatch, drafter), make, length, "free", FEW_ROWS, target)


@pytest.mark.parametrize("target", soaked(["granitemoehybrid", "qwen3_5_text"]))
def test_trees_of_coupled_candidates_with_recurrent_states(target, monkeypatch):
    check(lambda: scale_races(monkeypatch), COUPLED["random trees"], 7, "warped", FEW_ROWS, target)
