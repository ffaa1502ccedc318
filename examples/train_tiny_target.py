"""Train a 5M-parameter Llama on a CPU: the model of `make demo`, of the tests on real text and of the benchmarks.

The schedule follows wall-clock time: `--minutes 45,30,10` trains 45 minutes on windows of 512 tokens, 30 on 8,192 and
10 on 16,384, so the model attends over 16K tokens. The tokenizer is a byte-level BPE. A checkpoint is written every two
minutes. Run the same command again to continue from it.

    python examples/train_tiny_target.py --corpus novels/train --corpus stdlib --weights 2,1 \
        --minutes 45,30,10 --output runs/tiny-target

`stdlib` stands for the Python standard library (sources and pydoc topics) of the interpreter that runs the script,
without the modules in `HELD_OUT`. The training loop is explicit because its schedule is a function of time, and
`transformers.Trainer` schedules by steps. To compare drafts with a smaller model that has the same tokenizer, copy the
folder `tokenizer` into a new `--output` and pass `--hidden-size 128 --layers 2`.
"""

import argparse
import json
import math
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# Not used for training: the demo and the benchmarks continue these.
HELD_OUT = ("argparse", "statistics", "tarfile", "turtle", "typing", "zipfile", "decimal", "_pydecimal", "mailbox")
SUFFIXES = {".txt", ".py", ".md", ".rst"}
END, PAD = "<|endoftext|>", "<|pad|>"
STAGE_LENGTHS = (512, 8192, 16384)
TOKENS_PER_STEP = 2048  # at least one window; batches are small, since the number of steps matters most for few tokens
PEAK_LR, FINAL_LR, WARMUP_STEPS = 2e-3, 1e-4, 100


@dataclass
class Corpus:
    """Token stream of one folder: documents separated by the end-of-text token."""

    name: str
    tokens: np.ndarray


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    folders = [Path(sysconfig.get_paths()["stdlib"]) if name == "stdlib" else Path(name) for name in args.corpus]
    documents = [read_documents(folder) for folder in folders]
    tokenizer = load_or_train_tokenizer(args.output, documents, args.vocab_size)
    corpora = [
        load_or_encode(args.output, name, texts, tokenizer) for name, texts in zip(args.corpus, documents, strict=True)
    ]
    model = LlamaForCausalLM(model_config(tokenizer, args.hidden_size, args.layers))
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters", flush=True)
    train(model, corpora, args)
    model.to(torch.bfloat16).save_pretrained(args.output / "model")
    tokenizer.save_pretrained(args.output / "model")
    (args.output / "model" / "training.json").write_text(
        json.dumps(
            {
                "minutes": args.minutes,
                "stage_lengths": STAGE_LENGTHS,
                "tokens_per_step": TOKENS_PER_STEP,
                "corpora": {c.name: len(c.tokens) for c in corpora},
                "weights": args.weights,
                "seed": args.seed,
                "history": json.loads((args.output / "history.json").read_text()),
            },
            indent=1,
        )
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--corpus", action="append", required=True, help="folder of text files, or 'stdlib'; repeatable"
    )
    parser.add_argument("--weights", help="sampling weight of each corpus, comma-separated (default: its size)")
    parser.add_argument("--minutes", default="45,30,10", help="wall-clock minutes per stage of 512, 8K, 16K windows")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=256, help="a multiple of 128 (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.minutes = [float(m) for m in args.minutes.split(",")]
    args.weights = [float(w) for w in args.weights.split(",")] if args.weights else None
    if len(args.minutes) != len(STAGE_LENGTHS):
        parser.error(f"--minutes names {len(args.minutes)} stages, expected {len(STAGE_LENGTHS)}")
    if args.weights and len(args.weights) != len(args.corpus):
        parser.error(f"--weights has {len(args.weights)} entries for {len(args.corpus)} corpora")
    return args


def read_documents(folder: Path) -> list[str]:
    """Read the text files below `folder` without held-out modules, tests and installed packages."""
    skipped = {"test", "tests", "site-packages", "idlelib", "lib2to3", "encodings", "__pycache__"}
    texts = []
    for path in sorted(folder.rglob("*")):
        if path.suffix not in SUFFIXES or path.stem in HELD_OUT or skipped & set(path.relative_to(folder).parts):
            continue
        if path.name == "topics.py":
            scope: dict = {}
            exec(path.read_text(encoding="utf-8"), scope)  # noqa: S102 - the interpreter's own documentation table
            texts.extend(scope["topics"].values())
        elif path.stat().st_size > 500:
            texts.append(path.read_text(encoding="utf-8", errors="ignore"))
    if not texts:
        raise SystemExit(f"no text files ({', '.join(sorted(SUFFIXES))}) below {folder}")
    return texts


