"""The script that writes a long text: the text in the file, its messages, Ctrl-C; and the count of n-grams."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.distinct_ngrams import ORDERS, distinct
from hf_longspec import ContextualPenaltyLogitsProcessor, SpecAttnDraftModel
from tests import scripts
from tests.tiny_tokenizers import save_byte_target

pytestmark = pytest.mark.usefixtures("every_step_speculates")

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random target with a byte-level tokenizer, whose text is full of broken characters."""
    return save_byte_target(tmp_path_factory.mktemp("target"), max_position_embeddings=64)


@pytest.fixture
def run(monkeypatch, folder, tmp_path, capsys):
    """`run(*arguments)`: exit status, text in the file, and what was printed."""
    script = scripts.script("long_generation", "examples")
    monkeypatch.setattr(script, "MARK", 20)

    def call(*arguments):
        path = tmp_path / "story.txt"
        arguments = ["--target", folder, "--output", path, "--prompt", PROMPT, "--tokens", 70, *arguments]
        status = scripts.run("long_generation", *arguments, folder="examples")
        return status, path.read_text(encoding="utf-8"), capsys.readouterr()

    call.script = script
    return call


@cache
def expected(folder, tokens=70, penalty=None):
    """The text of plain generate."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    model.generation_config.eos_token_id = None
    processors = [ContextualPenaltyLogitsProcessor(*penalty)] if penalty else []
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, logits_processor=processors)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("draft", ["plain", "specattn", "folder"])
def test_the_file_holds_the_text_of_plain_generate(run, folder, tmp_path, draft):
    if draft == "folder":
        draft = tmp_path / "draft"
        model = AutoModelForCausalLM.from_pretrained(folder)
        SpecAttnDraftModel.from_target(model, num_assistant_tokens=2).save_pretrained(draft)
    status, text, printed = run("--draft", draft, "--greedy", "--penalty", 1, "--endless")
    assert status == 0
    assert text == expected(folder)
    assert "86 tokens are more than the 64 positions that the target was made for." in printed.out
    lines = printed.out.splitlines()
    assert [line.split(" tokens/s")[0].split(":")[0] for line in lines if "tau" in line and "last" in line] == [
        "20 tokens", "40 tokens", "60 tokens",
    ]  # fmt: skip
    assert f"70 tokens in {tmp_path / 'story.txt'} (complete)." in lines


def test_control_c(run, folder, monkeypatch):
    """After some tokens, the file holds them; before the first one there is nothing to conclude."""

    def interrupt(*_):
        raise KeyboardInterrupt

    class Interrupted(run.script.MarkedStreamer):
        def put(self, value):
            super().put(value)
            if self.tokens == 30:
                interrupt()

    monkeypatch.setattr(run.script, "MarkedStreamer", Interrupted)
    status, text, printed = run("--greedy", "--penalty", 1, "--endless", "--draft", "plain")
    assert status == 130 and "30 tokens in" in printed.out and "(interrupted)" in printed.out
    assert text == expected(folder, tokens=30)
    monkeypatch.setattr(ContextualPenaltyLogitsProcessor, "__call__", interrupt)
    status, text, printed = run("--greedy", "--penalty", 2, "--endless", "--draft", "plain")
    assert status == 130 and text == "" and printed.err.endswith("Interrupted before the first token.\n")


def share(tokens, n):
    grams = [str(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams)


def by_hand(tokens, n, window):
    windows = []
    while len(tokens) >= (len(windows) + 1) * window:
        windows.append(tokens[len(windows) * window : (len(windows) + 1) * window])
    shares = [share(part, n) for part in windows or [tokens]]
    return {"windowed": sum(shares) / len(shares), "corpus": share(tokens, n)}


@given(st.lists(st.integers(0, 5), min_size=4, max_size=60), st.integers(4, 25))
def test_distinct_ngrams_equal_a_double_loop(tokens, window):
    for n in ORDERS:
        assert distinct(tokens, n, window) == pytest.approx(by_hand(tokens, n, window))
