"""The logits of the blocks of a DFlash draft over whole texts, without a drafter: by the forward of its training."""

from types import SimpleNamespace

import torch
from torch import nn


def ends_of(embed_tokens, lm_head):
    """What stands for a target, made of weights `(vocab, hidden)`; `None` for those that the draft has."""
    return SimpleNamespace(
        get_input_embeddings=lambda: nn.Embedding.from_pretrained(embed_tokens),
        get_output_embeddings=lambda: lambda outputs: nn.functional.linear(outputs, lm_head),
    )


@torch.no_grad()
def block_logits(draft, target, aux, tokens, lengths):
    """For each block after so many entries, logits `(B, block_size, draft vocabulary)` of all slots.

    With a Markov head they are those along the chain of the most likely tokens.
    """
    anchors = torch.as_tensor(lengths).expand(len(tokens), -1)
    states = draft(aux, tokens, anchors, target, draft.prompt_tokens, draft.setting("sinks"))
    logits, before = draft.logits(states, target), tokens.gather(1, anchors)
    if draft.markov_head is not None:
        memory = draft.first_memory(before)
        for slot in range(draft.config.first_slot, draft.config.block_size):
            row, memory = draft.next_logits(logits[:, :, slot], states[:, :, slot], before, memory)
            logits[:, :, slot] = row
            before = draft.token_ids[row.argmax(-1)]
    return logits.unbind(1)
