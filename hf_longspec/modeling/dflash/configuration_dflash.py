"""Configuration of a DFlash draft."""

from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig, PreTrainedModel

from ..configuration_base import text_config
from ..families.aux_hidden_states import AuxConfig, default_layer_ids

MARKOV_HEADS = ("vanilla", "gated", "rnn")


class DFlashConfig(AuxConfig):
    """Configuration of [`DFlashDraftModel`].

    Layers whose entry in `layer_windows` is a number w see the last entries only. The slot at position q sees those
    after q - w, or if `block_window` is true, all slots see what the position before the block sees.

    Args:
        block_size (`int`): Number of slots of a block: the last emitted token and masks.
        sample_from_anchor (`bool`): Whether slot 0, that of the last emitted token, predicts the token after it. The
            other slots predict the token at their own position otherwise, and slot 0 nothing.
        block_window (`bool`): Whether the windows of the entries stay with the block.
        causal_windows (`bool`): Whether slots of layers with a window see only earlier slots.
        markov_rank (`int`): Rank of the head that corrects a slot's logits by the token before it (DSpark); 0 without.
        markov_head_type (`str`): `"vanilla"`, `"gated"` or `"rnn"`.
        confidence_head (`str`, *optional*): `"hidden"` or `"markov"` for a head that says how likely a slot's token
            is accepted, from the slot's state or also from the token before it. A setting cuts blocks by it.
        conv_kernel_size (`int`): Taps of the convolutions inside a block (DFlash2); 0 without.
        conv_group_size (`int`): Features that share a kernel.
        selector_rank (`int`): Rank of the scores of pairs of neighbouring tokens (DFlash2); 0 without.
        selector_top_k (`int`): Candidates of a slot that are scored.
        training_blocks (`int`): Number of blocks of a row in training.
        kwargs (`Any`): Fields of [`AuxConfig`].
    """

    model_type = "longspec_dflash"
    sizes: ClassVar[dict[str, tuple[int, int]]] = AuxConfig.sizes | {
        "block_size": (1, 2**10),
        "markov_rank": (0, 2**14),
        "selector_rank": (0, 2**14),
        "conv_kernel_size": (0, 2**6),
        "conv_group_size": (1, 2**17),
        "selector_top_k": (1, 2**14),
        "training_blocks": (1, 2**16),
    }

    block_size: int = 8
    sample_from_anchor: bool = False
    block_window: bool = False
    causal_windows: bool = False
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    confidence_head: str | None = None
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16
    training_blocks: int = 64
    qk_norm: bool = True

    @classmethod
    def from_target(cls, target: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> Self:
        """Return the configuration of a draft of the target's width; its mask is the last row of the embedding."""
        text = text_config(target)
        layers = [min(layer, text.num_hidden_layers - 1) for layer in default_layer_ids(text.num_hidden_layers)]
        values = {"mask_token_id": text.vocab_size - 1, "target_layer_ids": layers}
        return super().from_target(target, **(values | overrides))

    @property
    def first_slot(self) -> int:
        """The first slot that predicts a token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_drafted(self) -> int:
        """Number of tokens that a block drafts."""
        return self.block_size - self.first_slot

    def check_types(self) -> None:
        """Refuse fields of a wrong type or out of range, and fields that do not fit together."""
        super().check_types()
        reason = ""
        if self.num_drafted < 1:
            reason = f"block_size={self.block_size}: expected at least {self.first_slot + 1}, as slot 0 drafts nothing."
        elif self.vocab_size and self.mask_token_id is None:
            reason = "mask_token_id is missing: expected the token of the slots that are filled in."
        elif self.markov_head_type not in MARKOV_HEADS:
            reason = f"markov_head_type={self.markov_head_type!r}: expected one of {', '.join(MARKOV_HEADS)}."
        elif self.markov_rank and self.markov_head_type == "rnn" and not self.sample_from_anchor:
            reason = "markov_head_type='rnn' with sample_from_anchor=False: no published draft defines its first state."
        elif self.confidence_head not in (None, "hidden", "markov"):
            reason = f"confidence_head={self.confidence_head!r}: expected 'hidden' or 'markov'."
        elif self.confidence_head == "markov" and not self.markov_rank:
            reason = "confidence_head='markov' with markov_rank=0: expected a Markov head."
        elif self.conv_kernel_size and self.hidden_size % max(1, self.conv_group_size):
            reason = f"conv_group_size={self.conv_group_size}: expected a divisor of hidden_size={self.hidden_size}."
        elif self.selector_rank and self.draft_vocab_size:
            reason = (
                f"selector_rank={self.selector_rank} with draft_vocab_size={self.draft_vocab_size}: expected all of "
            )
            reason += "the vocabulary."
        if reason:
            raise ValueError(f"{reason} Correct the draft's config.json, or use another draft.")
