"""Prompts from documents and data sets: layouts on hand-made lines, windows, padding."""

import ast
import json
from itertools import pairwise
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer, LlamaConfig

from benchmarks.harness import load_prompts
from hf_longspec.bench.prompts import (
    HELD_OUT,
    LAYOUTS,
    Document,
    DocumentPrompts,
    read_source,
    read_sources,
    window_starts,
)

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
    "Spec-Bench and SPEED-Bench": (
        {"question_id": 1, "category": "writing", "turns": ["First.", "Second."]},
        "First.",
        "",
    ),
    "AIME": ({"id": 60, "problem": "Find x.", "answer": "4"}, "Find x.", ""),
    "CodeElo": (
        {"description": "Sort.", "input": "n", "output": "sorted", "interaction": "", "note": "None."},
        "Sort.\n\nInput\nn\n\nOutput\nsorted\n\nNote\nNone.",
        "",
    ),
    "conversations": (
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]},
        "Why?",
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


def test_arrays_and_lines_with_separators_inside_are_read(tmp_path):
    (tmp_path / "test.json").write_text(json.dumps([LINES["CodeElo"][0]]), encoding="utf-8")
    assert read_source(str(tmp_path / "test.json"))[1] == "CodeElo"
    texts = ["one\u2028two\x85three\x0bfour", "b"]
    for name in ("lines.json", "d.jsonl"):
        found, _ = read_source(write(tmp_path / name, *({"text": each} for each in texts)))
        assert [document.body for document in found] == texts


REFUSED = {
    "unknown keys": ('{"prompt": "x", "label": 1}', "line 1: its keys are prompt, label; expected LongBench-v2 "),
    "another layout": (
        '{"text": "x"}\n{"turns": ["x"]}',
        r"line 2: its keys are turns; expected texts, such as PG-19 \(text\)",
    ),
    "no turn": (
        '{"turns": ["x"]}\n{"turns": []}',
        "line 2: its keys are those of Spec-Bench and .* what they hold",
    ),
    "no speaker": (
        '{"meeting_transcripts": ["Hello."]}',
        "line 1: its keys are those of QMSum .* what they hold",
    ),
    "no user": ('{"messages": [{"role": "system", "content": "x"}]}', "those of conversations .* what they hold"),
    "no text": ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "conversations .* what they hold"),
    "a placeholder": (
        '{"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]}',
        "line 1: the text is a placeholder of SPEED-Bench, .*preparation script",
    ),
    "no object": ("[1]", "line 1: its keys are none, it is a list"),
    "no JSON": ('{"text": "x"}\n{"text"\n', "line 2: no JSON object"),
    "nothing": ("\n", "is empty"),
    "no UTF-8": (b"\xff\xfe\x00", "d.jsonl is not UTF-8 text"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_refused_with_its_line(kind, tmp_path):
    content, message = REFUSED[kind]
    path = tmp_path / "d.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as error:
        read_source(str(path))
    assert kind != "unknown keys" or all(layout.name in str(error.value) for layout in LAYOUTS)


def test_missing_files_and_tables_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        read_source(str(tmp_path / "absent.jsonl"))
    (tmp_path / "d.parquet").write_bytes(b"no table")
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        read_source(str(tmp_path / "d.parquet"))


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
    assert layout == "Spec-Bench and SPEED-Bench and texts, such as PG-19"
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="no file there ends with"):
        read_source(str(tmp_path / "none"))


def tokenizer(text, **_):
    """One token per character."""
    return {"input_ids": [ord(letter) for letter in text]}


def text(ids):
    return "".join(map(chr, ids.tolist()))


@pytest.mark.parametrize(
    ("tail", "length", "expected"),
    [("??", 10, ["abcdefgh??", "ijklmnop??"]), ("0123456789", 8, ["abcdef89", "klmnop89"]), ("?", 3, ["abc", "nop"])],
)
def test_prompts_end_with_at_most_a_quarter_of_the_tail(tail, length, expected):
    prompts = DocumentPrompts(tokenizer, [Document("d", "abcdefghijklmnop", tail)])
    assert [text(prompt.ids) for prompt in prompts.windows(length, 2)] == expected


def test_documents_take_turns_and_short_ones_are_left_out():
    documents = [Document("a", "a" * 40), Document("b", "b" * 38), Document("c", "c" * 5)]
    found = DocumentPrompts(tokenizer, documents).windows(10, 2)
    assert sorted(text(prompt.ids)[0] for prompt in found) == ["a", "b"]


def test_own_lengths_are_whole_documents_that_fit_from_the_beginning_again():
    documents = [Document("a", "aaa", "?"), Document("b", "b" * 9), Document("c", "cc")]
    prompts = DocumentPrompts(tokenizer, documents)
    assert [text(prompt.ids) for prompt in prompts.own(3, limit=6)] == ["aaa?", "cc", "aaa?"]
    with pytest.raises(ValueError, match="no document has between 1 and 1 tokens"):
        prompts.own(1, limit=1)


def test_disjoint_windows_are_counted_per_document():
    prompts = DocumentPrompts(tokenizer, [Document("a", "a" * 25), Document("b", "b" * 9, "?")])
    assert prompts.describe([10, 0]) == {"documents": 2, "tokens": 35, "disjoint_windows": {"10": 3}}


EXAMPLE = Path(__file__).parents[2] / "examples" / "train_tiny_target.py"


