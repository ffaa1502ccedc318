"""Streamed pieces against the text decoded at once, for odd characters and any tokens of a byte-level tokenizer."""

import io
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from hf_longspec import FileStreamer, IncrementalDecoder, SpecAttnDraftModel
from hf_longspec.streaming import REPLACEMENT
from tests.tiny_targets import tiny_target
from tests.tiny_tokenizers import byte_tokenizer

pytestmark = pytest.mark.usefixtures("every_step_speculates")

ODD = (
    "naïve café — “quotes”, Привет, 你好世界, 한국어, עברית, हिन्दी, 🙂👩‍👩‍👧🏽🇨🇭, a\u0301, \u200bzero\u00a0width, "
    f"\ufeff, {REPLACEMENT} itself, 𐍈𝄞, tab\t, crlf\r\n, \x00\x1f, the end 😀"
)


@cache
def byte_level():
    """Return a tokenizer like that of GPT-2, whose tokens are words, parts of words and bytes."""
    text = (Path(__file__).resolve().parents[1] / "LICENSE").read_text(encoding="utf-8")
    return byte_tokenizer(special=("<eos>", "<pad>"), texts=[text], vocab_size=1000)


@cache
def byte_fallback():
    """Return a tokenizer like that of Llama 2: a sign for spaces, and bytes for characters out of vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁end", *"abcdehnt,."]
    backend = Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def pieces(tokenizer, tokens, **options):
    decoder = IncrementalDecoder(tokenizer, **options)
    return [decoder.feed(token) for token in tokens] + [decoder.end()]


def whole(tokenizer, tokens, **options):
    return tokenizer.decode(tokens, clean_up_tokenization_spaces=False, **options)


@pytest.mark.parametrize("tokenizer", [byte_level, byte_fallback], ids=["byte-level", "byte-fallback"])
def test_odd_characters(tokenizer):
    tokens = tokenizer()(ODD)["input_ids"]
    assert len(tokens) > len(ODD)  # characters are spread over tokens
    given = pieces(tokenizer(), tokens)
    assert "".join(given) == whole(tokenizer(), tokens) == ODD
    assert sum(map(bool, given)) > 60  # pieces come before the end


@given(st.text(max_size=40))
def test_any_text(text):
    for tokenizer in (byte_level(), byte_fallback()):
        tokens = tokenizer(text)["input_ids"]
        assert "".join(pieces(tokenizer, tokens)) == whole(tokenizer, tokens)


SPREAD = [byte_level()(character)["input_ids"] for character in "é你🙂"]


@given(st.lists(st.integers(0, 4095) | st.sampled_from([i for ids in SPREAD for i in ids]), max_size=200))
def test_any_tokens_of_a_byte_level_tokenizer(tokens):
    for skip in (False, True):
        assert "".join(pieces(byte_level(), tokens, skip_special_tokens=skip)) == whole(
            byte_level(), tokens, skip_special_tokens=skip
        )


def test_special_tokens_keep_spaces():
    tokenizer = byte_fallback()
    the, end, space = tokenizer.convert_tokens_to_ids(["▁the", "▁end", "▁"])
    for tokens in ([1, the, 2, end], [the, 1, 2, 1, end], [1] * 64 + [the, space, space, end]):
        for skip in (False, True):
            options = {"skip_special_tokens": skip}
            assert "".join(pieces(tokenizer, tokens, **options)) == whole(tokenizer, tokens, **options)


def test_a_tokenizer_without_a_backend_decodes_the_same():
    class Plain:
        def decode(self, ids, **options):
            return byte_level().decode(ids, **options)

    tokens = byte_level()(ODD)["input_ids"]
    given = pieces(Plain(), tokens)
    assert "".join(given) == ODD and sum(map(bool, given)) > 60


def test_text_after_invalid_tokens_is_not_lost():
    """Bytes that are no character, in the order in which the library's stream gives up."""
    tokenizer = byte_fallback()
    byte, the = tokenizer.convert_tokens_to_ids(["<0xE4>", "▁the"])
    tokens = [*tokenizer("ab")["input_ids"], *[byte] * 40, the, 2, the]
    given = "".join(pieces(tokenizer, tokens))
    assert given.startswith("ab") and given.endswith("the")


@cache
def model():
    """Return a small model with a real vocabulary."""
    return tiny_target("llama", vocab_size=1000, hidden_size=32, intermediate_size=32)


def generate(**options):
    """Return a story that the model writes, and the number of tokens of its prompt."""
    ids = torch.tensor([byte_level()("Once upon a time 🙂")["input_ids"]])
    out = model().generate(ids, do_sample=False, max_new_tokens=60, eos_token_id=None, pad_token_id=1, **options)
    return out[0].tolist(), ids.shape[1]


@pytest.mark.parametrize(
    ("draft", "skip_prompt"), [(None, True), (SpecAttnDraftModel, False), (SpecAttnDraftModel, True)]
)
def test_file_streamer_writes_the_text(draft, skip_prompt):
    """Streams with a draft and with plain `generate`, twice through one streamer."""
    file = io.StringIO()
    streamer = FileStreamer(byte_level(), file, skip_prompt=skip_prompt)
    assistant = {} if draft is None else {"assistant_model": draft.from_target(model())}
    for turn in (1, 2):  # the streamer can be used again
        tokens, prompt = generate(streamer=streamer, **assistant)
        kept = tokens[prompt:] if skip_prompt else tokens
        assert file.getvalue() == turn * whole(byte_level(), kept, skip_special_tokens=True)
    assert not file.closed


def test_every_piece_is_flushed(tmp_path):
    path, sizes = tmp_path / "story.txt", []

    class Watched(FileStreamer):
        def put(self, value):
            super().put(value)
            sizes.append(path.stat().st_size)

    with path.open("w", encoding="utf-8") as file:
        tokens, prompt = generate(streamer=Watched(byte_level(), file))
    assert path.read_text(encoding="utf-8") == whole(byte_level(), tokens[prompt:], skip_special_tokens=True)
    assert len(set(sizes)) > 40


def test_two_rows_are_refused():
    with pytest.raises(ValueError, match="FileStreamer"):
        FileStreamer(byte_level(), io.StringIO()).put(torch.zeros(2, 5, dtype=torch.long))
