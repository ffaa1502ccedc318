"""Configuration of a DFlash draft."""

from collections.abc import Iterator
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig, PreTrainedModel

from ..configuration_base import text_config
from ..shared.aux_hidden_states import AuxConfig, default_layer_ids

MARKOV_HEADS = ("vanilla", "gated", "rnn")


class DFlashConfig(AuxConfig):
    """Configuration of [`DFlashDraftModel`].

    Layers whose entry in `layer_windows` is a number w see the last entries only. The slot at position q sees those
    after q - w, or if `block_window` is true, all slots see what the position before the block sees.
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

    block_size: int = 8  # number of slots of a block: the last emitted token and masks
    # Whether slot 0, that of the last emitted token, predicts the token after it. Otherwise the other slots predict the
    # token at their own position, and slot 0 nothing.
    sample_from_anchor: bool = False
    block_window: bool = False  # whether the windows of the entries stay with the block
    causal_windows: bool = False  # whether slots of layers with a window see only earlier slots
    causal: bool | None = None  # whether slots of all layers do, in place of `causal_windows`
    attention_sink_bias: bool = False  # whether heads have a learned logit that enters the softmax denominator
    markov_rank: int = 0  # rank of the head that corrects a slot's logits by the token before it (DSpark); 0 without
    markov_head_type: str = "vanilla"  # or "gated" or "rnn"
    # "hidden" or "markov" for a head that says how likely a slot's token is accepted, from the slot's state or also
    # from the token before it. A setting cuts blocks by it.
    confidence_head: str | None = None
    conv_kernel_size: int = 0  # taps of the convolutions inside a block (DFlash2); 0 without
    conv_group_size: int = 16  # features that share a kernel
    selector_rank: int = 0  # rank of the scores of pairs of neighbouring tokens (DFlash2); 0 without
    selector_top_k: int = 16  # candidates of a slot that are scored
    training_blocks: int = 64  # number of blocks of a row in training
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
        return self.block_size - self.first_slot

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.num_drafted < 1:
            yield f"block_size={self.block_size}: expected at least {self.first_slot + 1}, as slot 0 drafts nothing"
        if self.vocab_size and self.mask_token_id is None:
            yield "mask_token_id is missing: expected the token of the slots that are filled in"
        if self.markov_head_type not in MARKOV_HEADS:
            yield f"markov_head_type={self.markov_head_type!r}: expected one of {', '.join(MARKOV_HEADS)}"
        if self.markov_rank and self.markov_head_type == "rnn" and not self.sample_from_anchor:
            yield "markov_head_type='rnn' with sample_from_anchor=False: no published draft defines its first state"
        if self.confidence_head not in (None, "hidden", "markov"):
            yield f"confidence_head={self.confidence_head!r}: expected 'hidden' or 'markov'"
        if self.confidence_head == "markov" and not self.markov_rank:
            yield "confidence_head='markov' with markov_rank=0: expected a Markov head"
        if self.conv_kernel_size and self.hidden_size % max(1, self.conv_group_size):
            yield f"conv_group_size={self.conv_group_size}: expected a divisor of hidden_size={self.hidden_size}"
        if self.selector_rank and (size := self.draft_vocab_size):
            yield f"selector_rank={self.selector_rank} with draft_vocab_size={size}: expected all of the vocabulary"
