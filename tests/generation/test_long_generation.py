"""The cost of a step after four times as many tokens, in elements and bytes: as it was, attention apart."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.generation.streamers import BaseStreamer

from hf_longspec import ContextualPenaltyLogitsProcessor
from hf_longspec.generation.drafter import Drafter
from tests.tiny_targets import RandomTreeDrafter, tiny_target
from tests.user_objects import Answer

pytestmark = pytest.mark.usefixtures("every_step_speculates")

SIZES = {"vocab_size": 32, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}

# Some random tokens are accepted.
WIGGLE = 1.5


class Written(TorchDispatchMode):
    """Counts the elements that operations write, views not among them, while it is open and not paused."""

    def __init__(self):
        super().__init__()
        self.elements, self.paused = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        kinds = [returned.alias_info for returned in function._schema.returns]
        if not self.paused and any(kind is None or kind.is_write for kind in kinds):
            self.elements += sum(result.numel() for result in tree_leaves(out) if torch.is_tensor(result))
        return out

    def pause_in(self, patch, owner, name):
        """Do not count what a method does."""
        method = getattr(owner, name)

        def paused(*args, **kwargs):
            self.paused += 1
            try:
                return method(*args, **kwargs)
            finally:
                self.paused -= 1

        paused.stateless = True  # it treats all tokens alike
        patch.setattr(owner, name, paused)


class Marks(BaseStreamer):
    """Inspects the running call after some numbers of tokens: the bytes of tensors, and what the next tokens write."""

    AT, SPAN = (8, 16, 64), 6  # the first inspection fills caches

    def __init__(self, written):
        self.written, self.tokens = written, -1  # the prompt is handed over first
        self.tensor_bytes, self.elements = [], []

    def put(self, value):
        self.tokens += 1
        if self.tokens in self.AT:
            gc.collect()
            self.tensor_bytes.append(live_tensor_bytes())
            self.written.elements = 0
            self.written.__enter__()
        elif self.tokens - self.SPAN in self.AT:
            self.written.__exit__(None, None, None)
            self.elements.append(self.written.elements)

    def end(self):
        """Nothing to close."""


def live_tensor_bytes():
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        # fake tensors of other tests and packed weights have no storage
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_mkldnn
    }
    return sum(storages.values())


@pytest.mark.parametrize(("kind", "lengths"), [("plain", (9,)), ("chain", (9, 3, 5))], ids=["plain", "chain"])
def test_a_step_costs_the_same_at_every_length(plain_run, kind, lengths, monkeypatch):
    """Beside the target's forward. Chains are random and mostly refused, and rows grow apart."""
    model = tiny_target("llama", num_hidden_layers=1, intermediate_size=32, **SIZES)
    run = plain_run(model, lengths, max_new_tokens=2)
    draft = run.draft(kind)
    draft.hints, draft.num_nodes = [], 5
    monkeypatch.setattr(RandomTreeDrafter, "observe", Drafter.observe)  # it keeps what it is told
    written = Written()
    written.pause_in(monkeypatch, model, "forward")
    marks = Marks(written)
    processors = [ContextualPenaltyLogitsProcessor(1.3, 20)]
    options = {"max_new_tokens": Marks.AT[-1] + 2 * Marks.SPAN, "eos_token_id": None, "logits_processor": processors}
    patient = Answer(lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool))  # is shown the text after every token
    out = run.again(draft, streamer=marks, stopping_criteria=[patient], **options)
    assert out.tolist() == run.again(None, **options).tolist()
    _, early, late = marks.elements
    assert 0 < late == early if kind == "plain" else 0 < late < WIGGLE * early
    assert marks.tensor_bytes[2] == marks.tensor_bytes[1]
