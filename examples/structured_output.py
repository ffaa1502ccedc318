"""Write JSON that follows a schema, with and without a draft: the texts are the same, with fewer forwards.

It runs on a CPU in a minute, on the tiny target of the repository, whose tokens are bytes:

    pip install "hf_longspec[grammar]"
    python examples/structured_output.py
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longspec import GrammarDraftModel, NgramDraftModel, StructuredOutput

TARGET = Path(__file__).parents[1] / "hub_cards" / "tiny-target"
SCHEMA = {
    "type": "object",
    "properties": {
        "author": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}, "is_living": {"type": "boolean"}},
            "required": ["name", "is_living"],
            "additionalProperties": False,
        },
        "language": {"enum": ["English", "Python", "other"]},
    },
    "required": ["author", "language"],
    "additionalProperties": False,
}


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    inputs = tokenizer("def area(width, height): ...\n\nAs JSON: ", return_tensors="pt")
    structure = StructuredOutput(tokenizer, json_schema=SCHEMA)
    options = {"logits_processor": [structure], "max_new_tokens": 160, "do_sample": False}
    start = inputs["input_ids"].shape[1]
    plain = model.generate(**inputs, **options)[0, start:]
    print(json.loads(tokenizer.decode(plain, skip_special_tokens=True)))
    print(f"plain generate: {len(plain)} forwards")
    for kind in (GrammarDraftModel, NgramDraftModel):
        draft = kind.from_target(model)
        text = model.generate(**inputs, **options, assistant_model=draft)[0, start:]
        assert torch.equal(text, plain)
        print(f"{kind.__name__}: {draft.last_speculation.num_forwards + 1} forwards")


if __name__ == "__main__":
    main()
