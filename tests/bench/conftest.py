"""A tiny target with a prefilled cache and one measured matrix, shared by the benchmark tests."""

import copy

import pytest
import torch

import hf_longspec
from hf_longspec.bench.calls import HF, PLAIN, HfMethod, endless, prefill
from hf_longspec.bench.matrix import Matrix
from hf_longspec.bench.prompts import DocumentPrompts
from hf_longspec.bench.report import matrix_report
from hf_longspec.bench.results import read_records
from hf_longspec.bench.runner import Cell, Method, Runner
from hf_longspec.bench.sources import Document
from tests.generation.conftest import widths  # noqa: F401 - a fixture
from tests.tiny_targets import tiny_prompts, tiny_target

CELL, WIDE = Cell("float32", 40, 1), Cell("float32", 60, 2)
LOOKUP = "hf prompt lookup"
REPEATS = 3  # the fewest that have an interval


@pytest.fixture(scope="session")
def target():
    return endless(tiny_target("llama", attn_implementation="sdpa"))


@pytest.fixture(scope="session")
def prompts(target):
    tokens, _ = tiny_prompts(target.config.vocab_size, [60, 60, 60])
    return prefill(target, torch.as_tensor(tokens))


@pytest.fixture(scope="session")
def documents(target):
    rows, _ = tiny_prompts(target.config.vocab_size, [400, 300])
    texts = [Document(f"{row}", " ".join(map(str, torch.as_tensor(rows)[row].tolist()))) for row in range(2)]
    return DocumentPrompts(lambda text, **_: {"input_ids": [int(part) for part in text.split()]}, texts)


def specattn(model, **settings):
    """A draft that reads part of the short prompts, and so is wrong at times."""
    settings = {"num_assistant_tokens": 3, "sparse_min_tokens": 8} | settings
    return hf_longspec.SpecAttnDraftModel.from_target(model, **settings)


def make_drafts(model):
    """Our loop without a draft and with one, under their names in the results."""
    return {PLAIN: hf_longspec.PlainDraftModel.from_target(model), "SpecAttn": specattn(model)}


@pytest.fixture(scope="session")
def methods(target):
    draft = specattn(target, gate=False)  # as `hf-longspec bench` loads drafts
    return [
        Method(HF, HfMethod()),
        Method(PLAIN, hf_longspec.PlainDraftModel.from_target(target)),
        Method(LOOKUP, HfMethod({"prompt_lookup_num_tokens": 3}, max_batch=1)),
        *(Method(f"specattn, selection={name}", draft, (("selection", name),)) for name in ("two_rows", "window")),
    ]


class Quiet:
    """A bar that prints nothing."""

    def say(self, text):
        pass

    def step(self, count=1):
        pass


def opened(path, minutes=10.0, resume=False, settings=None, **facts):
    settings = {"repeats": REPEATS} | (settings or {})
    return Runner(path, "bench", matrix_report, minutes * 60, settings, facts, resume)


def measure(target, methods, documents, path, *cells, **options):
    """Measure cells; the records, with `path` and the report beside it."""
    with opened(path, **options) as file:
        made = Matrix(target, methods, documents, file, tokens=8, repeats=REPEATS)
        for cell in cells:
            made.measure(cell, Quiet())
    return file.records


@pytest.fixture(scope="session")
def result(target, methods, documents, tmp_path_factory):
    """The file of a matrix of two cells; do not write to it."""
    path = tmp_path_factory.mktemp("matrix") / "b.jsonl"
    measure(target, methods, documents, path, CELL, WIDE)
    return path


@pytest.fixture(scope="session")
def measured(result):
    return read_records(result)


@pytest.fixture
def records(measured):
    """The records of the shared matrix, to be changed at will."""
    return copy.deepcopy(measured)
