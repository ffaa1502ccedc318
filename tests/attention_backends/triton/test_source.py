"""Rules for the source of Triton kernels, read with `ast`: what a tolerant interpreter would let pass."""

import ast
from pathlib import Path

import pytest

from hf_longspec.attention_backends.triton import commit, kernels, layers

FILES = [Path(module.__file__) for module in (kernels, commit, layers)]
ACCESSES = ("tl.load", "tl.store")
# Not in triton 3.9 any more.
REMOVED = ("tl.make_block_ptr", "tl.advance")
# An access of one number at an address that exists for every program: the line says so.
REASON = "# unmasked: "


def is_kernel(function):
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def violations(source):
    """Memory accesses without a mask, and names that a supported version lacks, in the kernels of a file."""
    lines, found = source.splitlines(), []
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and is_kernel(node)]
    for function in functions:
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            if name in REMOVED:
                found.append(f"{call.lineno}: {name} is gone in triton 3.9")
            if not (name in ACCESSES or name.startswith("tl.atomic_")):
                continue
            mask = [keyword for keyword in call.keywords if keyword.arg == "mask"]
            excused = REASON in lines[call.end_lineno - 1]
            if not excused and (not mask or ast.unparse(mask[0].value) in ("None", "True")):
                found.append(f"{call.lineno}: {name} without a mask")
            if name == "tl.load" and mask and not any(keyword.arg == "other" for keyword in call.keywords):
                found.append(f"{call.lineno}: what tl.load yields where the mask is False is undefined without other=")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_access_is_masked(file):
    assert violations(file.read_text(encoding="utf-8")) == []
