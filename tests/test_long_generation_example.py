"""The script that writes a long text: what is in the file, what it says on the way, and Ctrl-C."""

from functools import cache

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longspec import ContextualPenaltyLogitsProcessor, SpecAttnDraftModel
from tests import example_scripts
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
    script = example_scripts.script("long_generation")
    monkeypatch.setattr(script, "MARK", 20)

    def call(*arguments):
        path = tmp_path / "story.txt"
        arguments = ["--target", folder, "--output", path, "--prompt", PROMPT, "--tokens", 70, *arguments]
        status = example_scripts.run("long_generation", *arguments)
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
