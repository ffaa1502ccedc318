import ast
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hf_longspec.bench.prompts import HELD_OUT, cut_windows, load_prompts, num_disjoint, read_documents, window_starts

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_tiny_target.py"


class Characters:
    """A tokenizer that makes one token of each character."""

    def __call__(self, text, add_special_tokens, verbose):
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}


def test_held_out_modules_are_those_of_the_training_script():
    assignments = [node for node in ast.parse(EXAMPLE.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)]
    named = {node.targets[0].id: node.value for node in assignments if isinstance(node.targets[0], ast.Name)}
    assert ast.literal_eval(named["HELD_OUT"]) == HELD_OUT


def test_standard_library_gives_held_out_modules_only():
    documents = read_documents("stdlib")
    assert {"argparse.py", "typing.py"} <= set(documents) <= {f"{name}.py" for name in HELD_OUT}


@pytest.mark.parametrize("count", [1, 2, 7, 24])
@pytest.mark.parametrize("lengths", [[1000], [1000, 300, 100], [500, 480, 99]], ids=str)
def test_windows_lie_inside_and_are_disjoint_while_there_is_room(lengths, count):
    starts = window_starts(lengths, 100, count)
    assert len(starts) == len(set(starts)) == count
    assert all(0 <= offset <= lengths[document] - 100 for document, offset in starts)
    if count <= max(lengths) // 100 - 1:  # one document alone has room for them
        for document in range(len(lengths)):
            offsets = sorted(offset for index, offset in starts if index == document)
            assert all(b - a >= 100 for a, b in pairwise(offsets))


def test_windows_come_from_every_document_first():
    assert {document for document, _ in window_starts([400, 380, 390], 100, 3)} == {0, 1, 2}


def test_too_short_texts_are_refused_with_their_length():
    with pytest.raises(ValueError, match=r"no document has 100 tokens, the longest has 99\. .*--data"):
        window_starts([99, 5], 100, 1)


def test_cut_windows_are_pieces_of_the_documents():
    cut = cut_windows([torch.arange(50), torch.arange(100, 140)], 10, 4)
    assert cut.shape == (4, 10)
    assert bool((cut.diff(dim=1) == 1).all())


def test_disjoint_windows_are_counted_per_document():
    assert num_disjoint([99, 100, 250], 100) == 3


def test_sources_take_turns(tmp_path):
    for name, letter in (("first", "a"), ("second", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(letter * 40)
    tokens, origin = load_prompts(Characters(), [str(tmp_path / "first"), str(tmp_path / "second")], 10, 3)
    assert [chr(row[0]) for row in tokens] == ["a", "b", "a"]
    assert [source["disjoint_windows"] for source in origin["sources"]] == [4, 4]


def test_a_folder_without_text_is_refused(tmp_path):
    (tmp_path / "image.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no text files .*Name a folder that has some"):
        read_documents(str(tmp_path))
