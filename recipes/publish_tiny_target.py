"""Evaluate the tiny target on held-out text and write its Hub folder: weights, tokenizer, numbers and a generated card.

    python recipes/publish_tiny_target.py --model runs/tiny-target/model --eval novels/eval

Everything is measured in bfloat16 where the processor has it, else in float32, on windows of held-out novels, of
standard-library modules and of packages that `train_tiny_target.py` leaves out. Every window is as long as the model's
context, so all positions are averaged over the same documents. The same bytes are read again with short contexts, and
passages are quoted after some distance. The same files give the same folder on one kind of processor.
"""

import argparse
import copy
import itertools
import json
import math
import platform
import shutil
import site
import sysconfig
from pathlib import Path

import numpy as np
import torch
import transformers
from long_context_rows import recalled
from safetensors import safe_open
from scipy import stats
from tiny_target_card import write_card
from train_tiny_target import HELD_OUT, HELD_OUT_PACKAGES, in_bfloat16, read_sources
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_longspec.generation.cache import CACHE_NAME

EDGES = (0, 512, 2048, 4096, 8192, 16384)
CHUNK = 1024
SKIPPED_ROW = 2048  # last bytes of each text that are read with half of the layers
# Bytes after this many are read again with the last `SHORT` to 2 * `SHORT` bytes only.
LONG, SHORT = 8192, 512
# Bytes from a passage to its quotation; size of the passages, and how many of their bytes are given.
DISTANCES, PASSAGE, CUE, QUOTATIONS = (1024, 4096, 8192, 15_360), 96, 16, 8
MAX_BYTES = 26_000_000  # keeps a clone of the repository small
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def main() -> None:
    args = parse_arguments()
    check_files(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    texts = held_out(args.eval)
    training = json.loads((args.model / "training.json").read_text(encoding="utf-8"))
    with in_bfloat16():
        evaluation = evaluate_all(model, texts, args.windows)
        if len({stage.get("layers") for stage in training["stages"]}) > 1:
            evaluation["half_depth"] = cost_of_half_depth(model, texts)
    publish(args.model, args.output, evaluation, write_card(model, evaluation, training))


def evaluate_all(model: PreTrainedModel, texts: dict[str, dict[str, np.ndarray]], windows: int) -> dict:
    """Return what was measured on all sources, and where."""
    context = model.config.max_position_embeddings
    return {
        "environment": {
            "dtype": "bfloat16" if torch.is_autocast_enabled("cpu") else "float32",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "context": context,
        "measured": {"long": long_from(context), "short": SHORT, "passage": PASSAGE, "cue": CUE},
        "sources": {source: evaluate(model, found, context, windows) for source, found in texts.items()},
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder written by train_tiny_target.py")
    parser.add_argument("--eval", type=Path, required=True, help="folder of held-out texts")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "hub_cards" / "tiny-target")
    parser.add_argument(
        "--windows", type=int, default=16, help="windows per kind of text, divided among its documents (default: 16)"
    )
    return parser.parse_args()


def check_files(folder: Path) -> None:
    """Exit with an error unless the folder is complete, its weights are bfloat16 and it is within the size limit."""
    needed = [*FILES, "training.json"]
    if missing := [name for name in needed if not (folder / name).is_file()]:
        raise SystemExit(f"{folder} has no {', '.join(missing)}: train with recipes/train_tiny_target.py first")
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        kinds = {str(weights.get_slice(name).get_dtype()) for name in weights.keys()}  # noqa: SIM118 - not a dict
    if kinds != {"BF16"}:
        raise SystemExit(f"{folder} holds weights in {', '.join(sorted(kinds))}, expected BF16: save it in bfloat16")
    if (size := sum((folder / name).stat().st_size for name in FILES)) >= MAX_BYTES:
        raise SystemExit(f"{folder} takes {size:,} bytes, expected less than {MAX_BYTES:,}: train a smaller model")


def held_out(novels: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return the bytes of the texts that were not trained on, by source and name."""
    library = Path(sysconfig.get_paths()["stdlib"])
    packages = [Path(root) / name for name in HELD_OUT_PACKAGES for root in site.getsitepackages()]
    modules = [library / f"{name}.py" for name in sorted(HELD_OUT)]
    return {
        "novels": {path.stem: as_bytes(path) for path in sorted(novels.glob("*.txt"))},
        "modules": {path.stem: as_bytes(path) for path in modules if path.is_file()},
        "packages": {
            path.name: read_sources(sorted(path.rglob("*.py")), path.parent) for path in packages if path.is_dir()
        },
    }


def long_from(context: int) -> int:
    """Return how many bytes stand before the first one whose context counts as long."""
    return min(LONG, context // 2)


def as_bytes(path: Path) -> np.ndarray:
    return np.frombuffer(path.read_bytes(), np.uint8)


def evaluate(model: PreTrainedModel, texts: dict[str, np.ndarray], context: int, windows: int) -> dict:
    """Return what was measured on windows of all texts that are long enough, and the names of these texts."""
    losses, short = [], []
    used = [name for name, text in texts.items() if len(text) >= context]
    for name in used:
        text = texts[name]
        # windows of one text do not overlap
        count = min(math.ceil(windows / len(used)), len(text) // context)
        for number in range(count):
            offset = (len(text) - context) * number // max(count - 1, 1)
            ids = torch.from_numpy(text[offset : offset + context].astype(np.int64))[None]
            losses.append(losses_of(model, ids))
            short.append(short_losses_of(model, ids[0]))
            print(f"{name}: {losses[-1].mean():.3f} at {offset:,}", flush=True)
    if not losses:
        raise SystemExit(f"none of {', '.join(texts) or 'the texts'} has {context:,} bytes: pass longer texts")
    found = torch.stack(losses)
    distances = [distance for distance in DISTANCES if distance + 2 * PASSAGE <= context]
    return {
        "documents": used,
        "windows": len(losses),
        "buckets": buckets(found, context),
        "gain": gain(found[:, long_from(context) - 1 :], torch.stack(short)),
        "recall": [recall(model, [texts[name] for name in used], distance) for distance in distances],
    }


@torch.no_grad()
def short_losses_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of the bytes after `LONG`, each with `SHORT` to 2 * `SHORT` - 1 bytes before it."""
    rows = ids[long_from(len(ids)) - SHORT :].unfold(0, 2 * SHORT, SHORT)
    logits = model(rows, use_cache=False).logits[:, SHORT - 1 : -1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, SHORT:].flatten(), reduction="none")


def gain(long: torch.Tensor, short: torch.Tensor) -> dict[str, float]:
    """Return the mean loss with long and with short contexts, and their difference with a 95 % interval."""
    long = long[:, : short.shape[1]]
    difference = (short - long).double().mean(1)
    return {
        "long": round(long.mean().item(), 4),
        "short": round(short.mean().item(), 4),
        "gain": round(difference.mean().item(), 4),
        "half_width": half_width(difference),
    }


def half_width(means: torch.Tensor) -> float | None:
    """Return half the width of Student's 95 % interval of a mean over windows; `None` for fewer than three."""
    if len(means) < 3:
        return None
    return round(float(stats.t.ppf(0.975, len(means) - 1) * stats.sem(means.numpy())), 4)


def cost_of_half_depth(model: PreTrainedModel, sources: dict[str, dict[str, np.ndarray]]) -> dict[str, float | None]:
    """Return by how many nats per byte the loss grows if each pair of layers becomes one again.

    The second layer of each pair is left out, and the first adds twice as much, which undoes the doubling.
    """
    rows = []
    for texts in sources.values():
        rows += [torch.from_numpy(text[-SKIPPED_ROW:].astype(np.int64))[None] for text in texts.values()]
    rows = [row for row in rows if row.shape[1] == SKIPPED_ROW]
    whole = torch.stack([losses_of(model, row).mean() for row in rows])
    shallow = copy.deepcopy(model)
    shallow.model.layers = shallow.model.layers[::2]
    for layer in shallow.model.layers:
        layer.self_attn.o_proj.weight.data *= 2
        layer.mlp.down_proj.weight.data *= 2
    difference = torch.stack([losses_of(shallow, row, cached=False).mean() for row in rows]) - whole
    return {"nats": round(difference.mean().item(), 4), "half_width": half_width(difference), "rows": len(rows)}


def recall(model: PreTrainedModel, texts: list[np.ndarray], distance: int) -> dict[str, float]:
    """Return how well passages of the texts, in turn, are recalled after `distance` bytes; see [`recalled`]."""
    chosen, turns = np.random.default_rng(0), itertools.cycle(texts)

    def piece(length: int) -> np.ndarray:
        text = next(turns)
        start = int(chosen.integers(0, len(text) - length + 1))
        return np.array(text[start : start + length])

    nats, right = recalled(model, piece, distance, QUOTATIONS, PASSAGE, CUE)
    return {"distance": distance, "nats": round(nats, 3), "right": round(right, 3)}


@torch.no_grad()
def losses_of(model: PreTrainedModel, ids: torch.Tensor, cached: bool = True) -> torch.Tensor:
    """Return the loss of every token but the first, `(length - 1,)`, in chunks to keep the logits small.

    Without `cached`, the row runs at once.
    """
    if not cached:
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:], reduction="none")
    cache, losses = DynamicCache(config=model.config), []
    for begin in range(0, ids.shape[1] - 1, CHUNK):
        inputs, labels = ids[:, begin : begin + CHUNK], ids[0, begin + 1 : begin + CHUNK + 1]
        logits = model(input_ids=inputs, **{CACHE_NAME: cache}, use_cache=True).logits[0, : len(labels)]
        losses.append(torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none"))
    return torch.cat(losses)


def buckets(losses: torch.Tensor, context: int) -> list[dict]:
    """Return means over windows and positions with 95 % intervals over windows; column i has i + 1 earlier tokens."""
    found = []
    for low, high in itertools.pairwise(sorted({min(edge, context) for edge in EDGES})):
        means = losses[:, max(low - 1, 0) : high - 1].double().mean(1)
        loss = round(means.mean().item(), 4)
        found.append({"from": low, "to": high, "loss": loss, "half_width": half_width(means)})
    return found


def publish(model: Path, output: Path, evaluation: dict, card: str) -> None:
    output.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(model / name, output / name)
    (output / "evaluation.json").write_text(json.dumps(evaluation, indent=1) + "\n", encoding="utf-8")
    (output / "README.md").write_text(card, encoding="utf-8")
    size = sum(path.stat().st_size for path in output.iterdir())
    print(f"{output}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
