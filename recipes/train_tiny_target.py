"""Train a 12M-parameter Llama on bytes that uses 16K tokens of context: the model of `make demo` and of the benchmarks.

    python recipes/train_tiny_target.py --novels novels/train --output runs/tiny-target
    python recipes/train_tiny_target.py --novels novels/train --output runs/deep-target --parent hub_cards/tiny-target

The target learns to look back first, on short rows in which passages return (induction forms suddenly, after one to
three million bytes), and the rows then grow: 128, 512, 2K, 8K, 16K. A stage that demands recall goes on until passages
are recalled at the given distance, and no longer than twice its tokens. Text is the Python standard library and the
pure-Python packages of the interpreter, package by package, and novels; `HELD_OUT` is never trained on.

The first stages train six layers. Then each layer is followed by a copy of itself, each of the two adds half of what
the one added, and twelve layers are trained. (Copies whose output projections began at zero stayed idle: after 2.7M
bytes the loss without them was 0.001 ± 0.003 nats higher.) `--parent` begins there, with the weights of a model of six
layers. In these stages some rows jump over positions at a random place, so that rows of 2K bytes also train
distances of up to 16K (PoSE, https://huggingface.co/papers/2309.10400).

The run saves itself every three minutes and continues from there when the command is given again. Matrices are trained
with Muon (https://huggingface.co/papers/2502.16982), embeddings and norms with AdamW. The learning rate is halved from
rows of 2K bytes on, and falls to zero over the last `COOLDOWN` bytes. The folder of the output then holds the `model`
with its tokenizer, and the bytes of the training texts, `source.npy` and `novels.npy`, for the training of drafts.
"""

import argparse
import json
import os
import site
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from long_context_rows import Rows, recalled
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_longspec.cli.env import native_bfloat16

# Packages and modules of the standard library that are kept for evaluation, the demo and the benchmarks.
HELD_OUT = ("argparse", "statistics", "tarfile", "turtle", "typing", "zipfile", "decimal", "_pydecimal", "mailbox")
HELD_OUT_PACKAGES = ("networkx", "click", "jinja2", "mpmath")
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__", "site-packages", "_vendor"}
MOST_BYTES_OF_A_PACKAGE = 3_000_000  # a few packages would be most of the text otherwise
END, PAD = "<|endoftext|>", "<|pad|>"
END_ID, PAD_ID = 256, 257


@dataclass
class Stage:
    """Rows of one length, and how they are made; see `Rows.batch`.

    `recall` is the distance that must be mastered, `jumps` the share of rows that jump over positions, and `layers` the
    depth of the model: it is doubled before the first stage that has twice as many.
    """

    length: int
    tokens: float
    rows: int
    repeats: float
    tasks: float
    noise: float
    recall: int | None = None
    jumps: float = 0.0
    layers: int = 6


