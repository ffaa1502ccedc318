"""Train a draft of the tiny target on a CPU: LongSpec, EAGLE-3, DFlash, TokenSwift's heads, or a model.

    python recipes/train_tiny_draft.py --streams runs/tiny-target --output runs/longspec-short --tokens 2.4e6
    python recipes/train_tiny_draft.py --streams runs/tiny-target --output runs/longspec-long --tokens 0.6e6 \\
        --draft runs/longspec-short/final --length 8192 --batch 1 --max-offset 0
    python recipes/train_tiny_draft.py --streams runs/tiny-target-texts --output runs/longspec-texts --tokens 0.6e6 \\
        --draft runs/longspec-long/final --learning-rate 5e-4

These are the three stages of LongSpec's paper (https://huggingface.co/papers/2502.17421, section 4.1): short rows with
Anchor-Offset Indices, long rows at their own positions, and text of the target's own. `--streams` is a folder of tokens
written by `train_tiny_target.py` or `write_target_texts.py`. A stream that is much shorter than the longest is repeated
until it has half its length. All kinds learn the target's distribution. Every draft is trained on the same number of
tokens, `--tokens`, with a cosine schedule to a learning rate of zero. Run the same command again to continue an
interrupted run.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from token_streams import add_streams, cut_rows, folder_name, load_streams, streams_command
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Trainer

from hf_longspec import (
    AssistantDraftModel,
    DFlashDraftModel,
    DraftModel,
    Eagle3DraftModel,
    LongSpecDraftModel,
    TokenSwiftDraftModel,
)
from hf_longspec.cli.env import git_commit, native_bfloat16
from hf_longspec.training import DraftTrainer, DraftTrainingArguments
from hf_longspec.training.arguments import NOISE_DISTRIBUTIONS

ROOT = Path(__file__).resolve().parents[1]
WARMUP_STEPS = 20
DEPTH = 4  # of the trees that drafts are published with; deeper gaps are not trained
LEARNING_RATES = {"longspec": 2e-3, "eagle3": 2e-3, "dflash": 2e-3, "assistant": 2e-3, "tokenswift": 2e-2}
# Overrides of the draft and of the training arguments for each variant of a kind.
VARIANTS: dict[str, dict[str, tuple[dict, dict]]] = {
    "longspec": {
        "no-offsets": ({}, {"max_offset": 0}),
        "no-noise": ({"noise_range": [1, 1]}, {}),
        "uniform-noise": ({}, {"noise_distribution": "uniform"}),
        "no-cross-attention": ({"cross_attention": False}, {}),
    },
    "dflash": {"dspark": ({"markov_rank": 64, "confidence_head": "markov"}, {})},
    "tokenswift": {"independent": ({"chained": False}, {}), "sequential": ({"sequential": True}, {})},
}


class Minutes:
    """A trainer whose log has the minutes of processor time, those before an interruption included."""

    state: Any
    _before: float | None = None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add `cpu_minutes` to the log."""
        if self._before is None:
            self._before = max((entry.get("cpu_minutes", 0.0) for entry in self.state.log_history), default=0.0)
        logs = {**logs, "cpu_minutes": self._before + time.process_time() / 60}
        super().log(logs, start_time)  # type: ignore[misc]


class TinyDraftTrainer(Minutes, DraftTrainer):
    """Train a draft, and log the minutes."""


class DistillationTrainer(Minutes, Trainer):
    """Train a small language model with the KL divergence from a target of the same vocabulary.

    The log has the `acceptance`: the share of tokens for which the model's most likely token is the target's.
    """

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel, *args: Any, **kwargs: Any):
        super().__init__(model, *args, **kwargs)
        self.target = target.eval()
        self._hits: list[torch.Tensor] = []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the mean over all tokens of the batch."""
        with torch.no_grad():
            wanted = self.target(inputs["input_ids"]).logits.log_softmax(-1)
        own = model(inputs["input_ids"]).logits.log_softmax(-1)
        self._hits.append((own.argmax(-1) == wanted.argmax(-1)).float().mean())
        return torch.nn.functional.kl_div(
            own.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the acceptance since the last entry."""
        if self._hits:
            logs = {**logs, "acceptance": torch.stack(self._hits).mean().item()}
            self._hits = []
        super().log(logs, start_time)


