"""Train a draft of the tiny target on a CPU: LongSpec or an ablation of it, EAGLE-3, or a small language model.

    python examples/train_tiny_draft.py --streams runs/tiny-target --output runs/tiny-longspec
    python examples/train_tiny_draft.py --streams runs/tiny-target --output runs/no-noise --without noise
    python examples/train_tiny_draft.py --streams runs/tiny-target --output runs/long \
        --draft runs/tiny-longspec/final --length 8192 --batch 1 --steps 60 --learning-rate 2e-4 --warmup 5
    python examples/train_tiny_draft.py --kind eagle3 --streams runs/tiny-target-texts --output runs/own-texts \
        --draft runs/tiny-eagle3/final --steps 800 --learning-rate 1e-3

The third command continues the training of a draft on longer texts, the fourth on texts that the target wrote itself.
`--streams` is a folder of tokens written by `train_tiny_target.py` or `write_target_texts.py`. A stream that is much
shorter than the longest is repeated until it has half its length, which is the weighting of the target's training.
Run the same command again to continue an interrupted run. All kinds are trained to the target's distribution.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from token_streams import add_streams, cut_rows, folder_name, load_streams, streams_command
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Trainer

from hf_longspec import AssistantDraftModel, DraftModel, Eagle3DraftModel, LongSpecDraftModel
from hf_longspec.bench.machine import git_commit, native_bfloat16
from hf_longspec.training import DraftTrainer, DraftTrainingArguments

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("assistant", "eagle3", "longspec")
# Overrides of the LongSpec draft and of the training arguments for each ablation.
ABLATIONS: dict[str, tuple[dict, dict]] = {
    "offsets": ({}, {"max_offset": 0}),
    "noise": ({"noise_range": [1, 1]}, {}),
    "cross-attention": ({"cross_attention": False}, {}),
}


class DistillationTrainer(Trainer):
    """Train a small language model with the KL divergence from a target, which has the same vocabulary."""

    def __init__(self, target: PreTrainedModel, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.target = target.eval()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the mean over all tokens of the batch."""
        with torch.no_grad():
            wanted = self.target(inputs["input_ids"]).logits.log_softmax(-1)
        own = model(inputs["input_ids"]).logits.log_softmax(-1)
        return torch.nn.functional.kl_div(
            own.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True
        )


def main() -> None:
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    overrides, settings = ABLATIONS[args.without] if args.without else ({}, {})
    torch.manual_seed(args.seed)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    if args.draft:
        draft = AutoModel.from_pretrained(args.draft, dtype=torch.float32)
    else:
        draft = new_draft(args.kind, target, overrides)
    # the local path has no meaning on other machines
    draft.config.target_name_or_path = Path(args.target).name
    rows = cut_rows(load_streams(*args.streams), args.length)
    training = DraftTrainingArguments(
        str(args.output),
        loss="kl",
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=args.warmup,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=min(args.log_every, args.steps),
        save_steps=100,
        save_total_limit=1,
        use_cpu=True,
        bf16=bool(native_bfloat16()),  # elsewhere autocast is 6 to 15 times slower than float32
        include_num_input_tokens_seen="all",
        seed=args.seed,
        report_to="none",
        **settings,
    )
    if isinstance(draft, AssistantDraftModel):
        trainer: Trainer = DistillationTrainer(target, draft.assistant, training, train_dataset=rows)
    else:
        trainer = DraftTrainer(draft, target, training, train_dataset=rows)
    trainer.train(resume_from_checkpoint=any(args.output.glob("checkpoint-*")) or None)
    trainer.save_state()
    (args.output / "command.txt").write_text(command(args), encoding="utf-8")
    (args.output / "commit.txt").write_text(git_commit(ROOT) or "", encoding="utf-8")
    if isinstance(draft, AssistantDraftModel):
        draft.assistant.to(torch.bfloat16)
    draft.to(torch.bfloat16).save_pretrained(args.output / "final")


def new_draft(kind: str, target: PreTrainedModel, overrides: dict[str, Any]) -> DraftModel:
    """Return an untrained draft with about 0.8M to 1M parameters beside the target's embedding."""
    if kind == "longspec":
        return LongSpecDraftModel.from_target(target, **overrides)
    if kind == "eagle3":
        return Eagle3DraftModel.from_target(target, tree_widths=[4, 4, 4, 3])
    own = target.config.to_dict() | {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}
    small = LlamaForCausalLM(LlamaConfig(**(own | heads | {"tie_word_embeddings": True})))
    return AssistantDraftModel.from_model(small, target)


def command(args: argparse.Namespace) -> str:
    """Return the command of this run, without the folders of this machine."""
    without = f" --without {args.without}" if args.without else ""
    draft = f" --draft {folder_name(args.draft)}" if args.draft else ""
    kind = "" if args.kind == "longspec" else f" --kind {args.kind}"
    numbers = f"--steps {args.steps} --length {args.length} --batch {args.batch} --learning-rate {args.learning_rate:g}"
    numbers += f" --warmup {args.warmup} --log-every {args.log_every}"
    return (
        f"python examples/train_tiny_draft.py{kind} {streams_command(args.streams)} "
        f"--output {folder_name(args.output)} \\\n"
        f"    {numbers} --seed {args.seed}{draft}{without}\n"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="longspec")
    parser.add_argument("--target", default=str(ROOT / "hub_cards" / "tiny-target"), help="folder or Hub id")
    add_streams(parser)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--length", type=int, default=512, help="tokens per row (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="rows per step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--without", choices=sorted(ABLATIONS), help="train an ablation of LongSpec")
    parser.add_argument("--warmup", type=int, default=50, help="steps of warm-up (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=25, help="steps between two log lines (default: %(default)s)")
    parser.add_argument("--draft", type=Path, help="folder of a draft to continue (default: a new one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads (default: all)")
    args = parser.parse_args()
    if args.without and args.kind != "longspec":
        parser.error(f"--without {args.without} with --kind {args.kind}: only LongSpec has ablations")
    return args


if __name__ == "__main__":
    main()