STAGES = (
    Stage(128, 4e6, 64, 0.80, 0.00, 0.6, recall=64),
    Stage(512, 4e6, 16, 0.45, 0.15, 0.4, recall=256),
    Stage(2048, 12e6, 6, 0.20, 0.20, 0.3, recall=1024),
    Stage(8192, 3e6, 2, 0.12, 0.20, 0.2),
    Stage(16384, 1.3e6, 1, 0.10, 0.15, 0.1),
    Stage(2048, 1.0e6, 4, 0.25, 0.15, 0.2, jumps=0.5, layers=12),
    Stage(4096, 1.8e6, 2, 0.25, 0.15, 0.1, jumps=0.5, layers=12),
    Stage(8192, 1.0e6, 1, 0.35, 0.15, 0.1, jumps=0.3, layers=12),
    Stage(16384, 0.3e6, 1, 0.30, 0.10, 0.1, layers=12),
)
SHARES = {6: {"source": 0.65, "novels": 0.35}, 12: {"source": 0.5, "novels": 0.5}}  # of rows, by number of layers
MATRIX_LR, OTHER_LR, WARMUP_STEPS = 0.02, 2e-3, 60
COOLDOWN = 2e6  # bytes at the end over which the learning rate falls to zero
RECALLED = 0.8  # share of bytes that the model has to name right before longer rows begin


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    groups = {"source": read_packages(), "novels": read_novels(args.novels)}
    for name, streams in groups.items():
        print(f"{name}: {len(streams)} streams, {sum(map(len, streams)) / 1e6:.1f} MB", flush=True)
        save_stream(args.output / f"{name}.npy", streams)
    if args.threads:
        torch.set_num_threads(args.threads)
    parent_layers = None
    if args.parent:
        model = LlamaForCausalLM.from_pretrained(args.parent, dtype=torch.float32)
        parent_layers = model.config.num_hidden_layers
    else:
        model = LlamaForCausalLM(model_config())
    model, history = train(model, groups, args)
    model.to(torch.bfloat16).save_pretrained(args.output / "model")
    byte_tokenizer().save_pretrained(args.output / "model")
    record = {
        "bytes": {name: sum(map(len, streams)) for name, streams in groups.items()},
        "streams": {name: len(streams) for name, streams in groups.items()},
        "stages": [asdict(stage) for stage in STAGES],
        "seed": args.seed,
        "threads": torch.get_num_threads(),
        "parent_layers": parent_layers,
        "history": history,
    }
    (args.output / "model" / "training.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--novels", type=Path, required=True, help="folder of text files")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parent", type=Path, help="folder of a model of six layers, to begin with")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all)")
    parser.add_argument("--hours", type=float, help="stop after this much time of this run; continue later")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def model_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=258,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=STAGES[-1].length,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose first 256 ids are the bytes of UTF-8."""
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    bpe = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(END, special=True), AddedToken(PAD, special=True)])
    length = STAGES[-1].length
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END, eos_token=END, pad_token=PAD, model_max_length=length
    )


def save_stream(path: Path, streams: list[np.ndarray]) -> None:
    """Write the token ids of all streams, each followed by the end of text, unless the file is there."""
    if not path.exists():
        end = np.asarray([END_ID], np.uint16)
        np.save(path, np.concatenate([part for stream in streams for part in (stream.astype(np.uint16), end)]))


def read_packages() -> list[np.ndarray]:
    """One stream of sources per package, and one for the modules of the standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    folders = [path for root in site.getsitepackages() for path in sorted(Path(root).iterdir()) if path.is_dir()]
    folders += sorted(path for path in library.iterdir() if path.is_dir() and path.name not in SKIPPED)
    streams = [read_sources(sorted(folder.rglob("*.py")), folder.parent) for folder in folders if wanted(folder.name)]
    streams.append(read_sources(sorted(library.glob("*.py")), library))
    return [stream for stream in streams if len(stream) > 40_000]


def wanted(name: str) -> bool:
    return name not in (*HELD_OUT, *HELD_OUT_PACKAGES, *SKIPPED) and not name.endswith(("-info", "data", ".libs"))


def read_sources(paths: list[Path], root: Path) -> np.ndarray:
    """The files one after the other, each under a line with its name; tables and generated files are left out."""
    parts, total = [], 0
    for path in paths:
        inner = path.relative_to(root)
        if SKIPPED & set(inner.parts) or path.stem in HELD_OUT or not 200 < path.stat().st_size < 150_000:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if max(map(len, text.split("\n"))) > 400 or total > MOST_BYTES_OF_A_PACKAGE:
            continue
        parts.append(np.frombuffer(f"# {inner}\n{text}\n".encode(), np.uint8))
        total += len(parts[-1])
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def read_novels(folder: Path) -> list[np.ndarray]:
    streams = [np.frombuffer(path.read_bytes(), np.uint8) for path in sorted(folder.glob("*.txt"))]
    if not streams:
        raise SystemExit(f"{folder} has no *.txt: pass a folder of text files with --novels")
    return [stream for stream in streams if len(stream) > STAGES[-1].length]


