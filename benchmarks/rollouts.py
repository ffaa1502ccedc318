"""Rollouts of GRPO: TRL's own generation, this package's loop, and drafts that are frozen or learn along.

    python -m benchmarks.rollouts --threads 2
    python -m benchmarks.rollouts --tau --steps 200 --prompts 2 --completions 4

Each way trains a copy of the same target on the same prompts, with the same seed, by a reward that moves the policy:
the share of lower-case vowels. The ways run one after another, in turns. Time is that of the calls of `generate`.
With --tau, two drafts without a gate follow 200 steps: tau of the rollouts, frozen and learning along.
"""

import time
from collections.abc import Callable
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

import hf_longspec
from benchmarks import harness
from benchmarks.report import mean_interval
from examples.grpo import PROMPTS, share_of_vowels
from hf_longspec.cli.measuring import rotated, significant
from hf_longspec.training import DraftAlong

OWN = "generate of TRL"
QUESTIONS = [
    "Name three rivers of Europe.",
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "What is a prime number?",
    "Give me a recipe for bread.",
    "Explain what a compiler does.",
    "How do bees make honey?",
    "Tell me about the moon.",
]
BINS = 10


class Clock:
    """Count the time and the tokens of a model's calls of `generate`."""

    def __init__(self, model: Any):
        self.seconds, self.tokens, inner = [0.0], [0], model.generate

        def generate(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = inner(*args, **kwargs)
            prompts = kwargs["input_ids"].shape[1]
            self.seconds.append(time.perf_counter() - started)
            self.tokens.append(int((result[:, prompts:] != kwargs["generation_config"].pad_token_id).sum()))
            return result

        model.generate = generate


class Watch(TrainerCallback):
    """Keep tau of each step's rollouts."""

    def __init__(self, draft: Any):
        self.draft, self.taus = draft, list[float]()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Read the statistics of the step's rollouts."""
        self.taus.append(self.draft.last_speculation.mean_acceptance_length if self.draft is not None else 0.0)


def run(args: Any, make: Callable[[Any], Any] | None, learns: bool, steps: int) -> dict[str, Any]:
    """Train with the draft that `make` returns, or with TRL's own generation."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.target, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts: list[Any] = PROMPTS
    if tokenizer.chat_template is not None:
        prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder, max_steps=steps, per_device_train_batch_size=args.completions, report_to=[], save_strategy="no",
            gradient_accumulation_steps=args.prompts, num_generations=args.completions, use_cpu=True, bf16=False,
            max_completion_length=args.tokens, learning_rate=args.rate, logging_steps=1, disable_tqdm=True, seed=3,
            lr_scheduler_type="constant", gradient_checkpointing=False,
        )  # fmt: skip
        rows = [{"prompt": prompt} for prompt in prompts[: args.prompts] * steps]
        trainer = GRPOTrainer(
            model=model, reward_funcs=_rewards(tokenizer), args=config, train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )  # fmt: skip
        draft = None if make is None else make(model)
        bound = None if draft is None else hf_longspec.bind(trainer, draft)
        watch = Watch(draft)
        trainer.add_callback(watch)
        if learns:
            trainer.add_callback(DraftAlong(bound, every=args.every, learning_rate=args.draft_rate))
        clock = Clock(model)
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
    logs = trainer.state.log_history
    return {
        "seconds": clock.seconds[1:], "tokens": clock.tokens[1:], "taus": watch.taus, "of_steps": seconds,
        "rewards": [log["reward"] for log in logs if "reward" in log],
        "of_draft": sum(log.get("draft_seconds", 0.0) for log in logs),
    }  # fmt: skip


def _rewards(tokenizer: Any) -> Callable[..., list[float]]:
    if tokenizer.chat_template is None:
        return share_of_vowels
    return lambda completions, **_: share_of_vowels([turns[-1]["content"] for turns in completions])


def speeds(args: Any, results: Any, ways: dict[str, tuple[Any, bool]]) -> None:
    """Time the rollouts of every way, in turns."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for turn in range(args.turns):
        for name in rotated(list(ways), turn):
            found[name].append(run(args, *ways[name], args.steps))
            results.say(f"{name}: {sum(found[name][-1]['tokens']) / sum(found[name][-1]['seconds']):.1f} tokens/s")
    rates = {name: [sum(one["tokens"]) / sum(one["seconds"]) for one in of] for name, of in found.items()}
    for name, of_way in found.items():
        ratios = [own / base for own, base in zip(rates[name], rates[OWN], strict=True)]
        rewards = [mean(one["rewards"]) for one in of_way]
        share = [sum(one["seconds"]) / one["of_steps"] for one in of_way]
        results.write(
            "rollouts",
            model=args.label,
            way=name,
            rows=args.prompts * args.completions,
            threads=torch.get_num_threads(),
            tokens_per_second=significant(mean(rates[name])),
            speed=significant(mean(ratios)),
            lowest=significant(min(ratios)),
            highest=significant(max(ratios)),
            share=significant(mean(share)),
            reward=significant(mean(rewards)),
            tau=significant(mean(of_way[0]["taus"])),
        )


def taus(args: Any, results: Any, draft: str) -> None:
    """Follow tau of a trained draft, frozen and learning along."""
    for name, learns in (("frozen", False), ("learns along", True)):
        found = run(args, lambda model: _opened(draft, False), learns, args.steps)
        size = max(1, args.steps // BINS)
        for first in range(0, args.steps, size):
            part = slice(first, first + size)
            results.write(
                "tau", model=args.label, way=name, step=first + size, tau=mean_interval(found["taus"][part]),
                reward=mean_interval(found["rewards"][part]), share=significant(found["of_draft"] / found["of_steps"]),
            )  # fmt: skip
        results.say(f"{name}: {found['of_steps']:.0f} s, draft {found['of_draft']:.0f} s")


def _opened(folder: str, gate: bool) -> Any:
    draft = AutoModel.from_pretrained(folder, dtype=torch.float32)
    draft.generation_config.gate = gate
    return draft


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__, "rollouts", minutes=60, prompts=True)
    for name, default, words in (
        ("steps", 4, "training steps"), ("turns", 2, "runs of every way"), ("prompts", 8, "in a step"),
        ("completions", 8, "of each prompt"), ("tokens", 64, "of a completion"), ("every", 1, "steps between updates"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{words} (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=2e-4, help="of the policy (default: %(default)s)")
    parser.add_argument("--draft-rate", type=float, default=1e-3, help="of a draft that learns (default: %(default)s)")
    parser.add_argument("--draft", default=str(harness.HUB_CARDS / "tiny-longspec"), help="default: %(default)s")
    parser.add_argument("--tau", action="store_true", help="follow tau, in place of the time")
    args = parser.parse_args(arguments)
    logging.set_verbosity_error()
    args.label = args.target.rstrip("/").rsplit("/", 1)[-1]
    names = ("steps", "turns", "prompts", "completions", "tokens", "rate", "draft_rate", "every")
    settings = {name: getattr(args, name) for name in names} | {"target": args.label}
    with harness.start(args, "rollouts", settings) as results:
        if args.tau:
            taus(args, results, args.draft)
            return
        ways: dict[str, tuple[Any, bool]] = {
            OWN: (None, False),
            "no draft": (hf_longspec.PlainDraftModel.from_target, False),
            "n-grams with memory": (
                lambda model: hf_longspec.NgramDraftModel.from_target(model, ngram_memory=200_000), False,
            ),
            "SpecAttn": (hf_longspec.SpecAttnDraftModel.from_target, False),
            "LongSpec, learns along": (lambda model: _opened(args.draft, True), True),
        }  # fmt: skip
        speeds(args, results, ways)


if __name__ == "__main__":
    main()
