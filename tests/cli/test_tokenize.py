"""The command that writes text files as a stream of tokens."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from hf_longspec.training import TokenWindows


def test_documents_end_with_the_end_of_text(command, tiny, tmp_path):
    other, stream = tmp_path / "other.txt", tmp_path / "new" / "stream.npy"
    other.write_text("Naïve text.\n", encoding="utf-8")
    result = command("tokenize", tiny.notes, other, "--target", tiny.target, "--output", stream)
    assert result.exit_code == 0, result.output
    tokens = np.load(stream, mmap_mode="r")
    tokenizer = AutoTokenizer.from_pretrained(tiny.target)
    parts = np.split(tokens, np.flatnonzero(tokens == tokenizer.eos_token_id) + 1)
    assert [tokenizer.decode(part[:-1]) for part in parts[:2]] == [tiny.notes.read_text(), "Naïve text.\n"]
    assert len(parts) == 3 and len(parts[2]) == 0
    assert result.stdout.split()[-5:] == [f"{len(tokens):,}", "tokens", "of", "2", "documents."]
    assert [path.name for path in stream.parent.iterdir()] == ["stream.npy"]
    assert TokenWindows(tokens, 16)[0]["input_ids"].tolist() == tokens[:16].tolist()


@pytest.mark.parametrize(
    ("file", "output", "said"),
    [
        ("missing.txt", "s.npy", "cannot read missing.txt"),
        ("empty.txt", "s.npy", "empty.txt is empty"),
        ("notes.txt", "s.bin", "Name it s.npy."),
        ("notes.txt", "notes.txt/s.npy", "notes.txt is a file"),
    ],
)
def test_what_cannot_be_read_or_written_is_one_line(main, tiny, tmp_path, monkeypatch, file, output, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "notes.txt").write_text("A text.")
    status, _, line = main("tokenize", file, "--target", tiny.target, "--output", output)
    assert status == 2 and said in line
    assert {path.name for path in tmp_path.iterdir()} == {"empty.txt", "notes.txt"}
