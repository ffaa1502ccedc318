"""Speed and tau of drafts under a JSON schema, over plain `generate` with the same processor.

Every text is written by all systems in turns, in one process, and must be the same. Times are CPU times of the process,
so that other programs may run at the same time; only their ratios are reported.

    python -m benchmarks.structured_output --threads 1
"""

import time
from typing import Any

import torch
from transformers import AutoTokenizer

import hf_longspec
from benchmarks import harness
from benchmarks.report import mean_interval
from hf_longspec.cli.measuring import rotated

QUESTION = "\n\nThe same as JSON: "


def an_object(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties and no others."""
    required = {"required": [*properties], "additionalProperties": False}
    return {"type": "object", "properties": properties, **required}


NAME = {"type": "string", "minLength": 2, "maxLength": 8}
SCHEMAS = {
    "nested": an_object(
        author=an_object(name=NAME, is_living={"type": "boolean"}),
        language={"enum": ["English", "Python", "other"]},
        quality={"type": "integer", "minimum": 1, "maximum": 10},
    ),
    "array with bounds": {"type": "array", "items": NAME, "minItems": 2, "maxItems": 4},
    "enums": an_object(kind={"enum": ["novel", "essay", "module"]}, tone={"enum": ["formal", "plain", "funny"]}),
}
# Drafts with their settings. Without forced tokens, candidates still are those that the grammar allows.
PLAIN = "plain `generate`"
SYSTEMS: dict[str, tuple[str | None, dict[str, Any]]] = {
    PLAIN: (None, {}),
    "forced tokens": ("grammar", {}),
    "n-grams": ("ngram", {"forced_tokens": 0}),
    "n-grams, forced tokens": ("ngram", {}),
    "LongSpec": ("longspec", {"forced_tokens": 0}),
    "LongSpec, forced tokens": ("longspec", {}),
}


def draft_of(name: str | None, model: Any, settings: dict[str, Any]) -> Any:
    """Return a draft of the bundled target that speculates in every step."""
    if name == "longspec":
        folder = harness.HUB_CARDS / "tiny-longspec"
        return hf_longspec.LongSpecDraftModel.from_pretrained(folder, target=model, gate=False, **settings)
    classes = {"grammar": hf_longspec.GrammarDraftModel, "ngram": hf_longspec.NgramDraftModel}
    return None if name is None else classes[name].from_target(model, gate=False, **settings)


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__, "structured_output", minutes=60, prompts=True)
    parser.add_argument("--length", type=int, default=96, help="tokens of a text (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=24, help="texts for each schema (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=160, help="most new tokens (default: %(default)s)")
    args = parser.parse_args(arguments)
    model, tokenizer = harness.load_target(args.target, torch.float32), AutoTokenizer.from_pretrained(args.target)
    windows, origin = harness.load_prompts(args.target, args.data, args.length, args.prompts)
    drafts = {name: draft_of(kind, model, settings) for name, (kind, settings) in SYSTEMS.items()}
    with harness.start(args, "structured_output", {"tokens": args.tokens, **origin}) as results:
        structures = {
            schema: hf_longspec.StructuredOutput(tokenizer, json_schema=one) for schema, one in SCHEMAS.items()
        }
        measured: dict[tuple[str, str], list[dict[str, float]]] = {}
        planned = results.in_time([*enumerate(windows)], lambda item: {"text": item[0] + 1})
        for turn, window in planned:
            inputs = tokenizer(tokenizer.decode(window) + QUESTION, return_tensors="pt", return_token_type_ids=False)
            for schema, structure in structures.items():
                texts = {}
                for name in rotated([*SYSTEMS], turn):
                    options = {"max_new_tokens": args.tokens, "do_sample": False, "assistant_model": drafts[name]}
                    options |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
                    started = time.process_time()
                    out = model.generate(**inputs, logits_processor=[structure], **options)
                    found = {"seconds": time.process_time() - started}
                    texts[name] = out[0, inputs["input_ids"].shape[1] :].tolist()
                    if (stats := drafts[name] and drafts[name].last_speculation) is not None:
                        found["tau"] = (len(texts[name]) - 1) / stats.num_forwards
                        found["share"] = stats.processor_seconds / stats.decode_seconds
                    measured.setdefault((schema, name), []).append(found)
                if any(text != texts[PLAIN] for text in texts.values()):
                    raise RuntimeError(f"{schema}, text {turn + 1}: the texts of two systems differ")
            results.say(f"text {turn + 1} of {len(windows)}")
        for (schema, name), texts_of in measured.items():
            of_plain = [one["seconds"] for one in measured[schema, PLAIN]]
            speeds = [base / one["seconds"] for base, one in zip(of_plain, texts_of, strict=True)]
            rest = {
                key: mean_interval([one[key] for one in texts_of]) for key in ("tau", "share") if key in texts_of[0]
            }
            results.write(
                "structured_output", schema=schema, system=name, texts=len(speeds), speed=mean_interval(speeds), **rest
            )


if __name__ == "__main__":
    main()
