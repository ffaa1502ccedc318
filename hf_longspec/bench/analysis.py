"""`--analyse`: probed calls of every draft of a cell, behind the prompts that were measured."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from transformers import PreTrainedModel

from .acceptance import changed
from .calls import run_call
from .decoding import HfMethod
from .document_prompts import left_padded
from .engine import PLAIN
from .matrix import Cell, Matrix, Method
from .probes import AcceptanceProbe, SelectionProbe
from .report_parts import of_kind
from .token_choice import Decoding


def analyse_cell(matrix: Matrix, cell: Cell, progress: Any) -> None:
    """Write one record per draft; those that the file holds are left alone."""
    done = [
        {name: r[name] for name in cell.key()} | {"method": r["method"]}
        for r in of_kind(matrix.results.records, "analysis")
    ]
    for method in matrix.methods:
        if isinstance(method.how, HfMethod) or method.name == PLAIN or cell.key() | {"method": method.name} in done:
            continue
        progress.say(f"{cell}: analysing {method.name}")
        found = analyse(matrix.model, method, matrix.prompts_of(cell), cell.decoding, matrix.tokens)
        matrix.results.write("analysis", **cell.key(), method=method.name, **found)


def analyse(
    model: PreTrainedModel,
    method: Method,
    prompts: Sequence[Sequence[torch.Tensor]],
    decoding: Decoding,
    tokens: int,
) -> dict[str, Any]:
    """What the probes saw in one call per batch of prompts."""
    acceptance, selection, pairs = AcceptanceProbe(), SelectionProbe(), SelectionProbe()
    draft = method.how
    with method.with_settings():
        _run(model, draft, prompts, decoding, tokens, {"compile": "off"}, (acceptance, selection))
        if "selection" in draft.settings:  # the only selection for which scores of single tokens are there
            _run(model, draft, prompts, decoding, tokens, {"compile": "off", "selection": "last_accepted"}, (pairs,))
    seen = selection.to_dict()
    return {**acceptance.to_dict(), "overlap": seen["overlap"], "pair_overlap": pairs.to_dict()["pair_overlap"]}


def _run(
    model: PreTrainedModel,
    draft: Any,
    prompts: Sequence[Sequence[torch.Tensor]],
    decoding: Decoding,
    tokens: int,
    settings: Mapping[str, Any],
    probes: Sequence[Any],
) -> None:
    pad = model.generation_config.pad_token_id or 0
    with ExitStack() as stack:
        stack.enter_context(changed(draft, dict(settings)))
        for probe in probes:
            stack.enter_context(probe.of(draft))
        for seed, rows in enumerate(prompts):
            run_call(model, draft, left_padded(rows, pad), decoding=decoding, tokens=tokens, seed=seed)
