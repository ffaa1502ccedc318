"""tau of n-grams over ten rounds of an editing task: those of one call, and those that remember earlier calls.

In each round one more name of a file is changed, and the target is given the file and the beginning of the next copy of
it. With a memory, a round also searches what the earlier rounds of the same file generated. Every text is compared with
that of the other draft. Nothing is timed, so other programs may run at the same time.

    python -m benchmarks.editing --threads 1
"""

import re
from collections import Counter
from collections.abc import Iterator

import torch
from transformers import AutoTokenizer

import hf_longspec
from benchmarks import harness
from benchmarks.report import mean_interval

QUESTION = "\n\n# The same file after the change:\n"
GIVEN = 48  # characters of the next copy in the prompt
MEMORY = {"one call": 0, "memory": 2**17}


def rounds_of(text: str, count: int) -> Iterator[str]:
    """Yield the prompts of an editing task. Round k renames the k-th most frequent name of five letters or more."""
    for name, _ in Counter(re.findall(r"[A-Za-z_]{5,}", text)).most_common(count):
        text = re.sub(rf"\b{name}\b", f"{name}_{len(name)}", text)
        yield text + QUESTION + text[:GIVEN]


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__, "editing", minutes=30, prompts=True)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a file (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=8, help="files (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=192, help="per round (default: %(default)s)")
    args = parser.parse_args(arguments)
    model, tokenizer = harness.load_target(args.target, torch.float32), AutoTokenizer.from_pretrained(args.target)
    windows, origin = harness.load_prompts(args.target, args.data, args.length, args.prompts)
    taus = {name: torch.zeros(len(windows), args.rounds) for name in MEMORY}
    with harness.start(args, "editing", {"tokens": args.tokens, "rounds": args.rounds, **origin}) as results:
        for file, window in enumerate(windows):
            drafts = {
                name: hf_longspec.NgramDraftModel.from_target(model, gate=False, ngram_memory=size)
                for name, size in MEMORY.items()
            }
            for turn, prompt in enumerate(rounds_of(tokenizer.decode(window), args.rounds)):
                inputs, texts = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False), []
                options = {"max_new_tokens": args.tokens, "do_sample": False}
                for name, draft in drafts.items():
                    texts.append(model.generate(**inputs, assistant_model=draft, **options))
                    taus[name][file, turn] = draft.last_speculation.mean_acceptance_length
                if not all(torch.equal(text, texts[0]) for text in texts):
                    raise RuntimeError(f"file {file + 1}, round {turn + 1}: the texts of two drafts differ")
            results.say(f"file {file + 1} of {len(windows)}")
        for name, tau in taus.items():
            later, base = (rows[:, 1:].mean(1) for rows in (tau, taus["one call"]))
            parts = {"first": tau[:, 0], "later": later, "last": tau[:, -1]}
            means = {part: mean_interval(values.tolist(), least=1) for part, values in parts.items()}
            results.write("editing", memory=name, **means, gain=mean_interval((later / base).tolist()))


if __name__ == "__main__":
    main()
