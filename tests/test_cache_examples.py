"""The scripts about caches: answers are those of plain `generate`, and what a file holds is not read again."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import scripts
from tests.tiny_tokenizers import save_byte_target
from tests.watching import before

NEW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_byte_target(tmp_path_factory.mktemp("target"), max_position_embeddings=300)


@pytest.fixture
def widths(monkeypatch):
    """Number of tokens of a row in each forward of the decoder."""
    found = []
    script = scripts.script("restart", "examples")
    load = script.AutoModelForCausalLM.from_pretrained

    def loaded(*args, **kwargs):
        model = load(*args, **kwargs)
        before(monkeypatch, type(model), "forward", lambda _, **inputs: found.append(inputs["input_ids"].shape[1]))
        return model

    monkeypatch.setattr(script.AutoModelForCausalLM, "from_pretrained", loaded)
    return found


def test_a_document_and_twenty_questions(folder, tmp_path, capsys):
    document, questions = tmp_path / "document.txt", tmp_path / "questions.txt"
    document.write_text("one two three. " * 4)
    lines = [f"Is it {'very ' * (number % 3)}{number}?" for number in range(20)]
    questions.write_text("\n".join(lines))
    arguments = ["--target", folder, "--document", document, "--questions", questions, "--tokens", NEW]
    outputs = []
    for _ in range(2):
        assert scripts.run("twenty_questions", *arguments, folder="examples") == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[1] == f"{document.with_suffix('.cache')} holds the document.\n\n{outputs[0]}"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for line in lines[:3]:
        text = f"{document.read_text()}\nQuestion: {line}\nAnswer:"
        ids = tokenizer(text, return_tensors="pt").input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert f"Question: {line}\nAnswer:{answer}\n\n" in outputs[0]


def test_a_conversation_that_goes_on_after_a_restart(folder, tmp_path, capsys, widths):
    chat = tmp_path / "chat"
    for message in ("My name is Ada. " * 5, "What is my name?"):
        widths.clear()
        arguments = ["--target", folder, "--folder", chat, "--tokens", NEW, message]
        assert scripts.run("restart", *arguments, folder="examples") == 0
        told = capsys.readouterr().out
    held, count = (int(told.split()[place]) for place in (0, 2))
    assert held > 80 > 45 > count - held and max(widths) < 45
