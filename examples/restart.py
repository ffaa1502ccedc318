"""Continue a conversation after a restart: its text and its cache lie in files, and only new tokens are read.

python examples/restart.py --target Qwen/Qwen3-0.6B --folder chat "My name is Ada."
python examples/restart.py --target Qwen/Qwen3-0.6B --folder chat "What is my name?"
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import hf_longspec


def main() -> int:
    """Print the answer, and how many tokens of the prompt were not read again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("message", help="text of this turn")
    parser.add_argument("--target", default="Qwen/Qwen3-0.6B", help="Hub id or folder of the model")
    parser.add_argument("--folder", type=Path, required=True, help="where the conversation is kept")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of an answer, default: 64")
    args = parser.parse_args()
    logging.set_verbosity_error()
    args.folder.mkdir(exist_ok=True)
    of_tokens, of_cache = args.folder / "tokens.json", args.folder / "cache.safetensors"
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto")
    draft = hf_longspec.NgramDraftModel.from_target(model)

    prefixes, text = hf_longspec.PrefixCache(model, max_bytes=2**33), torch.zeros(1, 0, dtype=torch.long)
    if of_cache.exists():
        text = torch.tensor([json.loads(of_tokens.read_text(encoding="utf-8"))])
        prefixes.put(text, hf_longspec.SpeculativeCache.load(of_cache, model.config))
    said = f"\nUser: {args.message}\nAssistant:"
    said = tokenizer(said, return_tensors="pt", add_special_tokens=not text.numel()).input_ids
    prompt = torch.cat([text, said], 1)
    print(f"{prefixes.find(prompt)} of {prompt.shape[1]} tokens are not read again.")
    out = prefixes.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=draft,
        max_new_tokens=args.tokens,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )
    print(tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True))
    of_tokens.write_text(json.dumps(out[0].tolist()), encoding="utf-8")
    prefixes.take(out).save(of_cache)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
