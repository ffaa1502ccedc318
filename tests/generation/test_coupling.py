"""Candidates ranked by the target's token rule: against a loop over nodes, and against the target's choices."""

import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation.logits_process import EtaLogitsWarper, MinPLogitsWarper, TemperatureLogitsWarper
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_longspec import ContextualPenaltyLogitsProcessor
from hf_longspec.generation.sampling import SHARPNESS, Coupling, NoiseRows, TokenRule
from hf_longspec.generation.sequences import Sequences
from tests.tiny_targets import random_tokenswift_draft, tiny_prompts

pytestmark = pytest.mark.usefixtures("every_step_speculates")

VOCAB, PROMPT = 11, 6
NEVER = 999  # no token of the tiny targets
WARPERS = [TemperatureLogitsWarper(0.7), MinPLogitsWarper(0.05)]


def make_rule(processors, do_sample, emitted=((4,), (5, 9, 2))):
    """Return a token rule of two rows that have emitted different numbers of tokens."""
    prompts = torch.randint(VOCAB, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    sequences = Sequences(prompts, StoppingCriteriaList(), pad_token_id=0, max_length=40)
    sequences.append([list(row) for row in emitted])
    torch.manual_seed(3)
    noise = NoiseRows(2, VOCAB, torch.device("cpu")) if do_sample else None
    return TokenRule(LogitsProcessorList(processors), do_sample, sequences, noise)


def looped(rule, logits, depth, paths):
    """Return scores of one node of one row at a time: processors on its own text, then noise of its position."""
    scores = torch.empty_like(logits)
    for row, emitted in enumerate(rule.sequences.generated):
        prompt = rule.sequences.tokens[row, :PROMPT].tolist()
        for node in range(logits.shape[1]):
            text = torch.tensor([prompt + list(emitted) + paths[row, node].tolist()])
            score = logits[row, node][None]
            for processor in rule.processors:
                score = processor(text, score)
            if rule.do_sample:
                score = score - rule.noise.rows(depth + 1)[row, depth].log()
            scores[row, node] = score[0]
    return scores


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "processors",
    [
        WARPERS,
        [RepetitionPenaltyLogitsProcessor(1.7), *WARPERS],
        [ContextualPenaltyLogitsProcessor(3.0, 2)],  # shorter than the path
        [ContextualPenaltyLogitsProcessor(3.0, 9)],  # longer than the text of one row
    ],
    ids=["warped", "penalised", "windowed", "short"],
)
def test_scores_match_the_loop(processors, do_sample):
    rule = make_rule(processors, do_sample)
    random = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 5, VOCAB, generator=random) * 2
    paths = torch.randint(VOCAB, (2, 5, 3), generator=random)
    coupling = Coupling(rule)
    known = coupling.known(4)
    assert len(known) == do_sample + (rule.recent() is not None and not rule.history_free)
    got = coupling.scores(logits, known, 3, lambda: paths)
    assert torch.equal(got, Coupling(rule).scores(logits, known, 3, paths))
    expected = looped(rule, logits, 3, paths)
    assert torch.equal(got.isfinite(), expected.isfinite()) and expected.isfinite().sum() > 20
    # scores are known up to a constant per node; 1e-4: logarithms of float32 noise, computed in another order
    factor = SHARPNESS if do_sample else 1.0
    lead, expected_lead = got - got.amax(-1, keepdim=True), expected - expected.amax(-1, keepdim=True)
    torch.testing.assert_close(lead, factor * expected_lead, atol=1e-4, rtol=1e-4)


def test_which_rules_fit_graphs():
    """Only known processors that read at most the last tokens fit."""

    class Temperature(TemperatureLogitsWarper):
        pass

    for processors, fits in (
        ([], True),
        (WARPERS, True),
        ([TemperatureLogitsWarper(0.7), EtaLogitsWarper(0.01)], False),
        ([Temperature(0.7)], False),
        ([RepetitionPenaltyLogitsProcessor(1.7), *WARPERS], False),
        ([ContextualPenaltyLogitsProcessor(1.7, PROMPT + 1), *WARPERS], True),
        ([ContextualPenaltyLogitsProcessor(1.7, PROMPT + 2), *WARPERS], False),  # one row has fewer tokens
    ):
        assert Coupling(make_rule(processors, do_sample=True)).fits_graphs == fits
    keys = [
        Coupling(make_rule([MinPLogitsWarper(at)], do_sample)).key for at in (0.1, 0.2) for do_sample in (True, False)
    ]
    assert len(set(keys)) == 4
    assert Coupling(make_rule([MinPLogitsWarper(0.1)], True)).key == keys[0]


SAMPLED = [
    {"temperature": 0.8, "top_k": 30, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 0, "min_p": 0.02, "logits_processor": [ContextualPenaltyLogitsProcessor(1.5, 8)]},
    {"repetition_penalty": 1.3, "top_k": 0},
]


@pytest.mark.parametrize("options", SAMPLED, ids=lambda options: "-".join(options))
def test_a_draft_with_the_target_distribution_is_always_right(target, options):
    """The target drafts one token over its whole cache, and all are accepted, though no token is likely."""
    model = target("llama")
    draft = random_tokenswift_draft(model, self_draft="partial_kv", tree_branching=[1], partial_kv_policy="full")
    input_ids, attention_mask = tiny_prompts(model.config.vocab_size, (33, 3, 13))
    torch.manual_seed(0)
    inputs = {"attention_mask": attention_mask, "max_new_tokens": 24, "eos_token_id": NEVER}
    model.generate(input_ids, assistant_model=draft, do_sample=True, **inputs, **options)
    stats = draft.last_speculation
    assert stats.num_draft_tokens == stats.num_spec_steps >= 30
    # the last drafted token of a row may be beyond the end of the text
    assert stats.num_accepted_draft_tokens >= stats.num_draft_tokens - 3
