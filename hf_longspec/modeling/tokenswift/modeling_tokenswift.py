"""TokenSwiftDraftModel: heads that predict the tokens after the next one from the target's last residual stream."""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ...generation.draft_tree import num_static_nodes
from ...generation.drafter import Binding, Drafter
from ...generation.sparse_caches import SINK_TOKENS
from ...generation.target import TargetView
from ...generation.target_modules import final_norm_of, refuse_compiled_forward
from ..base import DraftModel
from ..setting_checks import check_choice, check_integer
from .configuration_tokenswift import TokenSwiftConfig
from .generation_tokenswift import POLICIES, SELF_DRAFTS, TokenSwiftDrafter

CHOICES = {"self_draft": SELF_DRAFTS, "partial_kv_policy": POLICIES}


class TokenSwiftDraftModel(DraftModel):
    """A few small heads on the input of the target's final norm, each of which predicts one more token ahead.

    The language-model head is the target's and not part of the draft. The heads of the paper depend on the text up to
    the token of the hidden state. Sequential heads (`sequential=True`) also read the tokens between that token and the
    one that they predict, drafted ones included, which helps if the target's distributions are flat.

    ```python
    draft = TokenSwiftDraftModel.from_target(target, num_heads=3)   # untrained: see hf_longspec.training
    target.generate(**inputs, assistant_model=draft)
    ```

    Source: https://huggingface.co/papers/2502.18890, section 3.1.
    """

    config_class = TokenSwiftConfig
    _no_split_modules = ["TokenSwiftHead"]
    settings: ClassVar[dict[str, Any]] = {
        "self_draft": "verify_hidden",
        "tree_branching": [1, 3, 3, 3],  # for 3 heads; fewer heads use the first entries
        "partial_kv_policy": "dynamic",
        "partial_kv_budget": 4096,  # as in the paper's scripts; shorter contexts fit as a whole
        "partial_kv_recent": 64,
    }

    def __init__(self, config: TokenSwiftConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.heads = TokenSwiftHeads(config)
        self.generation_config.update(tree_branching=self.settings["tree_branching"][: config.num_heads + 1])
        self.post_init()

    @classmethod
    def check_structure(cls, target: PreTrainedModel) -> None:
        """Refuse targets without a final norm."""
        final_norm_of(target)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor | None = None) -> torch.Tensor:
        """Return the normalised hidden states of all heads, for the target's language-model head.

        Args:
            hidden (`torch.Tensor` of shape `(B, L, hidden)`): Input of the target's final norm.
            embedded (`torch.Tensor` of shape `(B, L, hidden)`, *optional*): Input of the target's first layer, for
                sequential heads. Head i at place t reads token t + i.

        Returns:
            `torch.Tensor` of shape `(num_heads, B, L, hidden)`. Where the target's own logits at place t predict token
            t + 1, those of `[i]` predict token t + 2 + i.
        """
        if self.config.sequential != (embedded is not None):
            raise ValueError(
                f"sequential={self.config.sequential}, and embedded is {'missing' if embedded is None else 'given'}: "
                "sequential heads need the embeddings of the tokens, and other heads take none. Pass embedded "
                "only to sequential heads."
            )
        states: torch.Tensor = self.heads(hidden.to(self.dtype), None if embedded is None else embedded.to(self.dtype))
        return states

    def make_drafter(self, binding: Binding) -> Drafter:
        """Return a drafter with the present settings, on the device of the target's final norm."""
        return TokenSwiftDrafter(binding, self)

    def max_nodes(self, target: TargetView) -> int:
        """Return the number of nodes of a tree, root included."""
        return num_static_nodes(self.levels())

    def levels(self) -> list[int]:
        """Return the number of children of every node, level by level.

        The first entry of the setting belongs to the target's own prediction, which `verify_hidden` has already
        emitted.
        """
        emitted = int(self.setting("self_draft") == "verify_hidden")
        return list(self.setting("tree_branching")[emitted:])

    def check_settings(self, target: TargetView) -> None:
        """Refuse targets without a final norm, zero heads, unknown choices, and trees and budgets that do not fit."""
        final_norm_of(target.model)
        refuse_compiled_forward(target.model)
        if self.config.num_heads < 1:
            raise ValueError(f"num_heads={self.config.num_heads}: expected at least 1, the tokens ahead to predict.")
        if self.config.sequential and not self.config.chained:
            raise ValueError(
                "chained=False, sequential=True: a head that sees the token before its own continues the head that "
                "proposed it. Leave out chained=False."
            )
        for name, choices in CHOICES.items():
            check_choice(name, self.setting(name), choices)
        self._check_tree(target.vocab_size)
        self._check_budget()

    def _check_tree(self, vocab_size: int) -> None:
        branching = self.setting("tree_branching")
        numbers = branching if isinstance(branching, list | tuple) else [0]
        if not all(type(number) is int and 0 < number <= vocab_size for number in numbers):
            raise ValueError(
                f"tree_branching={branching!r}: expected a list of integers from 1 to {vocab_size}, the size of the "
                "vocabulary: the children of every node, level by level."
            )
        fewest = 2 if self.setting("self_draft") == "verify_hidden" else 1
        if not fewest <= len(branching) <= self.config.num_heads + 1:
            raise ValueError(
                f"tree_branching={branching!r} has {len(branching)} entries, expected {fewest} to "
                f"{self.config.num_heads + 1}: one for the target's own prediction, which self_draft='verify_hidden' "
                f"does not draft, and one for each of the num_heads={self.config.num_heads} heads that are to be used. "
                "Shorten it, or train more heads."
            )

    def _check_budget(self) -> None:
        budget, recent = self.setting("partial_kv_budget"), self.setting("partial_kv_recent")
        check_integer("partial_kv_recent", recent, 0)
        ngrams = self.setting("ngram_num_tokens") if self.setting("ngram_candidates") else 0
        step = max(len(self.setting("tree_branching")), ngrams) + 1
        least = SINK_TOKENS + recent + step
        if type(budget) is not int or budget < least:
            raise ValueError(
                f"partial_kv_budget={budget!r}: expected an integer of at least {least}, for {SINK_TOKENS} sinks, "
                f"partial_kv_recent={recent} and the {step} tokens of one step. Raise it, or lower partial_kv_recent."
            )


