"""Read one document once, and answer many questions about it in one batch, with a draft.

    python examples/twenty_questions.py --target Qwen/Qwen3-0.6B --document notes.txt --questions questions.txt

The cache of the document is kept in a file beside it, so that a later run reads the questions alone.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import hf_longspec
from hf_longspec.generation.cache import CACHE_NAME


def main() -> int:
    """Print the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="Qwen/Qwen3-0.6B", help="Hub id or folder of the model")
    parser.add_argument("--document", type=Path, required=True, help="text file")
    parser.add_argument("--questions", type=Path, required=True, help="text file with a question in each line")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of an answer, default: 64")
    args = parser.parse_args()
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(args.target, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto")
    draft = hf_longspec.NgramDraftModel.from_target(model)
    document = tokenizer(args.document.read_text(encoding="utf-8"), return_tensors="pt").input_ids

    cache = read(model, document, args.document.with_suffix(".cache"))
    lines = [f"\nQuestion: {line}\nAnswer:" for line in args.questions.read_text(encoding="utf-8").splitlines()]
    questions = tokenizer(lines, return_tensors="pt", padding=True, add_special_tokens=False)
    cache.batch_repeat_interleave(len(lines))
    # new tokens alone come with the mask of the whole text, whose padding lies after the document
    of_document = torch.ones(len(lines), document.shape[1], dtype=torch.long)
    out = model.generate(
        questions.input_ids,
        attention_mask=torch.cat([of_document, questions.attention_mask], 1),
        assistant_model=draft,
        max_new_tokens=args.tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        **{CACHE_NAME: cache},
    )
    for line, row in zip(lines, out[:, questions.input_ids.shape[1] :], strict=True):
        print(f"{line.strip()}{tokenizer.decode(row, skip_special_tokens=True)}\n")
    return 0


def read(model: torch.nn.Module, document: torch.Tensor, path: Path) -> hf_longspec.SpeculativeCache:
    """Return the cache of a document `(1, P)`: that of an earlier run, or a new one, which is saved."""
    if path.exists():
        cache = hf_longspec.SpeculativeCache.load(path, model.config)
        if cache.get_seq_length() == document.shape[1]:
            print(f"{path} holds the document.\n")
            return cache
    cache = hf_longspec.SpeculativeCache(model.config, 1, document.shape[1])
    with torch.no_grad():
        model(document, **{CACHE_NAME: cache}, logits_to_keep=1)
    cache.save(path)
    return cache


if __name__ == "__main__":
    raise SystemExit(main())
