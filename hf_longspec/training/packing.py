"""pack: rows of one length from documents of any length."""

from typing import Any

from .arguments import DraftTrainingArguments
from .documents import DocumentEncoder

DOCUMENTS_PER_BATCH = 1000


def pack(dataset: Any, tokenizer: Any, args: DraftTrainingArguments, length: int) -> Any:
    """Concatenate tokenized documents and cut them into rows.

    Every document ends with the end-of-text token; a row holds several documents or a part of one, and what is left
    of 1,000 documents makes one shorter row.

    Args:
        dataset (`datasets.Dataset` or `datasets.IterableDataset`): With texts or conversations.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        args ([`DraftTrainingArguments`]): Names of the columns.
        length (`int`): Tokens of a row.

    Returns:
        The same kind of dataset, with `input_ids` and `labels`.

    Raises:
        ValueError: If the columns are not there.
    """
    if length < 2:
        raise ValueError(f"length={length}: a row needs 2 tokens, one to see and one to predict.")
    encoder = DocumentEncoder(args, tokenizer)
    encoder.max_length = None  # nothing is cut off: it begins the next row
    columns = dataset.column_names or list(next(iter(dataset)))
    encoder.check(columns)

    def rows(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        count = len(next(iter(batch.values())))
        documents = [encoder({name: batch[name][index] for name in batch}) for index in range(count)]
        packed = {}
        for name, parts in zip(("input_ids", "labels"), zip(*documents, strict=True), strict=True):
            stream = [token for part in parts for token in part.tolist()]
            packed[name] = [stream[start : start + length] for start in range(0, len(stream), length)]
        return packed

    return dataset.map(rows, batched=True, batch_size=DOCUMENTS_PER_BATCH, remove_columns=columns)