def main() -> None:
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    overrides: dict[str, Any] = {}
    settings: dict[str, Any] = {"max_offset": args.max_offset, "noise_distribution": args.noise_distribution}
    if args.variant:
        overrides, changed = VARIANTS[args.kind][args.variant]
        settings |= changed
    torch.manual_seed(args.seed)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    if args.draft:
        draft = AutoModel.from_pretrained(args.draft, dtype=torch.float32)
    else:
        draft = new_draft(args.kind, target, overrides)
    # the local path has no meaning on other machines
    draft.config.target_name_or_path = Path(args.target).name
    steps = max(1, round(args.tokens / (args.batch * args.length)))
    training = DraftTrainingArguments(
        str(args.output),
        loss="kl",
        max_steps=steps,
        per_device_train_batch_size=args.batch,
        learning_rate=args.learning_rate or LEARNING_RATES[args.kind],
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP_STEPS,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=max(1, min(25, steps // 10)),
        save_steps=100,
        save_total_limit=1,
        use_cpu=True,
        bf16=bool(native_bfloat16()),  # elsewhere autocast is 6 to 15 times slower than float32
        include_num_input_tokens_seen="all",
        seed=args.seed,
        report_to="none",
        **settings,
    )
    rows = cut_rows(load_streams(*args.streams), args.length)
    small = isinstance(draft, AssistantDraftModel)
    trainer: Any = DistillationTrainer if small else TinyDraftTrainer
    trainer = trainer(draft.assistant if small else draft, target, training, train_dataset=rows)
    trainer.train(resume_from_checkpoint=any(args.output.glob("checkpoint-*")) or None)
    trainer.save_state()
    (args.output / "command.txt").write_text(command(args), encoding="utf-8")
    (args.output / "commit.txt").write_text(git_commit(ROOT) or "", encoding="utf-8")
    if small:
        draft.assistant.to(torch.bfloat16)
    draft.to(torch.bfloat16).save_pretrained(args.output / "final")


def new_draft(kind: str, target: PreTrainedModel, overrides: dict[str, Any]) -> DraftModel:
    """Return an untrained draft with about 1M parameters beside the target's embedding."""
    if kind == "longspec":
        return LongSpecDraftModel.from_target(target, **({"noise_range": [1, DEPTH]} | overrides))
    if kind == "eagle3":
        return Eagle3DraftModel.from_target(target, tree_widths=[4, 4, 4, 3])
    if kind == "dflash":  # two layers, each with half of the usual MLP
        sizes = {"num_hidden_layers": 2, "intermediate_size": 4 * target.config.hidden_size // 3}
        return DFlashDraftModel.from_target(target, block_size=1 + DEPTH, **(sizes | overrides))
    if kind == "tokenswift":
        return TokenSwiftDraftModel.from_target(target, num_heads=3, **overrides)
    own = target.config.to_dict() | {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}
    small = LlamaForCausalLM(LlamaConfig(**(own | heads | {"tie_word_embeddings": True})))
    return AssistantDraftModel.from_model(small, target)


def command(args: argparse.Namespace) -> str:
    """Return the command of this run, without the folders of this machine."""
    names = ("tokens", "length", "batch", "threads", "learning_rate", "max_offset", "noise_distribution", "variant")
    given = {name: vars(args)[name] for name in names}
    parts = [f"--{name.replace('_', '-')} {value}" for name, value in given.items() if value is not None]
    parts += [f"--draft {folder_name(args.draft)}"] if args.draft else []
    return (
        f"python recipes/train_tiny_draft.py --kind {args.kind} {streams_command(args.streams)} \\\n"
        f"    --output {folder_name(args.output)} {' '.join(parts)} --seed {args.seed}\n"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=sorted(LEARNING_RATES), default="longspec")
    parser.add_argument("--variant", help="no-offsets, no-noise, no-cross-attention, dspark, independent, sequential")
    parser.add_argument("--target", default=str(ROOT / "hub_cards" / "tiny-target"), help="folder or Hub id")
    add_streams(parser)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=float, default=2.4e6, help="tokens of training (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens per row (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="rows per step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, help="default: by kind")
    parser.add_argument("--max-offset", type=int, help="longspec: largest offset; 0: own positions (default: all)")
    parser.add_argument(
        "--noise-distribution",
        choices=NOISE_DISTRIBUTIONS,
        default="reached",
        help="longspec: how gaps are drawn (default: %(default)s)",
    )
    parser.add_argument("--draft", type=Path, help="folder of a draft to continue (default: a new one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads (default: all)")
    args = parser.parse_args()
    known = sorted(VARIANTS.get(args.kind, {}))
    if args.variant and args.variant not in known:
        parser.error(f"--variant {args.variant} with --kind {args.kind}: expected one of {', '.join(known) or 'none'}")
    return args


if __name__ == "__main__":
    main()
