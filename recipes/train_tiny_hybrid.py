"""Train a small hybrid target on bytes: three layers of the gated delta rule for each layer of attention.

    python recipes/train_tiny_hybrid.py --streams runs/tiny-target --output runs/tiny-hybrid --tokens 3e6
    python recipes/train_tiny_draft.py --target runs/tiny-hybrid/final --streams runs/tiny-target \\
        --output runs/tiny-hybrid-longspec --tokens 1e6
    hf-longspec bench --target runs/tiny-hybrid/final --draft ngram --draft runs/tiny-hybrid-longspec/final \\
        --data novels/eval --context 1k,4k

`--streams` is a folder of bytes written by `train_tiny_target.py`. The rows have `--length` bytes, so the model says
nothing about long contexts. Run the same command again to continue an interrupted run.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from token_streams import add_streams, cut_rows, load_streams
from train_tiny_target import END_ID, PAD_ID, byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, Trainer, TrainingArguments

from hf_longspec.cli.env import native_bfloat16

MAX_LENGTH = 8192


def main() -> None:
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_config(hybrid_config(), dtype=torch.float32)
    training = TrainingArguments(
        str(args.output),
        max_steps=max(1, round(args.tokens / (args.batch * args.length))),
        per_device_train_batch_size=args.batch,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=60,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=25,
        save_steps=100,
        save_total_limit=1,
        use_cpu=True,
        bf16=bool(native_bfloat16()),
        include_num_input_tokens_seen="all",
        seed=args.seed,
        report_to="none",
    )
    rows = cut_rows(load_streams(*args.streams), args.length)
    trainer = Trainer(model, training, train_dataset=rows, data_collator=with_labels)
    trainer.train(resume_from_checkpoint=any(args.output.glob("checkpoint-*")) or None)
    trainer.save_state()
    model.to(torch.bfloat16).save_pretrained(args.output / "final")
    byte_tokenizer().save_pretrained(args.output / "final")


def hybrid_config() -> PreTrainedConfig:
    """Return the configuration of eight layers, the fourth and the eighth with attention."""
    return AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=258,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )


def with_labels(rows: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    tokens = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": tokens, "labels": tokens}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_streams(parser)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=float, default=3e6, help="bytes of training (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="bytes per row (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="rows per step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads (default: all)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
