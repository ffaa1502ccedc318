"""The core knows no rare case: it imports no wing, and runs without any of them."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hf_longspec
from tests.house import core_files

ROOT = Path(hf_longspec.__file__).parent
TESTS = Path(__file__).parents[1]
# Files of a wing, the words by which tests name it, and what a call of its kind says without it.
WINGS = {
    "rotary_limit": (r"rotary|longrope|dynamic|phi", "rotary frequencies that change"),
    "images": (r"image|multimodal|vision|token_type|mrope|audio|pixel", "inputs beside the tokens"),
    "user_caches": (r"past_key_values|CACHE_NAME|DynamicCache|SpeculativeCache|user_cache|turn", "with tokens"),
    "masked": (r"[Mm]ask|indexer|llama4|falcon", "AttentionInterface"),
    "recurrent_states": (r"recurren|states|hybrid|mamba|bamba|qwen3_5|gdn", "layers"),
    "padding": (r"gap|zeros between", "zeros between tokens"),
    "processors": (r"processor", "logits processors"),
    "grammar": (r"grammar|[Ss]tructure", "a grammar"),
    "gate": (r"gate", ""),
    "parallel": (r"parallel|ranks", "tensor parallelism"),
}
# Wings that others build on: the trial of layers, what is known of hooks and of the forwards of plain `generate`, and
# recurrences.
SHARED = {"trial", "hooks", "plain_forwards", "recurrences", "fixed_states"}
IN_CI = ("rotary_limit", "images", "user_caches")


def imports(path):
    """Modules that a file imports from this package, as paths below `generation`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield path.parents[node.level - 1].joinpath(*(node.module or "").split(".")).relative_to(ROOT).as_posix()


def test_no_file_of_the_core_imports_a_wing():
    core = core_files()
    assert len(core) > 10
    found = [(name, module) for name in core for module in imports(ROOT / name) if "generation/wings" in module]
    assert not found


def test_wings_build_on_the_core_and_on_shared_ones_alone():
    for path in (ROOT / "generation/wings").glob("*.py"):
        wings = {module.rpartition("/")[2] for module in imports(path) if module.startswith("generation/wings/")}
        assert path.stem in ("register", "__init__") or wings <= SHARED, path


def copy_without(wing, folder):
    """Make a copy of the package and its tests that lacks a wing."""
    shutil.copytree(ROOT, folder / "hf_longspec", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / f"hf_longspec/generation/wings/{wing}.py").unlink()
    shutil.copytree(TESTS, folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "hub_cards", "benchmarks", "LICENSE"):
        (folder / name).symlink_to(TESTS.parent / name)
    return folder


def run_pytest(folders, *arguments):
    """Run pytest in each of some copies, in forks of a process that has imported torch; return the output."""
    script = "import sys; from tests.mutants import run_in_folders; run_in_folders(sys.argv[1].split(), *sys.argv[2:])"
    options = "-q", "-x", "-n", "0", "-p", "no:cacheprovider"
    command = [sys.executable, "-c", script, " ".join(map(str, folders)), *options, *arguments]
    environment = os.environ | {"PYTHONPATH": str(folders[0])}
    done = subprocess.run(command, cwd=folders[0], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.soak
@pytest.mark.parametrize("wing", WINGS)
def test_all_tests_that_do_not_name_a_wing_pass_without_it(wing, tmp_path):
    words, _ = WINGS[wing]
    paths = [
        path for folder in ("generation", "modeling", "robustness") for path in (TESTS / folder).rglob("test_*.py")
    ]
    files = [path.relative_to(TESTS) for path in paths if not re.search(words, path.read_text(encoding="utf-8"))]
    assert files
    selection = " and ".join(f"not {word}" for word in re.findall(r"\w{4,}", words))
    output = run_pytest([copy_without(wing, tmp_path)], "-k", selection, *(f"tests/{file}" for file in files))
    assert re.search(r"[1-9]\d* passed", output)


CALLS = """
import pytest
import torch
from transformers import DynamicCache
from hf_longspec import PlainDraftModel
from hf_longspec.generation.cache import CACHE_NAME
from tests.tiny_targets import tiny_prompts, tiny_target

def test_a_call_is_refused():
    wing, reason = {wing!r}, {reason!r}
    scaling = {{"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
    model = tiny_target("llama", **({{"rope_parameters": scaling}} if wing == "rotary_limit" else {{}}))
    ids = tiny_prompts(model.config.vocab_size, (9,))[0]
    more = {{"images": {{"position_ids": torch.arange(9).expand(3, 1, -1)}}}}
    more |= {{"user_caches": {{CACHE_NAME: DynamicCache()}}}}
    draft = PlainDraftModel.from_target(model)
    draft.generation_config.on_unsupported = "error"
    call = {{"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **more.get(wing, {{}})}}
    with pytest.raises(ValueError, match=f"{{reason}}.*not in this copy"):
        model.generate(ids, **call, assistant_model=draft)
"""


def test_texts_without_a_wing_and_a_call_that_needs_it_and_is_refused_by_name(tmp_path):
    folders = [copy_without(wing, tmp_path / wing) for wing in IN_CI]
    for wing, folder in zip(IN_CI, folders, strict=True):
        (folder / "tests/test_refused.py").write_text(CALLS.format(wing=wing, reason=WINGS[wing][1]))
    selection = "(every_kind_of_attention and (llama or gemma3)) or length_limit or is_refused"
    output = run_pytest(folders, "-k", selection, "tests/generation/test_decoding.py", "tests/test_refused.py")
    assert len(re.findall(r"[2-9]\d* passed|1\d+ passed", output)) == len(IN_CI)
