"""An iteration and the beginning of a call walk through few files, and through those of no special case.

A *room* is a file of the package. An iteration is that of a draft on a tiny model of two layers, from `propose` to the
end of `observe`; the *hall* is what runs before the first forward of a second call with the same model and draft.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import hf_longspec
from hf_longspec import LongSpecDraftModel
from hf_longspec.generation import decoding
from hf_longspec.modeling import base

ROOT = Path(hf_longspec.__file__).parent
WALKED = 5  # the iteration that is walked: the first ones find and keep things


class Walk:
    """Files of the package whose functions run while it is open."""

    def __init__(self):
        self.rooms = set()

    def __call__(self, frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)) and not code.co_name.startswith("<"):
            self.rooms.add(code.co_filename[len(str(ROOT)) + 1 :])

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)


class FirstForward(Exception):
    """The first forward of the target has begun."""


@pytest.fixture(scope="module")
def call():
    """Decode greedily with a draft without a gate; one call has been made."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    draft = LongSpecDraftModel.from_target(model, intermediate_size=64)
    draft.generation_config.gate = False
    ids = torch.arange(3, 40)[None]

    def decode():
        options = {"assistant_model": draft, "max_new_tokens": 24, "do_sample": False}
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    decode()
    return decode


def test_the_core_is_small():
    core = [path for path in (ROOT / "generation").glob("*.py") if path.name != "__init__.py"]
    assert len(core) <= 13 and sum(len(path.read_text(encoding="utf-8").splitlines()) for path in core) <= 5000


def test_an_iteration_walks_through_no_special_case(call, monkeypatch):
    walk, count, iterate = Walk(), 0, decoding.Session.iterate

    def walked(session):
        nonlocal count
        count += 1
        if count != WALKED:
            return iterate(session)
        with walk:
            return iterate(session)

    monkeypatch.setattr(decoding.Session, "iterate", walked)
    call()
    assert count >= WALKED and len(walk.rooms) <= 16 and "generation/decoding.py" in walk.rooms
    assert not [name for name in walk.rooms if "special_cases/" in name]


def test_a_second_call_asks_no_special_case(call, monkeypatch):
    """Not even the gate, which decides about steps after the prompt."""
    walk, decode = Walk(), base.decode

    def walked(*args, **kwargs):
        with walk:
            return decode(*args, **kwargs)

    def stop(*_, **__):
        raise FirstForward

    monkeypatch.setattr(base, "decode", walked)
    monkeypatch.setattr(functional, "embedding", stop)  # a hook, or another forward, would be a special case itself
    with pytest.raises(FirstForward):
        call()
    assert len(walk.rooms) <= 12 and "generation/call.py" in walk.rooms
    assert not [name for name in walk.rooms if "generation/special_case" in name]
