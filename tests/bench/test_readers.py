"""Layouts on hand-made lines; which were also read as published is said in docs/benchmarks.md."""

import json

import pytest

from hf_longspec.bench.readers import LAYOUTS, read_source

LINES = {
    "LongBench-v2": (
        {"context": "Long.", "question": "Why?", "choice_A": "a", "choice_B": "b", "choice_C": "c", "choice_D": "d"},
        "Long.",
        "\n\nWhy?\n(A) a\n(B) b\n(C) c\n(D) d\nAnswer:",
    ),
    "LongBench, also its RepoBench-P and LCC": ({"context": "Code.", "input": "x ="}, "Code.", "\n\nx =\n"),
    "RepoBench-P": (
        {
            "context": [{"path": "a.py", "identifier": "f", "snippet": "def f(): ..."}],
            "import_statement": "from a import f",
            "code": "f(",
        },
        "# a.py\ndef f(): ...",
        "\n\nfrom a import f\n\nf(\n",
    ),
    "LCC": ({"context": "import os\n", "gt": "os.x"}, "import os\n", ""),
    "QMSum": (
        {
            "meeting_transcripts": [{"speaker": "A", "content": "Hello."}, {"speaker": "B", "content": "Bye."}],
            "general_query_list": [{"query": "Summarize.", "answer": "x"}],
            "specific_query_list": [{"query": "Who?", "answer": "y"}],
        },
        "A: Hello.\nB: Bye.",
        "\n\nSummarize.\n",
    ),
    "Spec-Bench": ({"question_id": 1, "category": "writing", "turns": ["First.", "Second."]}, "First.", ""),
    "AIME": ({"id": 60, "problem": "Find x.", "answer": "4"}, "Find x.", ""),
    "CodeElo": (
        {"description": "Sort.", "input": "n", "output": "sorted", "interaction": "", "note": "None."},
        "Sort.\n\nInput\nn\n\nOutput\nsorted\n\nNote\nNone.",
        "",
    ),
    "texts, such as PG-19": ({"short_book_title": "T", "text": "Once."}, "Once.", ""),
}


def write(path, *records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", [layout.name for layout in LAYOUTS])
def test_every_layout_is_known_by_its_keys(name, tmp_path):
    record, body, tail = LINES[name]
    documents, found = read_source(write(tmp_path / "d.jsonl", record, record))
    assert found == name
    assert [(d.name, d.body, d.tail) for d in documents] == [("d.jsonl:1", body, tail), ("d.jsonl:2", body, tail)]


def test_an_array_is_read_too(tmp_path):
    (tmp_path / "test.json").write_text(json.dumps([LINES["CodeElo"][0]]), encoding="utf-8")
    (tmp_path / "lines.json").write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": "b"}), encoding="utf-8")
    assert read_source(str(tmp_path / "test.json"))[1] == "CodeElo"
    assert [d.body for d in read_source(str(tmp_path / "lines.json"))[0]] == ["a", "b"]


def test_line_separators_inside_a_text_do_not_cut_it(tmp_path):
    text = "one\u2028two\x85three\x0bfour"
    documents, _ = read_source(write(tmp_path / "d.jsonl", {"text": text}))
    assert [document.body for document in documents] == [text]


def test_unknown_keys_are_refused_with_the_layouts_and_the_keys(tmp_path):
    path = write(tmp_path / "d.jsonl", {"prompt": "x", "label": 1})
    with pytest.raises(ValueError, match="line 1: its keys are prompt, label; expected LongBench-v2 ") as error:
        read_source(path)
    assert all(layout.name in str(error.value) for layout in LAYOUTS)


def test_a_line_of_another_layout_is_refused(tmp_path):
    path = write(tmp_path / "d.jsonl", {"text": "x"}, {"turns": ["x"]})
    with pytest.raises(ValueError, match=r"line 2: its keys are turns; expected texts, such as PG-19 \(text\)"):
        read_source(path)


@pytest.mark.parametrize(
    "record",
    [
        {"turns": []},
        {"meeting_transcripts": ["Hello."]},
        {"meeting_transcripts": [], "general_query_list": [{"answer": "x"}]},
        {"context": ["a.py"], "import_statement": "import a", "code": "f("},
    ],
    ids=lambda record: next(iter(record)),
)
def test_values_of_another_form_are_refused_with_their_line(record, tmp_path):
    sound = next(line for line, _, _ in LINES.values() if record.keys() <= line.keys())
    with pytest.raises(ValueError, match=r"line 2: its keys are those of .*, and what they hold is not"):
        read_source(write(tmp_path / "d.jsonl", sound, record))


def test_files_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"d.jsonl is not UTF-8 text"):
        read_source(str(tmp_path / "d.jsonl"))


def test_broken_lines_and_missing_files_are_refused(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"text": "x"}\n{"text"\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 2: no JSON object"):
        read_source(str(tmp_path / "d.jsonl"))
    with pytest.raises(ValueError, match="no such file or folder"):
        read_source(str(tmp_path / "absent.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="is empty"):
        read_source(str(tmp_path / "empty.jsonl"))


def test_folders_hold_texts_or_else_json_lines(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "b.txt").write_text("B", encoding="utf-8")
    (tmp_path / "books" / "a.txt").write_text("A", encoding="utf-8")
    assert [d.body for d in read_source(str(tmp_path / "books"))[0]] == ["A", "B"]
    (tmp_path / "sets").mkdir()
    write(tmp_path / "sets" / "q.jsonl", {"turns": ["Q"]})
    write(tmp_path / "sets" / "t.jsonl", {"text": "T"})
    documents, layout = read_source(str(tmp_path / "sets"))
    assert [d.body for d in documents] == ["Q", "T"]
    assert layout == "Spec-Bench and texts, such as PG-19"
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="no file there ends with"):
        read_source(str(tmp_path / "none"))


def test_the_standard_library_is_built_in():
    documents, _ = read_source("builtin")
    assert "typing.py" in {document.name for document in documents}
