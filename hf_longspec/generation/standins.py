"""Stand-ins for the parts of this package that the repository of a published draft leaves out.

`hub/flatten.py` copies this file where the package itself has compiled_steps.py and gate.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers.utils import logging

from .drafter import Drafter
from .gated_drafter import GatedDrafter
from .stats import SpeculationStats

logger = logging.get_logger(__name__)

_NO_GATE = (
    "gate=True is off in the code that a draft brings along: every step speculates, whether that pays or not. "
    "`pip install hf_longspec` for the gate, compiled steps and faster kernels."
)


def runner_of(mode: str, model: Any, draft: Any, device: torch.device) -> None:
    """Return `None`: every step runs as it is.

    Raises:
        ValueError: If `mode` asks for compiled or captured steps.
    """
    if mode not in ("auto", "off"):
        raise ValueError(
            f"compile={mode!r}: the code that a draft brings along runs steps as they are. Set it to 'auto' or 'off', "
            "or `pip install hf_longspec`."
        )


def gated(drafter: Drafter, draft: Any, stats: SpeculationStats, may_speculate: Callable[[int], bool]) -> Drafter:
    """Return the drafter of `draft`, hidden from the steps that cannot speculate."""
    if draft.setting("gate"):
        logger.warning_once(_NO_GATE)
    return GatedDrafter(drafter, None, may_speculate, stats.gate_decisions.append)
