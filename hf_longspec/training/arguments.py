"""DraftTrainingArguments: TrainingArguments with the settings of draft training."""

from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments
from transformers.utils import is_torch_xla_available

from ..modeling.settings import Setting

NOISE_DISTRIBUTIONS = ("uniform", "reached")
RANGES = {
    "loss": Setting("kl", choices=("kl", "ce")),
    "noise_distribution": Setting("uniform", choices=NOISE_DISTRIBUTIONS),
    "anchors": Setting(4, kind=int, least=0),
    "max_offset": Setting(None, kind=int, least=0),
    "max_length": Setting(None, "A row needs a token to read and one to predict.", int, 2),
    "loss_chunk_size": Setting(1024, kind=int),
    "target_chunk_size": Setting(None, kind=int),
}
# Options of `TrainingArguments` that a draft cannot have, their only values, and why.
FIXED = {
    "neftune_noise_alpha": (None, "the training of a draft has no such option"),
    "label_smoothing_factor": (0.0, "the training of a draft has no such option"),
    "remove_unused_columns": (False, "it would empty every batch"),
    "push_to_hub": (False, "it would upload a draft without its code. Call draft.push_to_hub('owner/name') later"),
}


@dataclass
class DraftTrainingArguments(TrainingArguments):
    """Settings of a [`DraftTrainer`], in addition to those of `TrainingArguments`.

    Settings that belong to the draft, not to one training run, are in its config: for LongSpec, `window` and
    `noise_range`, the range of the gaps between a query and the newest target key that it sees.

    Without an accelerator `use_cpu` is set.

    The `help` of every field describes it. These need more words:

    Args:
        loss (`str`, *optional*, defaults to `"kl"`): `"kl"` is the Kullback-Leibler divergence from the target's
            distribution to the draft's. `"ce"` is the cross-entropy of the text's tokens, as in the papers.
        anchors (`int`, *optional*, defaults to 4):
            LongSpec only: number of positions at the start of a row that are not shifted by the offset.
        max_offset (`int`, *optional*):
            LongSpec only: largest offset of the positions after the anchors; 0 switches offsets off. The default and
            the upper limit is `max_position_embeddings` of the target minus the row's length.
        noise_distribution (`str`, *optional*, defaults to `"uniform"`):
            LongSpec only: how a row's gap is drawn from `noise_range`: `"uniform"`, as in the paper, or `"reached"`, by
            the probability that drafting reaches the gap's level if 60 % of the drafted tokens are accepted.
        target_kv_dir (`str`, *optional*): Folder for the target's states on the training rows (keys, values and hidden
            states). The first run writes them. They are then read instead of running the target.

    Source: LongSpec (https://huggingface.co/papers/2502.17421), sections 3.2 and 4; TokenSwift
    (https://huggingface.co/papers/2502.18890), appendix B.1.
    """

    loss: str = field(default="kl", metadata={"help": "kl: divergence from the target; ce: cross-entropy of the text."})
    anchors: int = field(default=4, metadata={"help": "Number of first positions that are not shifted."})
    max_offset: int | None = field(default=None, metadata={"help": "Largest offset; default: the target's limit."})
    noise_distribution: str = field(default="uniform", metadata={"help": "How gaps are drawn: uniform or reached."})
    max_length: int | None = field(default=None, metadata={"help": "Tokens of a text at most; default: the target's."})
    text_column: str = field(default="text", metadata={"help": "Column with texts."})
    messages_column: str = field(default="messages", metadata={"help": "Column with chats, for the template."})
    assistant_only: bool = field(default=False, metadata={"help": "Train only on the assistant's marked messages."})
    loss_chunk_size: int = field(default=1024, metadata={"help": "Tokens whose logits are in memory at a time."})
    target_chunk_size: int | None = field(default=None, metadata={"help": "Tokens per target forward; default: a row."})
    target_kv_dir: str | None = field(default=None, metadata={"help": "Folder for the target's states."})

    # Defaults that differ from TrainingArguments. remove_unused_columns=True would empty every batch. A loss of NaN
    # ends the run here instead of being filtered from the log.
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay False."})
    label_names: list[str] | None = field(default_factory=lambda: ["labels"], metadata={"help": "Must stay."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "A loss of NaN raises an error."})
    include_num_input_tokens_seen: str | bool = field(default="non_padding", metadata={"help": "Count tokens."})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Every weight is used."})
    # Dispatching would concatenate the batches of all processes, which is impossible for rows of different lengths.
    accelerator_config: dict | str | None = field(
        default_factory=lambda: {"dispatch_batches": False}, metadata={"help": "As in TrainingArguments."}
    )

    def __post_init__(self) -> None:
        # transformers refuses bf16=True without a GPU unless this is set
        if not (torch.accelerator.is_available() or is_torch_xla_available()):
            self.use_cpu = True
        super().__post_init__()
        for name, setting in RANGES.items():
            setting.check(name, getattr(self, name))
        for name, (only, reason) in FIXED.items():
            if (value := getattr(self, name)) != only:
                raise ValueError(f"{name}={value}: {reason}. Leave it out.")