def test_held_out_modules_are_those_of_the_training_script():
    assignments = [node for node in ast.parse(EXAMPLE.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)]
    named = {node.targets[0].id: node.value for node in assignments if isinstance(node.targets[0], ast.Name)}
    assert ast.literal_eval(named["HELD_OUT"]) == HELD_OUT


def test_standard_library_gives_held_out_modules_only():
    names = {document.name for document in read_source("builtin")[0]}
    assert {"argparse.py", "typing.py"} <= names <= {f"{name}.py" for name in HELD_OUT}


@pytest.mark.parametrize(
    ("lengths", "count"), [([1000], 1), ([1000], 24), ([1000, 300, 100], 7), ([500, 480, 99], 2), ([500, 480, 99], 24)]
)
def test_windows_lie_inside_and_are_disjoint_while_there_is_room(lengths, count):
    starts = window_starts(lengths, 100, count)
    assert len(starts) == len(set(starts)) == count
    assert all(0 <= offset <= lengths[document] - 100 for document, offset in starts)
    if count <= max(lengths) // 100 - 1:  # one document alone has room for them
        for document in range(len(lengths)):
            offsets = sorted(offset for index, offset in starts if index == document)
            assert all(b - a >= 100 for a, b in pairwise(offsets))


def test_too_short_texts_are_refused_with_their_length():
    with pytest.raises(ValueError, match=r"no document has 100 tokens, the longest has 99\. .*--data"):
        window_starts([99, 5], 100, 1)


def test_sources_take_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda target: tokenizer)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda target: LlamaConfig())

    for name, letter in (("first", "a"), ("second", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(letter * 40)
    tokens, origin = load_prompts("target", [str(tmp_path / "first"), str(tmp_path / "second")], 10, 3)
    assert [chr(row[0]) for row in tokens] == ["a", "b", "a"]
    assert [source["disjoint_windows"] for source in origin["sources"]] == [4, 4]


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_tables_are_read_by_their_keys_or_by_a_column(suffix, tmp_path):
    rows = {"problem": ["Find x.", "Find y."], "answer": ["4", "5"], "notes": ["a", "b"]}
    path = str(tmp_path / f"d.{suffix}")
    getattr(Dataset.from_dict(rows), f"to_{suffix}")(path)
    documents, layout = read_source(path)
    assert (layout, [d.body for d in documents]) == ("AIME", ["Find x.", "Find y."])
    documents, layout = read_source(path, "notes")
    assert (layout, [d.body for d in documents]) == ("column notes", ["a", "b"])
    assert [d.body for d in read_source(write(tmp_path / "d.jsonl", {"text": "x", "story": "once"}), "story")[0]] == [
        "once"
    ]
    with pytest.raises(ValueError, match=r"line 1: its keys are problem, answer, notes; expected column body"):
        read_source(path, "body")


def test_turns_may_be_a_text_and_documents_have_the_category_of_their_data_set(tmp_path):
    path = write(tmp_path / "speed.jsonl", {"turns": "One?", "category": "math"}, {"turns": ["Two?"], "category": 3})
    assert [(d.body, d.category) for d in read_source(path)[0]] == [("One?", "math"), ("Two?", "")]
    table = tmp_path / "speed.parquet"
    Dataset.from_list([{"turns": ["One?", "More?"], "category": "math"}]).to_parquet(str(table))
    assert [(d.body, d.category) for d in read_source(str(table))[0]] == [("One?", "math")]


def test_several_sources_take_turns_and_name_documents_without_a_category(tmp_path):
    first = write(tmp_path / "speed.jsonl", {"turns": "a", "category": "math"}, {"turns": "b"}, {"turns": "c"})
    second = write(tmp_path / "books.jsonl", {"text": "d"})
    documents, layout = read_sources([first, second])
    assert [(d.body, d.category) for d in documents] == [("a", "math"), ("d", "books"), ("b", "speed"), ("c", "speed")]
    assert layout == "Spec-Bench and SPEED-Bench and texts, such as PG-19"
    assert [d.category for d in read_sources([second])[0]] == [""]


class ChatTokenizer:
    """A token per letter, and a template."""

    chat_template = "given"

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, messages, **options):
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return f"[{messages[0]['role']}]{messages[0]['content']}[model]"


def test_a_chat_template_surrounds_every_prompt():
    documents = [Document("a", "b" * 50, "?", "first"), Document("c", "d" * 40, "", "second")]
    prompts = DocumentPrompts(ChatTokenizer(), documents, chat=True)
    windows = prompts.windows(40, 4)
    found = [text(prompt.ids) for prompt in windows]
    assert {len(each) for each in found} == {40}
    assert all(each.startswith("[user]") and each.endswith("[model]") for each in found)
    assert sum(each.endswith("?[model]") for each in found) == sum("b" in each for each in found) > 0
    expected = ["first" if "b" in each else "second" for each in found]
    assert [prompt.category for prompt in windows] == expected and set(expected) == {"first", "second"}
    (whole,) = prompts.own(1, 100)
    assert (text(whole.ids), whole.category) == ("[user]" + "b" * 50 + "?[model]", "first")


def test_tokenizers_without_a_usable_chat_template_are_refused():
    class Shouting(ChatTokenizer):
        def apply_chat_template(self, messages, **_):
            return messages[0]["content"].upper()

    for tokenizer, message in ((lambda text, **_: {"input_ids": []}, "no chat template"), (Shouting(), "writes")):
        with pytest.raises(ValueError, match=f"--chat: .*{message}"):
            DocumentPrompts(tokenizer, [Document("a", "b")], chat=True)
