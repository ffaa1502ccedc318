"""`hf-longspec tokenize`: text files as a stream of tokens, which recipes and `TokenWindows` read."""

from pathlib import Path
from typing import Annotated

import typer

from .. import CommandError, options


def tokenize(
    files: Annotated[list[Path], typer.Argument(help="Text files, one document each; - for standard input.")],
    target: options.Target,
    output: Annotated[Path, options.output("File to write, .npy. Its folder is made.", suffix=".npy")],
    debug: options.Debug = False,
) -> None:
    """Write text files as one stream of the target's tokens, for training.

    Each file is a document, and the target's end-of-text token follows it. A recipe reads the stream as `dataset:
    {tokens: [runs/tokens.npy]}`.

    Examples:

    - hf-longspec tokenize notes.txt --target Qwen/Qwen3-0.6B --output runs/tokens.npy
    - hf-longspec tokenize docs/*.md --target Qwen/Qwen3-0.6B --output runs/docs.npy

    Exit status: 0; 2 for what cannot be read or written.
    """
    with options.one_line_errors(debug):
        import numpy as np

        from ...training.data import document_ids
        from ..session import load_tokenizer

        documents = [options.read_text(file, None)[1] for file in files]
        tokenizer = load_tokenizer(target)
        if tokenizer.eos_token_id is None:
            raise CommandError(f"the tokenizer of {target} has no end-of-text token. Pass another target.")
        stream = [token for document in documents for token in document_ids(tokenizer, document)]
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished = output.with_suffix(".unfinished.npy")
        np.save(unfinished, np.array(stream, dtype=np.uint32))
        unfinished.replace(output)
        count = f"{len(documents)} document{'' if len(documents) == 1 else 's'}"
        print(f"{output}: {len(stream):,} tokens of {count}.")
