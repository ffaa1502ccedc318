"""Decoding after prefilled prompts: the texts of whole calls, prompts that stay as they are, refusals."""

import pytest
import torch

from benchmarks.decoder import Decoder, prefill
from hf_longspec.cli.measuring import HF, PLAIN, HfMethod
from tests.benchmarks.conftest import make_drafts
from tests.tiny_targets import tiny_target


@pytest.mark.parametrize(
    ("name", "rows"), [(HF, slice(1, 3)), (PLAIN, slice(0, 1)), ("SpecAttn", slice(0, 1)), ("SpecAttn", slice(1, 3))]
)
def test_text_from_a_prefilled_cache_is_that_of_the_whole_prompt(target, prompts, name, rows):
    prompt = prompts.tokens[rows, :40]
    truth = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False)
    decoder = Decoder(target, prompts, tokens=9)
    for _ in range(2):  # the second run finds the buffer of the first
        run = decoder.run({HF: HfMethod(), **make_drafts(target)}[name], rows, 40, "greedy", seed=0)
        assert torch.equal(run.text, truth[:, 40:])
        assert run.tokens == 8 * len(truth)
        assert run.decode_seconds > 0


def test_prompt_lookup_is_clocked_from_its_first_tokens_on(target, prompts):
    """Several tokens arrive at once: those of the first arrival are not decoded on the clock, all others are."""
    prompt = prompts.tokens[:1, :40]
    truth = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False)
    method = HfMethod({"prompt_lookup_num_tokens": 3})
    run = Decoder(target, prompts, tokens=9).run(method, slice(0, 1), 40, "greedy", seed=0)
    assert torch.equal(run.text, truth[:, 40:])
    assert 5 <= run.tokens <= 8 and 1 <= run.steps <= run.tokens and run.shares == {}


def test_a_run_leaves_the_prompts_as_they_were(target, prompts):
    before = [part.clone() for layer in prompts.layers for part in layer]
    decoder = Decoder(target, prompts, tokens=5)
    for draft in (HfMethod(), *make_drafts(target).values()):
        decoder.run(draft, slice(0, 2), 50, "sample", seed=1)
    assert all(torch.equal(a, b) for a, b in zip(before, (p for layer in prompts.layers for p in layer), strict=True))


def test_windows_are_refused():
    for kind in ("mistral", "deepseek_v3"):
        with pytest.raises(ValueError, match="sliding-window, latent or recurrent layers"):
            prefill(tiny_target(kind), torch.ones(1, 4, dtype=torch.long))
