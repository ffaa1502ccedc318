"""Tokenizers whose vocabulary is made up on the spot, and a tiny target that comes with one in a folder."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.tiny_targets import tiny_target

SPECIAL = ("<pad>", "<bos>", "<eos>")


def character_tokenizer(characters, **options):
    """One token per character, after special tokens where the tiny targets have theirs."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special, **options)


def letter_tokenizer(letters):
    """One token per ASCII letter, after the special ones, as tokens of bytes."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *letters])}
    bpe = Tokenizer(models.BPE(vocab, []))
    bpe.add_special_tokens(list(SPECIAL))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")


def byte_tokenizer(special=SPECIAL, texts=(), vocab_size=30_000):
    """One token per byte, after the special ones; with texts, their frequent pieces as well."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": list(special), "initial_alphabet": alphabet, "show_progress": False}
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")


def save_byte_target(folder, **settings):
    """A random target, with arguments of `tiny_target`, and its tokenizer of bytes as a folder."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_target("llama", vocab_size=len(tokenizer), **settings).save_pretrained(folder)
    return folder
