import gc
import mmap
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_longspec
from hf_longspec.bench.calls import Decoding, HfMethod, endless, run_call
from hf_longspec.bench.machine import PeakMemory
from hf_longspec.bench.prompts import left_padded
from tests.bench.conftest import specattn
from tests.tiny_targets import tiny_prompts

# Steps and acceptance are counted.
pytestmark = pytest.mark.usefixtures("every_step_speculates")
CARDS = Path(__file__).resolve().parents[2] / "hub_cards"
PROMPT_SECONDS, STEP_SECONDS = 100.0, 1.0


@pytest.fixture
def prompt(target):
    rows, _ = tiny_prompts(target.config.vocab_size, [50])
    return left_padded([torch.as_tensor(rows)[0]], 0)


@pytest.fixture(scope="module")
def trained():
    """The tiny target that the repository comes with: its text repeats that of the prompt."""
    return endless(AutoModelForCausalLM.from_pretrained(CARDS / "tiny-target", dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def code(trained):
    tokenizer = AutoTokenizer.from_pretrained(CARDS / "tiny-target")
    ids = torch.tensor(tokenizer("for index in range(10):\n    print(index)\n" * 9)["input_ids"])
    return left_padded([ids[:100]], 0)


@pytest.mark.parametrize("name", ["hf", "plain"])
def test_time_to_first_token_holds_the_prompt_and_nothing_else(name, target, prompt, widths):
    """A clock that is moved by forwards alone: 100 s for one over the prompt, 1 s for one of a single token."""
    forwards = widths(target)
    method = HfMethod() if name == "hf" else hf_longspec.PlainDraftModel.from_target(target)

    def now():
        return sum(PROMPT_SECONDS if size > 1 else STEP_SECONDS for size in forwards)

    run_call(target, method, prompt, decoding=Decoding(), tokens=2, seed=0)  # the first call checks the target
    forwards.clear()
    call = run_call(target, method, prompt, decoding=Decoding(), tokens=6, seed=0, now=now)
    # ours runs the last token of the prompt apart
    assert call.ttft_seconds == PROMPT_SECONDS + (STEP_SECONDS if name == "plain" else 0)
    assert call.decode_seconds == 5 * STEP_SECONDS
    assert (call.tokens, call.steps) == (5, 5)


def test_tau_is_that_of_counted_forwards(trained, code, widths):
    """The draft does not run the target: every forward after the prompt is a verification."""
    forwards = widths(trained)
    draft = hf_longspec.LongSpecDraftModel.from_pretrained(CARDS / "tiny-longspec", dtype=torch.float32)
    run_call(trained, draft, code, decoding=Decoding(), tokens=2, seed=0)  # the first call checks the target
    forwards.clear()
    call = run_call(trained, draft, code, decoding=Decoding(), tokens=24, seed=0)
    assert call.steps == len(forwards) - 2  # all but the last token of the prompt, then that one
    assert call.tokens == 23
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    counted = trained.generate(code[0], assistant_model=draft, **options).speculation
    assert counted.mean_acceptance_length == call.tokens / call.steps > 1
    assert counted.acceptance_histogram == call.histogram


def test_prompt_lookup_is_counted_as_it_verifies(trained, code, widths):
    forwards = widths(trained)
    method = HfMethod({"prompt_lookup_num_tokens": 4}, max_batch=1)
    call = run_call(trained, method, code, decoding=Decoding(), tokens=24, seed=0)
    assert call.steps == len(forwards) - 1 == sum(call.histogram)
    assert sum((drafted + 1) * count for drafted, count in enumerate(call.histogram)) == call.tokens
    assert call.steps < call.tokens


def test_the_last_verification_is_cut_in_what_is_emitted_not_in_what_is_accepted(target, prompt):
    """The draft reads the whole cache, so all of its tokens are accepted."""
    draft = specattn(target, sparse_min_tokens=1000)
    call = run_call(target, draft, prompt, decoding=Decoding(), tokens=7, seed=0)
    assert call.accepted == [0, 0, 0, 2]  # 4 tokens, then 2 of 4
    assert call.histogram == [0, 1, 0, 1]
    assert "drafter" not in vars(draft)


def test_a_penalty_reaches_the_target(target, prompt):
    texts = [
        run_call(target, how, prompt, decoding=Decoding(penalty=penalty), tokens=16, seed=0).text
        for how in (HfMethod(), specattn(target))
        for penalty in (None, 5.0)
    ]
    assert torch.equal(texts[0], texts[2]) and torch.equal(texts[1], texts[3])
    assert not torch.equal(texts[0], texts[1])


@pytest.mark.parametrize("name", ["hf", "specattn"])
def test_an_interrupted_call_is_no_measurement(name, target, prompt):
    """With a draft, `generate` returns what it has."""

    def interrupt(tokens):
        if tokens == 3:
            raise KeyboardInterrupt

    how = HfMethod() if name == "hf" else specattn(target)
    with pytest.raises(KeyboardInterrupt):
        run_call(target, how, prompt, decoding=Decoding(), tokens=30, seed=0, on_arrival=interrupt)


def test_peak_memory_grows_with_what_is_held():
    memory = PeakMemory(torch.device("cpu"))
    if memory.read() is None:
        pytest.skip("this system does not let a process reset its high-water mark")
    gc.collect()  # tensors of earlier tests, freed in between, would hide the growth
    memory.reset()
    before = memory.read()
    held = mmap.mmap(-1, 2**26)  # 64 MiB of new pages; a tensor could take what an earlier one left
    torch.frombuffer(held, dtype=torch.uint8).fill_(1)
    grown = memory.read()
    held.close()
    memory.reset()
    assert 0.9 * 2**26 < grown - before < 2 * 2**26
    assert memory.read() < grown