def train(
    model: LlamaForCausalLM, groups: dict[str, list[np.ndarray]], args: argparse.Namespace
) -> tuple[LlamaForCausalLM, list[dict]]:
    """Train in the stages of `STAGES`, and return the model and what was measured on the way."""
    state = {"stage": 0, "stage_tokens": 0, "steps": 0, "stage_steps": 0, "tokens": 0, "seconds": 0.0}
    if args.parent:
        state["stage"] = next(i for i, stage in enumerate(STAGES) if stage.layers > model.config.num_hidden_layers)
    history: list[dict] = []
    checkpoint = args.output / "checkpoint.pt"
    saved = torch.load(checkpoint, weights_only=True) if checkpoint.exists() else None
    if saved is not None:
        state, history = saved["state"], saved["history"]
    model = with_layers(model, STAGES[min(state["stage"], len(STAGES) - 1)].layers)
    optimizers = make_optimizers(model)
    if saved is not None:
        model.load_state_dict(saved["model"])
        for optimizer, values in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        print(f"continuing after {state['tokens'] / 1e6:.2f}M bytes", flush=True)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters", flush=True)
    rows = Rows(groups, SHARES[model.config.num_hidden_layers], args.seed + state["steps"])
    began = last_saved = last_logged = time.monotonic()
    losses: list[float] = []
    while state["stage"] < len(STAGES):
        stage, started = STAGES[state["stage"]], time.process_time()
        if stage.layers > model.config.num_hidden_layers:
            model = with_layers(model, stage.layers)
            optimizers, rows.shares = make_optimizers(model), SHARES[stage.layers]
        batch = torch.from_numpy(rows.batch(stage.rows, stage.length, stage.repeats, stage.tasks, stage.noise))
        set_learning_rates(optimizers, state)
        positions = rows.positions(stage.rows, stage.length, STAGES[-1].length, stage.jumps)
        losses.append(training_step(model, optimizers, batch.long(), torch.from_numpy(positions)))
        state["seconds"] += (time.process_time() - started) / torch.get_num_threads()
        state["steps"] += 1
        state["stage_steps"] += 1
        state["tokens"] += batch.numel()
        state["stage_tokens"] += batch.numel()
        now = time.monotonic()
        ended = state["stage_tokens"] >= stage.tokens
        if now - last_logged > (90 if stage.recall else 600) or ended:
            found = {**state, "length": stage.length, "loss": sum(losses) / len(losses)}
            distance = stage.recall or stage.length // 2
            with in_bfloat16():
                nats, share = recalled(model, rows.text, distance, count=4, size=48, cue=12)
            found |= {"distance": distance, "nats": nats, "recalled": share}
            history.append(found)
            print(json.dumps({k: round(v, 3) for k, v in found.items()}), flush=True)
            losses, last_logged = [], time.monotonic()
            mastered = stage.recall is None or found["recalled"] >= RECALLED
            early = stage.recall is not None and mastered and state["stage_tokens"] >= stage.tokens / 4
            if early or (ended and (mastered or state["stage_tokens"] >= 2 * stage.tokens)):
                state |= {"stage": state["stage"] + 1, "stage_tokens": 0, "stage_steps": 0}
        timed_out = args.hours is not None and now - began > args.hours * 3600
        if now - last_saved > 180 or state["stage"] == len(STAGES) or timed_out:
            saved = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
            torch.save(saved | {"state": state, "history": history}, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
            last_saved = now
        if timed_out:
            raise SystemExit("out of time; give the command again to continue")
    return model, history


def with_layers(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """Return the model with twice its layers, if so many are asked for.

    Layer i becomes the layers 2i and 2i + 1, two copies of it whose output projections are halved. Together they add
    about as much to the residual stream as layer i did, and the loss begins close to that of the model.
    """
    if model.config.num_hidden_layers == layers:
        return model
    if layers != 2 * model.config.num_hidden_layers:
        raise SystemExit(f"a model of {model.config.num_hidden_layers} layers cannot become one of {layers}: double it")
    config = LlamaConfig(**(model.config.to_dict() | {"num_hidden_layers": layers}))
    deep = LlamaForCausalLM(config).to(model.dtype)
    deep.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    deep.model.norm.load_state_dict(model.model.norm.state_dict())
    deep.lm_head.load_state_dict(model.lm_head.state_dict())
    for number, layer in enumerate(deep.model.layers):
        layer.load_state_dict(model.model.layers[number // 2].state_dict())
        with torch.no_grad():
            layer.self_attn.o_proj.weight /= 2
            layer.mlp.down_proj.weight /= 2
    return deep


def make_optimizers(model: LlamaForCausalLM) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for all other parameters."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    return (
        torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=0.01),
        torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.95), weight_decay=0.0),
    )


def set_learning_rates(optimizers: tuple, state: dict) -> None:
    number = state["stage"]
    stage, later = STAGES[number], STAGES[number + 1 :]
    deepened = number > 0 and stage.layers > STAGES[number - 1].layers  # new optimizers
    warm = state["stage_steps"] if deepened else state["steps"]
    factor = min(1.0, (warm + 1) / WARMUP_STEPS)
    if stage.length > 512:  # rows of few and long texts: steps are noisier
        factor *= 0.5
    left = stage.tokens - state["stage_tokens"] + sum(after.tokens for after in later)
    factor *= min(1.0, max(0.0, left / COOLDOWN))
    for optimizer, rate in zip(optimizers, (MATRIX_LR, OTHER_LR), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate * factor


def in_bfloat16() -> torch.autocast:
    """Return a context for forwards in bfloat16, which does nothing where it would be emulated, and slow."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(native_bfloat16()))


def training_step(model: LlamaForCausalLM, optimizers: tuple, batch: torch.Tensor, positions: torch.Tensor) -> float:
    with in_bfloat16():
        # without a mask, transformers would read a jump as the beginning of another text
        mask = torch.ones_like(batch)
        loss = model(batch, attention_mask=mask, position_ids=positions, labels=batch, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


if __name__ == "__main__":
    main()
