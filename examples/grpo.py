"""Train a model with GRPO of TRL, with a draft for its completions that learns along.

    python examples/grpo.py
    python examples/grpo.py --model Qwen/Qwen3-0.6B --draft ngram --steps 100

Without `--model`, the tiny target of the repository learns to write lower-case vowels, with its trained LongSpec draft:
about a minute on a CPU. The completions, rewards and weights are those without a draft: `--draft none`. Where no
verification pays, as with 16 rows on most CPUs, the gate drafts nothing, and the line at the end says so. It needs
`pip install '.[rl]'`.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import hf_longspec
from hf_longspec.training import DraftAlong

CARDS = Path(__file__).resolve().parents[1] / "hub_cards"
PROMPTS = ["def main(", "import os\n", "class Reader:\n    ", "for name in ", "# The ", "return ", "if not "]
PROMPTS += ["with open("]


def share_of_vowels(completions: list[str], **_) -> list[float]:
    """The reward: how much of each completion is a lower-case vowel."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(CARDS / "tiny-target"), help="folder or Hub id")
    parser.add_argument("--draft", default=str(CARDS / "tiny-longspec"), help="folder or Hub id, 'ngram' or 'none'")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64, help="of a completion")
    parser.add_argument("--output", default="runs/grpo")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> GRPOTrainer:
    args = parse(arguments)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    config = GRPOConfig(
        args.output,
        max_steps=args.steps,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=args.tokens,
        learning_rate=2e-4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward_funcs=share_of_vowels,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
    )
    if args.draft == "none":
        trainer.train()
        return trainer
    if args.draft == "ngram":  # remembers the completions of earlier steps
        draft = hf_longspec.NgramDraftModel.from_target(trainer.model, ngram_memory=200_000)
    else:
        draft = AutoModel.from_pretrained(args.draft, dtype=torch.float32)
    with hf_longspec.bind(trainer, draft) as bound:
        if any(weight.requires_grad for weight in draft.parameters()):
            trainer.add_callback(DraftAlong(bound))
        trainer.train()
    print(draft.last_speculation)
    return trainer


if __name__ == "__main__":
    main()
