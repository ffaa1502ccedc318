"""From datasets to rows and batches."""

import copy
import json

import numpy as np
import pytest
import torch

from hf_longspec.training import DraftCollator, DraftTrainingArguments, TokenWindows, pack
from hf_longspec.training.data import DocumentEncoder

datasets = pytest.importorskip("datasets")
TEXTS = ["one", "second text", "", "the third of the texts"]


@pytest.fixture
def args(tmp_path):
    return DraftTrainingArguments(str(tmp_path), use_cpu=True)


def encode(text, tokenizer):
    return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


def test_the_end_of_text_token_is_appended_and_predicted(args, tokenizer):
    tokens, labels = DocumentEncoder(args, tokenizer)({"text": "some text"})
    assert tokens.tolist() == labels.tolist() == encode("some text", tokenizer)
    again, _ = DocumentEncoder(args, tokenizer)({"text": "some text<eos>"})
    assert again.tolist() == tokens.tolist()
    args.max_length = 4
    cut, labels = DocumentEncoder(args, tokenizer)({"text": "some text"})
    assert cut.tolist() == labels.tolist() == tokens[:4].tolist()


def test_tokens_and_labels_are_used_as_they_are(args):
    tokens, labels = DocumentEncoder(args)({"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "text": 3})
    assert tokens.tolist() == [5, 6, 7] and labels.tolist() == [-100, 6, 7]


@pytest.mark.parametrize("assistant_only", [False, True])
def test_conversations_go_through_the_template(args, tokenizer, assistant_only):
    args.assistant_only = assistant_only
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    tokens, labels = DocumentEncoder(args, tokenizer)({"messages": messages})
    assert tokenizer.decode(tokens) == "U:hiA:yes<eos>"
    predicted = labels[labels != -100]
    assert tokenizer.decode(predicted) == ("yes<eos>" if assistant_only else "U:hiA:yes<eos>")
    (row,) = pack(datasets.Dataset.from_dict({"messages": [messages] * 2}), tokenizer, args, 100)
    assert row["input_ids"] == tokens.tolist() * 2 and row["labels"] == labels.tolist() * 2


WITH_TOOLS = "{% if tools %}{{ tools[0].name }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
GOOD = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"name": "look", "parameters": {}}]


@pytest.fixture
def templated(tokenizer):
    """A tokenizer with another template."""

    def make(template=None):
        changed = copy.copy(tokenizer)
        changed.chat_template = template or tokenizer.chat_template
        return changed

    return make


@pytest.mark.parametrize("row", [{"messages": [{"from": "human", "value": "hi"}]}, {"messages": ["hi"]}])
def test_messages_that_a_template_would_not_write_are_refused(make_trainer, tokenizer, row):
    """Before training, also packed."""
    with pytest.raises(ValueError, match=r"messages has a message .*role and content.*Rename"):
        make_trainer(dataset=[row], tokenizer=tokenizer)
    args = make_trainer(dataset=[GOOD], tokenizer=tokenizer).args
    with pytest.raises(ValueError, match="role and content"):
        pack(datasets.Dataset.from_list([row]), tokenizer, args, 100)


@pytest.mark.parametrize("kind", [list, json.dumps])
def test_tools_are_passed_to_the_template(args, templated, kind):
    encode = DocumentEncoder(args, templated(WITH_TOOLS))
    assert templated().decode(encode(GOOD | {"tools": kind(TOOLS)})[0]) == "lookhi"
    assert templated().decode(encode(GOOD | {"tools": None})[0]) == "hi"


def test_a_template_without_marks_cannot_train_on_the_assistant_only(args, templated):
    args.assistant_only = True
    with pytest.raises(ValueError, match="assistant_only"):
        DocumentEncoder(args, templated(WITH_TOOLS))(GOOD)


def test_batches_are_padded_on_the_right(args):
    rows = [{"input_ids": [7, 8, 9]}, {"input_ids": torch.tensor([4])}]
    batch = DraftCollator(DocumentEncoder(args), vocab_size=10, pad_token_id=1)(rows)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[7, 8, 9], [4, 1, 1]],
        "labels": [[7, 8, 9], [4, -100, -100]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
    }


@pytest.mark.parametrize(("row", "match"), [([3, -1], "token -1"), ([3, 10], "token 10"), ([], "no tokens")])
def test_empty_rows_and_tokens_outside_the_vocabulary_are_refused(args, row, match):
    with pytest.raises(ValueError, match=match):
        DraftCollator(DocumentEncoder(args), vocab_size=10)([{"input_ids": [3]}, {"input_ids": row}])


@pytest.mark.parametrize(("streaming", "length"), [(False, 5), (True, 1000)])
def test_packed_rows_are_the_documents_one_after_the_other(args, tokenizer, streaming, length):
    documents = datasets.Dataset.from_dict({"number": [1, 2, 3, 4], "text": TEXTS})
    rows = list(pack(documents.to_iterable_dataset() if streaming else documents, tokenizer, args, length))
    stream = [token for text in TEXTS for token in encode(text, tokenizer)]
    assert [token for row in rows for token in row["input_ids"]] == stream
    assert [len(row["input_ids"]) for row in rows[:-1]] == [length] * (len(rows) - 1)
    assert all(set(row) == {"input_ids", "labels"} and row["labels"] == row["input_ids"] for row in rows)


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda tokens: np.array(tokens, dtype=np.uint16)])
def test_windows_of_a_stream(kind):
    windows = TokenWindows(kind(list(range(11))), 3)
    assert [row["input_ids"].tolist() for row in windows] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert windows[2]["input_ids"].dtype == torch.int64


def test_a_memory_mapped_stream_is_not_written_to(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(8, dtype=np.int64))
    windows = TokenWindows(np.load(tmp_path / "tokens.npy", mmap_mode="r"), 4)
    windows[1]["input_ids"].zero_()
    assert windows[1]["input_ids"].tolist() == [4, 5, 6, 7]


def test_windows_that_hold_no_row_are_refused():
    for tokens, length, message in (([1, 2], 3, "fewer than one row"), ([1, 2, 3], 1, "needs 2 tokens")):
        with pytest.raises(ValueError, match=message):
            TokenWindows(tokens, length)


@pytest.mark.parametrize(("streaming", "packed"), [(False, False), (True, True)])
def test_a_dataset_of_texts_trains(make_trainer, tokenizer, streaming, packed):
    """As documents of different lengths, and packed."""
    texts = datasets.Dataset.from_dict({"text": [text * 5 for text in TEXTS] * 4})
    texts = texts.to_iterable_dataset() if streaming else texts
    trainer = make_trainer(dataset=texts, tokenizer=tokenizer, max_steps=2)
    if packed:
        trainer = make_trainer(dataset=pack(texts, tokenizer, trainer.args, 30), max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    assert not packed or trainer.state.num_input_tokens_seen == 2 * 2 * 30
