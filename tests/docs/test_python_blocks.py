"""Every block of Python in the documentation runs in order, on the tiny models under the ids of the Hub, offline."""

import re
import shutil
from itertools import pairwise

import huggingface_hub.constants as hub_constants
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_longspec
from hf_longspec.generation.decoding import decode
from hf_longspec.generation.special_cases import gate
from hf_longspec.generation.target import TargetView
from hf_longspec.modeling import base, register_draft
from tests.docs.blocks import PAGES, PROJECT, blocks_of, lasting

HUB = {"Qwen/Qwen3-0.6B": "tiny-target", "Qwen/Qwen3-8B": "tiny-target", "org/model": "tiny-target"}
HUB |= {"HuggingFaceTB/SmolLM2-135M-Instruct": "tiny-target"}
HUB |= {"org/longspec-draft": "tiny-longspec", "org/tokenswift-heads": "tiny-tokenswift"}
SIZES = [
    (re.compile(r"(max_new_tokens\"?(?:=|: ))[\d_]+"), r"\g<1>8"),
    (re.compile(r"(max_length=)[\d_]+"), r"\g<1>100"),
    (re.compile(r"(open\(\"LICENSE\"\)\.read\(\))"), r"\g<1>[:600]"),
]
DRAFTED = re.compile(r"assistant_model=|custom_generate=|\bbind\(")  # what our loop is called by
# Pages whose first block says where `target`, `inputs` and the rest come from. On others they are as in the quick tour.
COMPLETE = ("README.md", "docs/quicktour.md")
# Run by a test of their own, with what they need.
RUN_BY = {"docs/training.md": "tests/training/test_documentation.py"}


def runnable(page):
    return [block for block in blocks_of(page) if block.language == "python" and block.reason is None]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub cache with the bundled repositories under the ids that the documentation uses."""
    cache = tmp_path_factory.mktemp("hub")
    for number, (name, folder) in enumerate(HUB.items()):
        repo, commit = cache / f"models--{name.replace('/', '--')}", f"{number:040x}"
        (repo / "snapshots").mkdir(parents=True)
        (repo / "snapshots" / commit).symlink_to(PROJECT / "hub_cards" / folder)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(commit)
    return cache


@pytest.fixture
def checkout(hub, tmp_path, monkeypatch):
    """The root of something like a checkout, offline."""
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(register_draft, "DRAFTS", dict(register_draft.DRAFTS))  # a page may register one
    monkeypatch.chdir(tmp_path)
    shutil.copytree(PROJECT / "hub_cards", "hub_cards", symlinks=True)
    (tmp_path / "notes.txt").write_text("class Shape:\n" + "    def area(self):\n        return self.width\n" * 8)
    shutil.copy(PROJECT / "LICENSE", tmp_path)
    return tmp_path


def prelude():
    """Names that the pages of drafts and settings use without defining them."""
    tokenizer = AutoTokenizer.from_pretrained("hub_cards/tiny-target", padding_side="left")
    target = AutoModelForCausalLM.from_pretrained("hub_cards/tiny-target", dtype=torch.float32)
    names = {"hf_longspec": hf_longspec, "AutoModel": AutoModel, "AutoModelForCausalLM": AutoModelForCausalLM}
    names |= {"SpecAttnDraftModel": hf_longspec.SpecAttnDraftModel, "tokenizer": tokenizer, "target": target}
    names["inputs"] = tokenizer(["def area(self):"], return_tensors="pt")
    return names | {"draft": AutoModel.from_pretrained("hub_cards/tiny-longspec")}


def smaller(code):
    for pattern, size in SIZES:
        code = pattern.sub(size, code)
    return code


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page) and page not in RUN_BY])
def test_the_blocks_of_a_page_run(page, checkout, monkeypatch):
    calls = []
    monkeypatch.setattr(base, "decode", lambda *inputs, **options: calls.append(1) or decode(*inputs, **options))
    names = {} if page in COMPLETE else prelude()
    for block in runnable(page):
        # lines as in the page, so that a traceback points there
        exec(compile("\n" * (block.line - 1) + smaller(block.code), page, "exec"), names)  # noqa: S102 - our own pages
    if isinstance(draft := names.get("draft"), hf_longspec.DraftModel):
        draft.check(TargetView(names["target"]))  # settings that the page made exist and are in range
    assert len(calls) == sum(len(DRAFTED.findall(block.code)) for block in runnable(page))  # our loop ran every time


def test_the_quick_tour_shows_what_its_blocks_print(checkout, monkeypatch, capsys):
    """At their sizes; without the gate, whose pauses depend on the speed of the machine.

    README shows the output of a model that has to be fetched.
    """
    monkeypatch.setattr(gate, "gate_of", lambda *inputs: None)
    names, count = {}, 0
    for block, shown in pairwise(blocks_of("docs/quicktour.md")):
        if (block.language, shown.language) == ("python", "text"):
            exec(compile("\n" * (block.line - 1) + block.code, "quicktour", "exec"), names)  # noqa: S102 - our own
            (words, taus), (printed, measured) = map(lasting, (shown.code, capsys.readouterr().out))
            assert words == printed and taus == pytest.approx(measured, rel=0.05)
            count += 1
    assert count == 2
