"""Figures of the architecture: how many rooms a value walks through, and where special cases are mentioned.

    python -m tests.house            a table
    python -m tests.house --list     with the files of every figure

A *room* is a file of the package. An iteration is that of a draft on a tiny model of two layers, from `propose` to the
end of `observe`; the *hall* is what runs before the first forward of a second call with the same model and draft. Calls
are those of functions of this package. Lines are lines of code: neither blank, nor comment, nor docstring.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_longspec
from hf_longspec import LongSpecDraftModel, MtpDraftModel
from hf_longspec.generation import decoding
from hf_longspec.modeling import base

ROOT = Path(hf_longspec.__file__).parent
GENERATION = "generation"
FIXTURE = Path(__file__).parent / "modeling/mtp/fixtures/qwen3_5"
# Names by which code mentions a special case, and the files that are its own. Docstrings and comments do not count.
CASES = {
    "recurrent states": (
        r"has_states|[Rr]ecurrent|[Rr]ecurrence|StateLayer|STATE_LAYERS|StagedNodes|limits_steps|HybridLayer"
        r"|ignores_earlier_states|has_previous_state",
        ("recurren", "fixed_states", "fused"),
    ),
    "verification by masks": (
        r"MASKED|[Mm]askedMode|masked_logits|IndexedLayer|[Ii]ndexer|INDEXED|choices_of|PlainForwards|\.plain\b"
        r"|CHUNKED|takes_contexts|takes_unreached",
        ("masked", "stock_forwards"),
    ),
    "images": (
        r"rows\.offsets|self\.offsets|prompts\.offsets|TOKEN_TYPES|mm_\w+|rope_deltas|\.axes\b|text_sizes|inputs_beside"
        r"|names_of\(|IMAGES|call\.inputs|takes_inputs",
        ("images",),
    ),
    "rotary limit": (r"rotary_limit|changes_of|FrequencyChange|ROTARY_LIMIT", ("rotary_limit",)),
    "caches of the user": (
        r"is_own\(|take_over|bring_up_to_date|held_by|why_not_stored|refuse_cache|UserCache|USER_CACHE|is_users"
        r"|_is_user_defined|\badopt\b|give_back",
        ("user_caches",),
    ),
    "tensor parallelism": (r"\bself\.ranks|target\.ranks|_ranks\b|Ranks|TENSOR_PARALLELISM|_tp_size", ("parallel",)),
    "captured steps": (
        r"runner|captur(es|ed)\b|replay|in_graph|of_graph|fits_graphs|of_step|workspace|fixed_shape|reuse_graph",
        ("/compiled/", "triton/"),
    ),
}
# Special cases are counted where models run; parts about commands, training and pages use the words for other things.
COUNTED = ("generation/", "modeling/", "attention_backends/")


@cache
def code_lines(path: Path) -> list[str]:
    """Return the lines of code of a file."""
    text = path.read_text(encoding="utf-8")
    numbers = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            numbers.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                numbers -= set(range(value.lineno, value.end_lineno + 1))
    lines = text.splitlines()
    return [lines[number - 1].split("  # ")[0] for number in sorted(numbers)]


def files() -> Iterator[tuple[str, Path]]:
    """Yield the files of the package, with their paths below it."""
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path


def core_files() -> list[str]:
    """Return the files of the core: those directly in its folder."""
    return [name for name, _ in files() if re.fullmatch(rf"{GENERATION}/\w+\.py", name) and "__init__" not in name]


def mentions(pattern: str, own: tuple[str, ...]) -> Counter[str]:
    """Return how many lines of code mention a special case, by file, outside of the files that are its own."""
    found: Counter[str] = Counter()
    for name, path in files():
        if name.startswith(COUNTED) and not any(part in f"/{name}" for part in own):
            found[name] = sum(bool(re.search(pattern, line)) for line in code_lines(path))
    return +found


class Walk:
    """Files, functions and calls of this package that run while it is open."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)) and not code.co_name.startswith("<"):
            self.calls[code.co_filename[len(str(ROOT)) + 1 :], code.co_qualname] += 1

    def __enter__(self) -> "Walk":
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    @property
    def rooms(self) -> list[str]:
        return sorted({file for file, _ in self.calls})

    def row(self) -> str:
        return f"{len(self.rooms)} files, {len(self.calls)} functions, {sum(self.calls.values())} calls"


