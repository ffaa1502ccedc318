import pytest
import torch

from hf_longspec.bench.document_prompts import DocumentPrompts
from hf_longspec.bench.readers import Document


def tokenizer(text, **_):
    """One token per character."""
    return {"input_ids": [ord(letter) for letter in text]}


def text(ids):
    return "".join(map(chr, ids.tolist()))


def test_prompts_end_with_the_tail():
    prompts = DocumentPrompts(tokenizer, [Document("d", "abcdefghijklmnop", "??")])
    assert [text(prompt) for prompt in prompts.windows(10, 2)] == ["abcdefgh??", "ijklmnop??"]


def test_a_long_tail_keeps_its_end_and_a_quarter_of_the_prompt():
    prompts = DocumentPrompts(tokenizer, [Document("d", "abcdefghijklmnop", "0123456789")])
    assert [text(prompt) for prompt in prompts.windows(8, 2)] == ["abcdef89", "klmnop89"]


def test_documents_take_turns_and_short_ones_are_left_out():
    documents = [Document("a", "a" * 40), Document("b", "b" * 40), Document("c", "c" * 5)]
    found = {text(prompt)[0] for prompt in DocumentPrompts(tokenizer, documents).windows(10, 4)}
    assert found == {"a", "b"}


def test_too_short_documents_are_refused():
    with pytest.raises(ValueError, match="no document has 10 tokens"):
        DocumentPrompts(tokenizer, [Document("c", "c" * 5)]).windows(10, 1)


def test_own_lengths_are_whole_documents_that_fit_from_the_beginning_again():
    documents = [Document("a", "aaa", "?"), Document("b", "b" * 9), Document("c", "cc")]
    prompts = DocumentPrompts(tokenizer, documents)
    assert [text(prompt) for prompt in prompts.own(3, limit=6)] == ["aaa?", "cc", "aaa?"]
    with pytest.raises(ValueError, match="no document has between 1 and 1 tokens"):
        prompts.own(1, limit=1)


def test_disjoint_windows_are_counted():
    prompts = DocumentPrompts(tokenizer, [Document("a", "a" * 25), Document("b", "b" * 9, "?")])
    assert prompts.describe([10, 0]) == {"documents": 2, "tokens": 35, "disjoint_windows": {"10": 3}}
    assert isinstance(prompts.bodies[0], torch.Tensor)
