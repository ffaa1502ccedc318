"""Write prompts for a chat model, and join them with its answers to conversations, the training text of its drafts.

    python recipes/smollm2/conversations.py users --output runs/smollm2-texts/users.jsonl --rows 1500
    hf-longspec generate --target runs/smollm2 --draft plain --data runs/smollm2-texts/users.jsonl \\
        --temperature 1 --max-new-tokens 64 --batch 32 --output runs/smollm2-texts/requests.jsonl
    python recipes/smollm2/conversations.py prompts --novels novels/train --output runs/smollm2-texts/prompts.jsonl \\
        --requests runs/smollm2-texts/requests.jsonl
    hf-longspec generate --target runs/smollm2 --draft plain --chat --data runs/smollm2-texts/prompts.jsonl \\
        --max-new-tokens 256 --batch 32 --output runs/smollm2-texts/answers.jsonl
    python recipes/smollm2/conversations.py join --prompts runs/smollm2-texts/prompts.jsonl \\
        --answers runs/smollm2-texts/answers.jsonl --output runs/smollm2-texts/conversations.jsonl

`users` writes the beginning of a conversation, up to where a user speaks: a chat model continues it with a request
(Magpie, https://huggingface.co/papers/2406.08464). `prompts` mixes these requests with pieces of novels and of the
sources of Python to summarise, explain, edit and answer from. The modules that benchmarks read are left out.
"""

import argparse
import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

USER = "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
SYSTEMS = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "You are a helpful assistant for questions of everyday life: travel, food, health, money and work.",
    "You are a helpful assistant that writes and improves texts.",
    "You are a helpful teacher of science, history and mathematics.",
    "You are a helpful programmer who writes Python.",
)
OF_TEXTS = (
    "Summarize: {text}",
    "{text}\n\nSummarise this passage in three sentences.",
    "Here is a passage of a novel.\n\n{text}\n\nWho appears in it, and what happens?",
    "{text}\n\nWrite this passage again in plain modern English.",
    "{text}\n\nAnswer from this passage only: where does it take place, and what does the reader learn of the people?",
    "Continue this story.\n\n{text}",
)
OF_CODE = (
    "```python\n{text}\n```\nWrite this code again, with {name} renamed to {other}.",
    "```python\n{text}\n```\nExplain what this code does.",
    "```python\n{text}\n```\nAdd a docstring and comments to this code.",
    "```python\n{text}\n```\nSummarise what this code offers in five sentences.",
    "```python\n{text}\n```\nWrite this code again with type annotations.",
)
TEXTS = (".txt", ".md", ".rst")
# `HELD_OUT` of train_tiny_target.py, whose modules are the evaluation's, and one more that benchmarks read.
HELD_OUT = {"argparse", "statistics", "tarfile", "turtle", "typing", "zipfile", "decimal", "_pydecimal", "mailbox"}
HELD_OUT |= {"inspect"}


def users(args: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yield conversations that end where a user speaks."""
    for row in range(args.rows):
        yield {"prompt": USER.format(system=SYSTEMS[row % len(SYSTEMS)])}


def prompts(args: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yield requests, pieces of novels and functions with a task, shuffled."""
    chooser = random.Random(args.seed)
    requests = {str(row["text"]).strip() for row in read(args.requests)}
    rows = [text for text in sorted(requests) if 15 < len(text) < 1500]
    paths = [path for path in sorted(args.novels.rglob("*")) if path.suffix in TEXTS or path.name == "METADATA"]
    documents = [path.read_text(encoding="utf-8", errors="ignore") for path in paths]
    documents = [document for document in documents if len(document) > 2 * args.longest]
    for _ in range(args.pieces if documents else 0):
        document = chooser.choice(documents)
        start = document.find("\n", chooser.randrange(len(document) // 20, len(document) - args.longest))
        text = document[start : start + chooser.randrange(800, args.longest)].strip()
        rows.append(chooser.choice(OF_TEXTS).format(text=text))
    functions = list(sources(args.longest))
    for text, name in chooser.sample(functions, min(args.functions, len(functions))):
        rows.append(chooser.choice(OF_CODE).format(text=text, name=f"`{name}`", other=f"`{name}_2`"))
    chooser.shuffle(rows)
    yield from ({"prompt": row} for row in rows)


def sources(longest: int) -> Iterator[tuple[str, str]]:
    """Yield functions and classes of the standard library with their names."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if path.stem in HELD_OUT:
            continue
        source = path.read_text(encoding="utf-8", errors="ignore")
        for node in ast.parse(source).body:
            text = ast.get_source_segment(source, node)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and text and 300 < len(text) < longest:
                yield text, node.name


def join(args: argparse.Namespace) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yield conversations of a request and its answer."""
    questions = [row["prompt"] for row in read(args.prompts)]
    for path in args.answers:
        for row in read(path):
            if "text" in row:
                turns = ("user", questions[row["row"]]), ("assistant", row["text"])
                yield {"messages": [{"role": role, "content": content} for role, content in turns]}


def read(path: Path) -> list[dict]:
    # not splitlines(): a text may hold U+2028 and other separators as they are
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("users", help="beginnings of conversations, up to where a user speaks")
    add.add_argument("--rows", type=int, default=1500)
    add.set_defaults(rows_of=users)
    add = commands.add_parser("prompts", help="requests, and pieces of novels and code with a task")
    add.add_argument("--requests", type=Path, required=True, help="output of `hf-longspec generate` for `users`")
    add.add_argument("--novels", type=Path, required=True, help="folder of text files, searched below, too")
    add.add_argument("--pieces", type=int, default=500, help="pieces of novels (default: %(default)s)")
    add.add_argument("--functions", type=int, default=500, help="functions and classes (default: %(default)s)")
    add.add_argument("--longest", type=int, default=2400, help="characters of a piece (default: %(default)s)")
    add.add_argument("--seed", type=int, default=0)
    add.set_defaults(rows_of=prompts)
    add = commands.add_parser("join", help="conversations of prompts and answers")
    add.add_argument("--prompts", type=Path, required=True)
    add.add_argument("--answers", type=Path, action="append", required=True, help="repeatable")
    add.set_defaults(rows_of=join)
    for command in commands.choices.values():
        command.add_argument("--output", type=Path, required=True, help="file of JSON lines")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in args.rows_of(args)]
    args.output.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines):,} rows in {args.output}")


if __name__ == "__main__":
    main()