class TokenSwiftHeads(nn.Module):
    """All heads, run on the same hidden states.

    With `x_0` the input of the target's final norm, `x_i = x_{i-1} + A_i RMSNorm(x_{i-1})` in a chain, or
    `x_i = x_0 + A_i RMSNorm(x_0)` for independent heads; the language-model head gets `RMSNorm(x_i)`. Sequential heads
    put `SiLU(B_i [RMSNorm(x_{i-1}), RMSNorm(e_i)])` in place of the norm, with e_i the embedding of the token before
    the one that they predict.

    Source: https://huggingface.co/papers/2502.18890, equation 1, and the authors' checkpoints, which have the norms;
    independent heads: Medusa, https://huggingface.co/papers/2401.10774; heads that see the tokens before theirs:
    Hydra, https://huggingface.co/papers/2402.05109.
    """

    def __init__(self, config: TokenSwiftConfig):
        super().__init__()
        self.chained = config.chained
        self.sequential = config.sequential
        self.layers = nn.ModuleList(TokenSwiftHead(config) for _ in range(config.num_heads))

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor | None = None) -> torch.Tensor:
        """Return the normalised states `(num_heads, B, L, hidden)` of all heads. See [`TokenSwiftDraftModel`]."""
        states, current = [], hidden
        for head in self.layers:
            assert isinstance(head, TokenSwiftHead)
            if embedded is not None:  # shifted by one place per head, with zeros after the end
                embedded = nn.functional.pad(embedded[:, 1:], (0, 0, 0, 1))
            current = head(current if self.chained else hidden, embedded)
            states.append(head.post_layernorm(current))
        return torch.stack(states)


class TokenSwiftHead(nn.Module):
    """One head: a norm and a linear layer that update the residual stream, and the norm before the logits."""

    def __init__(self, config: TokenSwiftConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.linear = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.post_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.sequential:
            self.token_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.fusion = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor | None = None) -> torch.Tensor:
        """Return the residual stream `(..., hidden)` after this head, not normalised.

        Args:
            hidden (`torch.Tensor` of shape `(..., hidden)`): Residual stream before this head.
            embedded (`torch.Tensor` of shape `(..., hidden)`, *optional*): For sequential heads, the embedding of the
                token before the one that this head predicts.
        """
        given = self.input_layernorm(hidden)
        if embedded is not None:
            given = nn.functional.silu(self.fusion(torch.cat([given, self.token_layernorm(embedded)], -1)))
        moved: torch.Tensor = hidden + self.linear(given)
        return moved
