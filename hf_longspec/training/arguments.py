"""DraftTrainingArguments: TrainingArguments with what a draft needs besides."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

LOSSES = ("kl", "ce")


@dataclass
class DraftTrainingArguments(TrainingArguments):
    """Settings of a [`DraftTrainer`]; everything of `TrainingArguments` is there too.

    What belongs to the draft and not to one run of training is in its config: `noise_range`, the gaps between a query
    and the newest target key that it sees, and `window`.

    Args:
        loss (`str`, *optional*, defaults to `"kl"`):
            `"kl"`: the Kullback-Leibler divergence from the target's distribution to the draft's, whatever the text.
            `"ce"`: the cross-entropy of the text's own tokens, as in the papers.
        anchors (`int`, *optional*, defaults to 4):
            LongSpec: the first positions of a row, which no offset moves.
        max_offset (`int`, *optional*):
            LongSpec: largest offset of the positions behind the anchors; 0 switches offsets off. By default, and at
            most, what the target has positions for: `max_position_embeddings` minus the row's length.
        max_length (`int`, *optional*):
            Tokens at which a text or a conversation is cut. By default what the target has positions for.
        text_column (`str`, *optional*, defaults to `"text"`):
            Column of a dataset with texts.
        messages_column (`str`, *optional*, defaults to `"messages"`):
            Column of a dataset with conversations, which go through the tokenizer's chat template.
        assistant_only (`bool`, *optional*, defaults to `False`):
            Whether only what the assistant says in a conversation is trained on. The chat template has to mark it.
        loss_chunk_size (`int`, *optional*, defaults to 1024):
            Places whose logits exist at once.
        target_chunk_size (`int`, *optional*):
            Tokens per forward of the target. By default a row is run at once.
        target_kv_dir (`str`, *optional*):
            Folder in which what the draft reads of the target is kept for the training rows (keys, values and hidden
            states), written by the first run and read instead of running the target.

    Raises:
        ValueError: For a value outside of its range.

    Source: LongSpec (https://huggingface.co/papers/2502.17421), sections 3.2 and 4; TokenSwift
    (https://huggingface.co/papers/2502.18890), appendix B.1.
    """

    loss: str = field(default="kl", metadata={"help": "kl: to the target's distribution; ce: of the text's tokens."})
    anchors: int = field(default=4, metadata={"help": "First positions of a row, which no offset moves."})
    max_offset: int | None = field(default=None, metadata={"help": "Largest offset; default: all the target has."})
    max_length: int | None = field(default=None, metadata={"help": "Tokens at which a text is cut."})
    text_column: str = field(default="text", metadata={"help": "Column with texts."})
    messages_column: str = field(default="messages", metadata={"help": "Column with conversations."})
    assistant_only: bool = field(default=False, metadata={"help": "Train on the assistant's turns alone."})
    loss_chunk_size: int = field(default=1024, metadata={"help": "Places whose logits exist at once."})
    target_chunk_size: int | None = field(default=None, metadata={"help": "Tokens per forward of the target."})
    target_kv_dir: str | None = field(default=None, metadata={"help": "Folder for the target's states."})

    # What this trainer needs to be otherwise than in TrainingArguments. The default of remove_unused_columns would
    # empty every batch; a loss that is not a number ends the run here instead of being filtered from the log.
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay False."})
    label_names: list[str] | None = field(default_factory=lambda: ["labels"], metadata={"help": "Must stay."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "A loss of NaN raises an error."})
    include_num_input_tokens_seen: str | bool = field(default="non_padding", metadata={"help": "Count tokens."})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Every weight is always used."})
    # Dispatching would join the batches of all processes, which rows of different lengths do not allow.
    accelerator_config: dict | str | None = field(
        default_factory=lambda: {"dispatch_batches": False}, metadata={"help": "As in TrainingArguments."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss not in LOSSES:
            raise ValueError(f"loss={self.loss!r}: expected one of {', '.join(LOSSES)}.")
        for name, least in {"anchors": 0, "max_offset": 0, "loss_chunk_size": 1, "target_chunk_size": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}.")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length={self.max_length}: a row needs 2 tokens, one to see and one to predict.")
        if self.remove_unused_columns:
            raise ValueError("remove_unused_columns=True would empty every batch: leave it False.")
        if self.push_to_hub:
            raise ValueError(
                "push_to_hub=True would upload a draft without its code, under the name of a folder: leave it False, "
                "and publish the trained draft with draft.push_to_hub('owner/name') or hf-longspec publish."
            )
