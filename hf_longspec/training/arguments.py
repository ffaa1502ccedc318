"""DraftTrainingArguments: TrainingArguments with the settings of draft training."""

from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments
from transformers.utils import is_torch_xla_available

from ..modeling.settings import Setting

LOSSES = ("kl", "ce")
NOISE_DISTRIBUTIONS = ("uniform", "reached")
# Options of `TrainingArguments` that change a model's embeddings or labels, and their values without effect.
WITHOUT_EFFECT = {"neftune_noise_alpha": None, "label_smoothing_factor": 0.0}


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
        Setting("kl", choices=LOSSES).check("loss", self.loss)
        Setting("uniform", choices=NOISE_DISTRIBUTIONS).check("noise_distribution", self.noise_distribution)
        for name, least in {"anchors": 0, "max_offset": 0, "loss_chunk_size": 1, "target_chunk_size": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}.")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length={self.max_length}: a row needs 2 tokens, one to read and one to predict.")
        for name, neutral in WITHOUT_EFFECT.items():
            if (value := getattr(self, name)) != neutral:
                raise ValueError(f"{name}={value}: the training of a draft has no such option. Leave it out.")
        if self.remove_unused_columns:
            raise ValueError("remove_unused_columns=True would empty every batch: leave it False.")
        if self.push_to_hub:
            raise ValueError(
                "push_to_hub=True would upload a draft without its code, under the name of a folder: leave it False, "
                "and publish the trained draft with draft.push_to_hub('owner/name') or hf-longspec publish."
            )
