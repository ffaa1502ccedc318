"""Sampled text with a draft model: its distribution is that of the target, under every rule of acceptance."""

import pytest
import torch

from hf_longspec import AssistantDraftModel
from hf_longspec.auditing_sampling import MAX_SIGMA
from hf_longspec.testing import tiny_prompts, tiny_target
from tests.distributions import max_z_score

pytestmark = pytest.mark.usefixtures("every_step_speculates")

ROWS, TOKENS, VOCAB = 2000, 3, 6
TEMPERATURE = 1.5

DRAFTS = {
    "coupled chain": {"num_assistant_tokens": 3},
    "coupled tree": {"tree_widths": [2, 3]},
    "rejection": {"num_assistant_tokens": 2, "acceptance": "rejection"},
    "rejection, window": {"num_assistant_tokens": 2, "acceptance": "rejection", "window": 3, "sinks": 1},
    "rejection, PARD": {"num_assistant_tokens": 2, "acceptance": "rejection", "pard_token": 5},
}


@pytest.fixture(scope="module")
def pair():
    return tiny_target("qwen3", vocab_size=VOCAB), tiny_target("llama", 5, vocab_size=VOCAB, num_hidden_layers=1)


@torch.no_grad()
def joint(model, prompt):
    """The exact distribution of the next tokens, by one plain forward for each text."""
    texts = torch.cartesian_prod(*[torch.arange(VOCAB)] * TOKENS)
    whole = torch.cat([prompt.expand(len(texts), -1), texts], 1)
    logits = model(whole).logits[:, prompt.shape[1] - 1 : -1].double() / TEMPERATURE
    return logits.log_softmax(-1).gather(2, texts[..., None]).sum((1, 2)).exp().view([VOCAB] * TOKENS)


@pytest.mark.parametrize("kind", DRAFTS)
def test_text_has_the_distribution_of_the_target(pair, kind):
    model, small = pair
    prompt, _ = tiny_prompts(VOCAB, (5,))
    draft = AssistantDraftModel.from_model(small, model, **DRAFTS[kind])
    torch.manual_seed(11)
    options = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "eos_token_id": 999, "pad_token_id": 999}
    text = model.generate(prompt.repeat(ROWS, 1), assistant_model=draft, max_new_tokens=TOKENS, **options)
    stats = draft.last_speculation
    assert ROWS / 10 < stats.num_accepted_draft_tokens < stats.num_draft_tokens - ROWS / 10
    assert max_z_score(text[:, prompt.shape[1] :], joint(model, prompt)) < MAX_SIGMA
