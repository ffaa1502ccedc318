"""TokenSwiftDraftModel: heads that predict the tokens after the next one from the target's last residual stream."""

from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...generation.draft_tree import num_static_nodes
from ...generation.target import TargetView
from ...generation.target_modules import final_norm_of, refuse_compiled_forward
from ..base import refuse_masked
from ..configuration_base import text_config
from ..settings import Setting
from ..shared.sparse_caches import SINK_TOKENS
from ..shared.vocabulary import VocabularyConfig, VocabularyDraftModel
from .generation_tokenswift import POLICIES, SELF_DRAFTS, TokenSwiftDrafter


class TokenSwiftConfig(VocabularyConfig):
    """Configuration of [`TokenSwiftDraftModel`]: number and kind of its heads."""

    model_type = "tokenswift"
    sizes: ClassVar[dict[str, tuple[int, int]]] = VocabularyConfig.sizes | {"num_heads": (1, 2**8)}

    hidden_size: int = 0  # width of the target's residual stream
    num_heads: int = 3  # number of heads. Head i predicts the token i places after the one that the target predicts.
    # whether the input of a head is the output of the head before it. Otherwise it is the target's own state, as the
    # input of Medusa's heads is.
    chained: bool = True
    # whether a head also reads the token before the one that it predicts, as in Hydra and unlike in the paper. Such
    # heads are chained.
    sequential: bool = False
    rms_norm_eps: float = 1e-6  # epsilon of the two norms of a head
    initializer_range: float = 0.02  # standard deviation of the initial weights of the linear layers

    @property
    def kind_of_heads(self) -> str:
        """Kind of the heads, for the model card."""
        return "sequential" if self.sequential else "chained" if self.chained else "independent"

    @classmethod
    def from_target(cls, target: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> Self:
        text = text_config(target)
        values = {
            "hidden_size": text.hidden_size,
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or cls.rms_norm_eps,
        }
        return super().from_target(target, **(values | overrides))


class TokenSwiftDraftModel(VocabularyDraftModel):
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
    drafter_class = TokenSwiftDrafter
    sized_by_vocabulary = False
    _no_split_modules = ["TokenSwiftHead"]
    settings: ClassVar[dict[str, Any]] = {
        "self_draft": Setting(
            "verify_hidden",
            "Hidden state that the heads read: that of the verification, or with `partial_kv` that of one more forward "
            "over a part of the cache.",
            choices=SELF_DRAFTS,
        ),
        # for 3 heads; fewer heads use the first entries
        "tree_branching": Setting(
            [1, 3, 3, 3],
            "Number of children of each node, level by level. Entry 0 belongs to the target's own prediction, which "
            "`verify_hidden` has emitted already and skips; entry i belongs to head i.",
            list,
        ),
        "partial_kv_policy": Setting(
            "dynamic",
            "Entries of the partial cache: `dynamic` selects them again as in the paper, `static` keeps the selection "
            "after the prompt, and `full` reads the whole cache.",
            choices=POLICIES,
        ),
        # as in the paper's scripts; shorter contexts fit as a whole
        "partial_kv_budget": Setting(4096, "Number of entries of the partial cache, per layer and KV head.", int),
        "partial_kv_recent": Setting(64, "Number of newest entries that it always keeps.", int, least=0),
    }

    def __init__(self, config: TokenSwiftConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.heads = TokenSwiftHeads(config)
        self.add_vocabulary(config)
        self.generation_config.update(tree_branching=self.settings["tree_branching"][: config.num_heads + 1])
        self.post_init()

    @classmethod
    def check_structure(cls, target: PreTrainedModel) -> None:
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
        return self.heads(hidden.to(self.dtype), None if embedded is None else embedded.to(self.dtype))

    def max_nodes(self, target: TargetView) -> int:
        return num_static_nodes(self.levels())

    def levels(self) -> list[int]:
        """Return the number of children of every node, level by level.

        The first entry of the setting belongs to the target's own prediction, which `verify_hidden` has already
        emitted.
        """
        emitted = int(self.setting("self_draft") == "verify_hidden")
        return list(self.setting("tree_branching")[emitted:])

    def check_settings(self, target: TargetView) -> None:
        final_norm_of(target.model)
        refuse_compiled_forward(target.model)
        if self.setting("self_draft") == "partial_kv":
            refuse_masked(target, "self_draft='partial_kv'")
        if self.config.sequential and not self.config.chained:
            raise ValueError(
                "chained=False with sequential=True: a sequential head continues the head before it. Leave out "
                "chained=False."
            )
        branching = self.setting("tree_branching")
        most = self.config.draft_vocab_size or target.vocab_size
        if max(branching) > most:
            raise ValueError(
                f"tree_branching={branching!r}: a node has at most {most} children, the size of the draft's "
                "vocabulary. Use smaller numbers."
            )
        fewest = 2 if self.setting("self_draft") == "verify_hidden" else 1
        if not fewest <= len(branching) <= self.config.num_heads + 1:
            raise ValueError(
                f"tree_branching={branching!r} has {len(branching)} entries, expected {fewest} to "
                f"{self.config.num_heads + 1}: one for the target's own prediction, which self_draft='verify_hidden' "
                f"does not draft, and one for each head in use, at most num_heads={self.config.num_heads}. "
                "Shorten it, or train more heads."
            )
        budget, recent = self.setting("partial_kv_budget"), self.setting("partial_kv_recent")
        ngrams = self.setting("ngram_num_tokens") if self.setting("ngram_candidates") else 0
        step = max(len(branching), ngrams) + 1
        least = SINK_TOKENS + recent + step
        if budget < least:
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


class TokenSwiftHead(GradientCheckpointingLayer):
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
            embedded (`torch.Tensor` of shape `(..., hidden)`, *optional*): For sequential heads, the embedding of the
                token before the one that this head predicts.
        """
        normed = self.input_layernorm(hidden)
        if embedded is not None:
            normed = nn.functional.silu(self.fusion(torch.cat([normed, self.token_layernorm(embedded)], -1)))
        return hidden + self.linear(normed)
