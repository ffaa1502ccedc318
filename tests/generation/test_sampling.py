"""Sampling through the whole loop; of rejection sampling see test_distribution_of_texts.py."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.tiny_targets import RandomTreeDraftModel, generate, tiny_prompts

pytestmark = pytest.mark.usefixtures("every_step_speculates")

RAGGED = (33, 3, 13)
WARPED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1}


def sample(model, draft, lengths=RAGGED, seed=0, new=12, **options):
    """Return the sampled continuations as lists."""
    out = generate(model, draft, lengths, seed, do_sample=True, max_new_tokens=new, **options)
    return out[:, max(lengths) :].tolist()


def random_draft(model, hints, **settings):
    draft = RandomTreeDraftModel.from_target(model)
    vars(draft).update({"hints": hints, "num_nodes": 9} | settings)
    return draft


def test_the_text_is_a_gumbel_max_sample_of_the_bare_model(target):
    """Replays the text with the documented seeds, a forward of the bare model and a noise row per token."""
    model = target("qwen3")
    drawn = sample(model, RandomTreeDraftModel.from_target(model), seed=7, new=6, **WARPED)
    torch.manual_seed(7)
    seeds = torch.randint(2**62, (len(RAGGED) + 1,)).tolist()
    processors = [
        RepetitionPenaltyLogitsProcessor(WARPED["repetition_penalty"]),
        TemperatureLogitsWarper(WARPED["temperature"]),
        TopKLogitsWarper(WARPED["top_k"]),
        TopPLogitsWarper(WARPED["top_p"]),
    ]
    input_ids, attention_mask = tiny_prompts(128, RAGGED)
    for row, (seed, keep) in enumerate(zip(seeds[1:], attention_mask.bool(), strict=True)):
        generator = torch.Generator().manual_seed(seed)
        text, padded = input_ids[row, keep][None], input_ids[row][None]
        for token in drawn[row]:
            with torch.no_grad():
                scores = model(text).logits[:, -1]
            scores = LogitsProcessorList(processors)(padded, scores)
            noise = torch.empty(128, dtype=torch.float64).exponential_(generator=generator)
            assert token == int((scores.softmax(-1).double() / noise).argmax())
            new = torch.tensor([[token]])
            text, padded = torch.cat([text, new], 1), torch.cat([padded, new], 1)


class Spoiled(LogitsProcessor):
    """Writes a value over all scores of one row, or of all, from a column on."""

    stateless = True

    def __init__(self, column, value, row=slice(None)):
        self.column, self.value, self.row = column, value, row

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.column:
            scores = scores.clone()
            scores[self.row] = self.value
        return scores


class SpoiledByRank(LogitsProcessor):
    """Writes a value over the scores of a row whose best token is one of a set, so that it needs no text."""

    history_free = True

    def __init__(self, value):
        self.value = value

    def __call__(self, input_ids, scores):
        return torch.where(scores.argmax(-1, keepdim=True) % 4 == 0, self.value, scores)


def error_of(model, draft, **options):
    try:
        return sample(model, draft, **options)
    except RuntimeError as error:
        return str(error).split(":")[0]


COUPLED, REJECTION = {"acceptance": "coupled"}, {"acceptance": "rejection"}


@pytest.mark.parametrize(
    ("kind", "settings", "lengths", "options"),
    [
        ("chain", {}, RAGGED, {"temperature": 1e-38}),
        ("specattn", REJECTION, (21,), {"temperature": 1e-38}),
        ("tree", {}, RAGGED, {"logits_processor": [Spoiled(38, torch.nan)]}),
        ("chain", {}, (33,), {"logits_processor": [Spoiled(38, -torch.inf)]}),
        ("specattn", REJECTION, RAGGED, {"logits_processor": [Spoiled(41, torch.inf, 2)]}),
        ("tree", {}, RAGGED, {"logits_processor": [SpoiledByRank(-torch.inf)]}),
        ("specattn", COUPLED, RAGGED, {"logits_processor": [SpoiledByRank(torch.nan)]}),
    ],
)
def test_scores_without_a_distribution_are_the_error_of_stock_generate(plain_run, kind, settings, lengths, options):
    run = plain_run("llama", lengths, max_new_tokens=12)
    expected = error_of(run.model, None, lengths=lengths, **options)
    assert expected.startswith("probability tensor contains either")
    if kind in ("tree", "chain"):
        settings = {"hints": run.generated, "luck": 0.8}
    draft = run.draft(kind, **settings)
    for _ in range(2):
        assert error_of(run.model, draft, lengths=lengths, **options) == expected
    assert len(sample(run.model, draft, lengths=lengths)) == len(lengths)  # the next call works
