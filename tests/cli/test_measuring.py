"""A timed call: what the clock covers, what is counted, and what is no measurement."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_longspec
from hf_longspec.cli.measuring import HfMethod, endless, run_call
from tests.cli.conftest import HUB_CARDS
from tests.tiny_targets import tiny_prompts, tiny_target

# Steps and acceptance are counted.
pytestmark = pytest.mark.usefixtures("every_step_speculates")
PROMPT_SECONDS, STEP_SECONDS = 100.0, 1.0


@pytest.fixture(scope="module")
def target():
    return endless(tiny_target("llama", attn_implementation="sdpa"))


@pytest.fixture
def prompt(target):
    ids = torch.as_tensor(tiny_prompts(target.config.vocab_size, [50])[0])
    return ids, torch.ones_like(ids)


@pytest.fixture(scope="module")
def trained():
    """The tiny target that the repository comes with: its text repeats that of the prompt."""
    return endless(AutoModelForCausalLM.from_pretrained(HUB_CARDS / "tiny-target", dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def code():
    tokenizer = AutoTokenizer.from_pretrained(HUB_CARDS / "tiny-target")
    ids = torch.tensor(tokenizer("for index in range(10):\n    print(index)\n" * 9)["input_ids"])[None, :100]
    return ids, torch.ones_like(ids)


@pytest.mark.parametrize("name", ["hf", "plain"])
def test_time_to_first_token_holds_the_prompt_and_nothing_else(name, target, prompt, widths):
    """A clock that is moved by forwards alone: 100 s for one over the prompt, 1 s for one of a single token."""
    forwards = widths(target)
    method = HfMethod() if name == "hf" else hf_longspec.PlainDraftModel.from_target(target)

    def now():
        return sum(PROMPT_SECONDS if size > 1 else STEP_SECONDS for size in forwards)

    run_call(target, method, prompt, tokens=2, seed=0)  # the first call checks the target
    forwards.clear()
    call = run_call(target, method, prompt, tokens=6, seed=0, now=now)
    # ours runs the last token of the prompt apart
    assert call.ttft_seconds == PROMPT_SECONDS + (STEP_SECONDS if name == "plain" else 0)
    assert call.decode_seconds == 5 * STEP_SECONDS
    assert (call.tokens, call.steps) == (5, 5)


def test_tau_is_that_of_counted_forwards(trained, code, widths):
    """The draft does not run the target: every forward after the prompt is a verification."""
    forwards = widths(trained)
    draft = hf_longspec.LongSpecDraftModel.from_pretrained(HUB_CARDS / "tiny-longspec", dtype=torch.float32)
    run_call(trained, draft, code, tokens=2, seed=0)  # the first call checks the target
    forwards.clear()
    call = run_call(trained, draft, code, tokens=24, seed=0)
    assert call.steps == len(forwards) - 2  # all but the last token of the prompt, then that one
    assert call.tokens == 23 and call.tau > 1


def test_prompt_lookup_is_counted_as_it_verifies(trained, code, widths):
    forwards = widths(trained)
    call = run_call(trained, HfMethod({"prompt_lookup_num_tokens": 4}), code, tokens=24, seed=0)
    assert call.row_steps == [call.steps] and call.steps == len(forwards) - 1 < call.tokens


@pytest.mark.parametrize("name", ["hf", "ngram"])
def test_an_interrupted_call_is_no_measurement(name, target, prompt):
    """With a draft, `generate` returns what it has."""

    def interrupt(tokens):
        if tokens == 3:
            raise KeyboardInterrupt

    how = HfMethod() if name == "hf" else hf_longspec.NgramDraftModel.from_target(target)
    with pytest.raises(KeyboardInterrupt):
        run_call(target, how, prompt, tokens=30, seed=0, on_arrival=interrupt)