class _ForwardError(Exception):
    """The first forward of the target has begun."""


def plain_target() -> Any:
    """Return a tiny Llama of two layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def hybrid_target() -> Any:
    """Return a tiny Qwen3.5 with layers of the gated delta rule, and an MTP head in its checkpoint."""
    return AutoModelForCausalLM.from_pretrained(FIXTURE).eval()


def call(model: Any, draft: Any) -> None:
    """Decode greedily with a draft."""
    ids = torch.arange(3, 40)[None]
    model.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, max_new_tokens=24, do_sample=False)


def iteration(model: Any, draft: Any) -> Walk:
    """Return the walk of the fifth iteration of a second call without the gate."""
    draft.generation_config.gate = False
    call(model, draft)
    walk, count, iterate = Walk(), 0, decoding.Session.iterate

    def walked(session: Any) -> None:
        nonlocal count
        count += 1
        if count == 5:
            with walk:
                iterate(session)
        else:
            iterate(session)

    decoding.Session.iterate = walked
    try:
        call(model, draft)
    finally:
        decoding.Session.iterate = iterate
    assert count >= 5, f"{count} iterations, expected at least 5"
    return walk


def hall(model: Any, draft: Any) -> Walk:
    """Return the walk of a second call without the gate, from `decode` to the first forward of the target."""
    draft.generation_config.gate = False
    call(model, draft)
    walk, decode, embedding = Walk(), base.decode, functional.embedding

    def walked(*args: Any, **kwargs: Any) -> Any:
        with walk:
            return decode(*args, **kwargs)

    def stop(*_: Any, **__: Any) -> None:
        raise _ForwardError

    base.decode, functional.embedding = walked, stop  # a hook, or another forward, would be a special case of its own
    try:
        call(model, draft)
    except _ForwardError:
        pass
    finally:
        base.decode, functional.embedding = decode, embedding
    return walk


def main(arguments: list[str]) -> None:
    """Print the table."""
    wants_files = "--list" in arguments
    table = Table("figure", "value", show_lines=wants_files)
    rows: list[tuple[str, str, list[str]]] = []
    llama, hybrid = plain_target(), hybrid_target()
    longspec = LongSpecDraftModel.from_target(llama, intermediate_size=64)
    walks = {"iteration, LongSpec": iteration(llama, longspec), "hall, LongSpec": hall(llama, longspec)}
    walks["iteration, MTP on a hybrid target"] = iteration(hybrid, MtpDraftModel.from_target(hybrid))
    rows += [(name, walk.row(), walk.rooms) for name, walk in walks.items()]
    sizes = {name: len(code_lines(path)) for name, path in files()}
    core = core_files()
    rows.append(
        (
            "core",
            f"{sum(sizes[name] for name in core)} lines of code in {len(core)} files",
            [f"{name} {sizes[name]}" for name in core],
        )
    )
    for case, (pattern, own) in CASES.items():
        found = mentions(pattern, own)
        rows.append(
            (
                f"{case}, elsewhere",
                f"{sum(found.values())} lines in {len(found)} files",
                [f"{name} {count}" for name, count in found.most_common()],
            )
        )
    total = sum(len(path.read_text(encoding="utf-8").splitlines()) for _, path in files())
    rows.append(("package", f"{total} lines, {sum(sizes.values())} of code, in {len(sizes)} files", []))
    for name, value, places in rows:
        table.add_row(name, "\n".join([value, *places]) if wants_files else value)
    Console(width=120).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
