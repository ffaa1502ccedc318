"""What is known of the logits processors of a call: which tokens they read, and whether they keep state.

A draft adds calls of processors, for drafted tokens that may be refused. [`why_stateful`] tries processors out before
the first token, and finds those whose calls depend on one another.
"""

import threading
from collections.abc import Iterator
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessorList

from ..call import Call
from ..sampling import is_history_free
from ..target_modules import before_forward
from ..wing import Wing
from .user_state import UserState, random_generators

# Attributes by which a processor says that its calls do not depend on one another.
DECLARED = ("stateless", "history_free", "history_window")


def why_stateful(processors: LogitsProcessorList, call: Any) -> Iterator[str]:
    """Yield for each processor whose calls depend on one another the reason why a draft cannot be used.

    It is called with the prompts of a [`Call`], as plain `generate` calls it first, once more, and with a token more.
    It has state if the first two results differ, or if the longer text changes what it holds, or random states. What
    the first call alone changes is made for all calls, such as the tensors of `sequence_bias`. State that only a later
    call changes is not found. Everything is put back.
    """
    if call.max_length <= call.tokens.shape[1] + 1:
        return  # processors are called once
    for processor in processors:
        if is_history_free(processor) or any(getattr(processor, mark, False) for mark in DECLARED):
            continue
        if (finding := _finding(processor, call)) is not None:
            yield f"{type(processor).__name__} {finding}. A draft adds calls, for drafted tokens that may be refused."


def _finding(processor: Any, call: Any) -> str | None:
    """Return how the calls of a processor depend on one another, and the remedy; `None` if nothing shows it."""
    own_thread, error = threading.get_ident(), None

    def refuse(*_: Any) -> None:
        if threading.get_ident() == own_thread:
            raise RuntimeError("it runs the target. Drop it, or the setting that adds it")

    held = {type(processor).__name__: processor, "random states": random_generators()}
    state = made = UserState(held)
    if state.unknown is not None:
        return f"reaches a {state.unknown}, whose state cannot be compared before and after a call. Keep it out of it"
    ids, vocab_size = call.input_ids.long(), call.target.vocab_size
    scores = torch.linspace(-4, 4, vocab_size, device=ids.device).repeat(len(ids), 1)
    handle = before_forward(call.target.model, refuse)
    try:
        first, second = (processor(ids.clone(), scores.clone()) for _ in range(2))
        differ = not torch.equal(first, second)
        longer = _longer(ids, first, call)
        if longer is not None:
            made = UserState(held)
            processor(longer, scores.clone())
    except Exception as caught:  # a processor may raise anything
        error = caught
    finally:
        handle.remove()
        changed = made.restore()
        state.restore()
    if error is not None:
        return f"cannot be tried out with the prompts ({type(error).__name__}: {error})"
    if changed is not None:
        return f"keeps state between calls ({changed} changed). Let its result depend on input_ids and scores alone"
    if differ:
        return "returned different scores for the same input. Let its result depend on input_ids and scores alone"
    return None


def _longer(ids: torch.Tensor, scores: torch.Tensor, call: Any) -> torch.Tensor | None:
    """Return the prompts with one token more that may follow them; `None` if plain `generate` would stop there."""
    ends = getattr(call.config, "_eos_token_tensor", None)
    if ends is not None:
        scores = scores.index_fill(1, ends[ends < scores.shape[1]].to(scores.device), -torch.inf)
    best, tokens = scores.max(1)
    if bool(best.isneginf().any()):
        return None
    return torch.cat([ids, tokens[:, None]], 1)


class Processors(Wing):
    """Logits processors whose result may depend on more than the scores."""

    def why_not(self, call: Call) -> Iterator[str]:
        yield from why_stateful(call.logits_processor, call)
