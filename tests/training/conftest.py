"""A tiny target, drafts for it, and a trainer whose runs take milliseconds."""

import copy

import pytest
import torch

from hf_longspec import DFlashDraftModel, Eagle3DraftModel, LongSpecDraftModel, TokenSwiftDraftModel
from hf_longspec.training import DraftTrainer, DraftTrainingArguments, TokenWindows
from tests.tiny_targets import tiny_target
from tests.tiny_tokenizers import byte_tokenizer


@pytest.fixture(scope="session")
def pristine_target():
    """A copy of the target that no test trains with or changes."""
    return tiny_target("llama", vocab_size=260, max_position_embeddings=512)


@pytest.fixture
def target(pristine_target):
    return copy.deepcopy(pristine_target)


def maker(cls, target, **defaults):
    """Return `make(**overrides)`: a draft of a class with the same weights every time."""

    def make(**overrides):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return cls.from_target(target, **(defaults | overrides))

    return make


@pytest.fixture
def make_draft(target):
    return maker(LongSpecDraftModel, target, window=16)


@pytest.fixture
def draft(make_draft):
    return make_draft()


@pytest.fixture
def make_heads(target):
    return maker(TokenSwiftDraftModel, target)


@pytest.fixture
def heads(make_heads):
    return make_heads()


@pytest.fixture
def make_eagle3(target):
    return maker(Eagle3DraftModel, target)


@pytest.fixture
def make_dflash(target):
    return maker(DFlashDraftModel, target, block_size=4, training_blocks=5, mask_token_id=2)


@pytest.fixture
def labelled(tokens):
    """Ragged rows, the last too short for any step or block. Some labels of the second are ignored."""
    rows = [{"input_ids": tokens[start : start + length]} for start, length in ((0, 33), (40, 21), (70, 4), (90, 2))]
    rows[1]["labels"] = rows[1]["input_ids"].masked_fill(torch.arange(21) % 7 < 3, -100)
    return rows


@pytest.fixture
def rows(tokens):
    """Ragged rows, the last too short for most gaps and heads."""
    return [{"input_ids": tokens[start : start + length]} for start, length in ((0, 33), (40, 21), (70, 6))]


@pytest.fixture(scope="session")
def tokens():
    """A stream that can be learned: each token depends on the two tokens before it, with some noise."""
    generator = torch.Generator().manual_seed(5)
    stream = [3, 4]
    for surprise in torch.rand(4999, generator=generator).tolist():
        after = 3 + (5 * stream[-1] + 3 * stream[-2]) % 29
        stream.append(after if surprise < 0.9 else 3 + int(surprise * 1000) % 29)
    return torch.tensor(stream)


@pytest.fixture
def make_trainer(draft, target, tokens, tmp_path):
    """`make_trainer(max_steps=3, model=..., dataset=...)`: a trainer of `draft` for `target` on `tokens`."""

    def make(model=draft, dataset=None, eval_dataset=None, peft_config=None, tokenizer=None, **settings):
        defaults = {"output_dir": str(tmp_path / "run"), "max_steps": 3, "per_device_train_batch_size": 2}
        defaults |= {"learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
        args = DraftTrainingArguments(**(defaults | {"logging_steps": 1} | settings))
        data = {"train_dataset": TokenWindows(tokens, 33) if dataset is None else dataset, "eval_dataset": eval_dataset}
        return DraftTrainer(model, target, args, **data, peft_config=peft_config, processing_class=tokenizer)

    return make


@pytest.fixture(scope="session")
def tokenizer():
    """Bytes and two special tokens, with a chat template that marks the assistant's messages."""
    tokenizer = byte_tokenizer(special=("<pad>", "<eos>"))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}<eos>{% endgeneration %}"
        "{% else %}U:{{ m.content }}{% endif %}{% endfor %}"
    )
    return tokenizer
