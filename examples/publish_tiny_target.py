"""Evaluate the tiny target on held-out text and write its Hub folder: weights, tokenizer, numbers and a generated card.

    python examples/publish_tiny_target.py --model runs/tiny-target/model --eval novels/eval

The loss is measured in float32, by the number of tokens before the predicted one, on windows of held-out novels and of
standard-library modules that `train_tiny_target.py` leaves out. Every window is as long as the model's context, so all
positions are averaged over the same documents. The same files give the same folder.
"""

import argparse
import itertools
import json
import platform
import shutil
import sysconfig
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from tiny_target_card import write_card
from train_tiny_target import HELD_OUT
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

EDGES = (0, 512, 2048, 4096, 8192, 16384)
CHUNK = 1024
MAX_BYTES = 12_000_000  # keeps a clone of the repository small
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def main() -> None:
    args = parse_arguments()
    check_files(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    context = model.config.max_position_embeddings
    modules = Path(sysconfig.get_paths()["stdlib"])
    texts = {
        "novels": {path.stem: path for path in sorted(args.eval.glob("*.txt"))},
        "standard-library modules": {name: modules / f"{name}.py" for name in sorted(HELD_OUT)},
    }
    evaluation = {
        "environment": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "context": context,
        "sources": {
            source: evaluate(model, tokenizer, files, context, args.windows) for source, files in texts.items()
        },
    }
    training = json.loads((args.model / "training.json").read_text(encoding="utf-8"))
    publish(args.model, args.output, evaluation, write_card(model, evaluation, training))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder written by train_tiny_target.py")
    parser.add_argument("--eval", type=Path, required=True, help="folder of held-out texts")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "hub_cards" / "tiny-target")
    parser.add_argument("--windows", type=int, default=2, help="windows per document, evenly spaced")
    return parser.parse_args()


def check_files(folder: Path) -> None:
    """Exit with an error unless the folder is complete, its weights are bfloat16 and it is within the size limit."""
    needed = [*FILES, "training.json"]
    if missing := [name for name in needed if not (folder / name).is_file()]:
        raise SystemExit(f"{folder} has no {', '.join(missing)}: train with examples/train_tiny_target.py first")
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        kinds = {str(weights.get_slice(name).get_dtype()) for name in weights.keys()}  # noqa: SIM118 - not a dict
    if kinds != {"BF16"}:
        raise SystemExit(f"{folder} holds weights in {', '.join(sorted(kinds))}, expected BF16: save it in bfloat16")
    if (size := sum((folder / name).stat().st_size for name in FILES)) >= MAX_BYTES:
        raise SystemExit(f"{folder} takes {size:,} bytes, expected less than {MAX_BYTES:,}: train a smaller model")


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, files: dict[str, Path], context: int, windows: int
) -> dict:
    """Return the mean loss per bucket of context over windows of all files that are long enough, and these files."""
    losses, used = [], []
    for name, path in files.items():
        ids = tokenizer(path.read_text(encoding="utf-8", errors="ignore"), verbose=False)["input_ids"]
        if len(ids) < context:
            continue
        used.append(name)
        count = min(windows, max(1, len(ids) // context))  # windows of one document do not overlap
        for number in range(count):
            offset = (len(ids) - context) * number // max(count - 1, 1)
            losses.append(losses_of(model, torch.tensor([ids[offset : offset + context]])))
            print(f"{name}: {losses[-1].mean():.3f} at {offset:,}", flush=True)
    if not losses:
        raise SystemExit(f"none of {', '.join(files) or 'the texts'} has {context:,} tokens: pass longer texts")
    return {"documents": used, "windows": len(losses), "buckets": buckets(torch.stack(losses), context)}


@torch.no_grad()
def losses_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of every token but the first, `(length - 1,)`, in chunks to keep the logits small."""
    cache, losses = DynamicCache(config=model.config), []
    for begin in range(0, ids.shape[1] - 1, CHUNK):
        inputs, labels = ids[:, begin : begin + CHUNK], ids[0, begin + 1 : begin + CHUNK + 1]
        logits = model(input_ids=inputs, past_key_values=cache, use_cache=True).logits[0, : len(labels)]
        losses.append(torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none"))
    return torch.cat(losses)


def buckets(losses: torch.Tensor, context: int) -> list[dict]:
    """Return means over windows and positions with 95 % intervals over windows; column i has i + 1 earlier tokens."""
    found = []
    for low, high in itertools.pairwise(sorted({min(edge, context) for edge in EDGES})):
        means = losses[:, max(low - 1, 0) : high - 1].double().mean(1)
        half = 1.96 * means.std().item() / len(means) ** 0.5 if len(means) > 1 else None
        found.append({"from": low, "to": high, "loss": round(means.mean().item(), 4)})
        found[-1]["half_width"] = None if half is None else round(half, 4)
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