def load_or_train_tokenizer(output: Path, documents: list[list[str]], vocab_size: int) -> PreTrainedTokenizerFast:
    file = output / "tokenizer" / "tokenizer.json"
    if not file.exists():
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END, PAD],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        sample = [text[:60_000] for texts in documents for text in texts]
        bpe.train_from_iterator(sample, trainer)
        file.parent.mkdir(exist_ok=True)
        bpe.save(str(file))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(file), bos_token=END, eos_token=END, pad_token=PAD, model_max_length=16384
    )


def load_or_encode(output: Path, name: str, texts: list[str], tokenizer: PreTrainedTokenizerFast) -> Corpus:
    file = output / f"{Path(name).name or 'corpus'}.npy"
    if not file.exists():
        parts = []
        for text in texts:
            parts.append(np.asarray(tokenizer(text, verbose=False)["input_ids"], dtype=np.uint16))
            parts.append(np.asarray([tokenizer.eos_token_id], dtype=np.uint16))
        np.save(file, np.concatenate(parts))
    tokens = np.load(file, mmap_mode="r")
    print(f"{name}: {len(tokens) / 1e6:.1f}M tokens", flush=True)
    return Corpus(name, tokens)


def model_config(tokenizer: PreTrainedTokenizerFast, hidden_size: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 5 // 2,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 128,
        max_position_embeddings=STAGE_LENGTHS[-1],
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def train(model: LlamaForCausalLM, corpora: list[Corpus], args: argparse.Namespace) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    state = {"elapsed": 0.0, "steps": 0, "tokens": 0}
    history: list[dict] = []
    checkpoint = args.output / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state, history = saved["state"], saved["history"]
        print(f"continuing at {state['elapsed'] / 60:.1f} minutes", flush=True)
    rng = np.random.default_rng(args.seed + state["steps"])
    ends = np.cumsum(args.minutes) * 60
    last_saved = last_logged = time.monotonic()
    losses: list[float] = []
    while state["elapsed"] < ends[-1]:
        started = time.monotonic()
        stage = int(np.searchsorted(ends, state["elapsed"], side="right"))
        length = STAGE_LENGTHS[stage]
        batch = draw(rng, corpora, args.weights, length, max(1, TOKENS_PER_STEP // length))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(state["elapsed"] / ends[-1], state["steps"])
        losses.append(training_step(model, optimizer, batch))
        now = time.monotonic()
        state["elapsed"] += now - started
        state["steps"] += 1
        state["tokens"] += batch.numel()
        if now - last_logged > 30:
            mean = sum(losses) / len(losses)
            history.append({**state, "length": length, "loss": mean})
            print(
                f"{state['elapsed'] / 60:6.1f} min  {length:6d}  {state['tokens'] / 1e6:7.2f}M  {mean:.4f}", flush=True
            )
            losses, last_logged = [], now
        if now - last_saved > 120 or state["elapsed"] >= ends[-1]:
            saved = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "state": state,
                "history": history,
            }
            torch.save(saved, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
            last_saved = now
    (args.output / "history.json").write_text(json.dumps(history, indent=1))


def draw(
    rng: np.random.Generator, corpora: list[Corpus], weights: list[float] | None, length: int, rows: int
) -> torch.Tensor:
    """Draw `rows` random windows of `length` tokens, each from one corpus chosen by weight."""
    share = np.asarray(weights or [len(c.tokens) for c in corpora], dtype=float)
    windows = []
    for index in rng.choice(len(corpora), size=rows, p=share / share.sum()):
        tokens = corpora[index].tokens
        start = int(rng.integers(0, len(tokens) - length))
        windows.append(tokens[start : start + length].astype(np.int64))
    return torch.from_numpy(np.stack(windows))


def learning_rate(progress: float, step: int) -> float:
    cosine = FINAL_LR + (PEAK_LR - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return cosine * min(1.0, (step + 1) / WARMUP_STEPS)


def training_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    # Without native bfloat16 instructions autocast is 6-15 times slower than float32 (measured on an AVX2 machine).
    native = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and "AVX512" in torch.backends.cpu.get_cpu_capability()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=native):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


if __name__ == "__main__":
    main()
