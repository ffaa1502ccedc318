"""Models whose modules call the stand-ins of this folder, as they call the packages where these are installed."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kernel_packages.counted import CALLS, FAULTS

FOLDER = Path(__file__).parent
NAMES = "fla", "mamba_ssm", "causal_conv1d"


@contextmanager
def with_packages(model: Any, **faults: Any) -> Iterator[Any]:
    """Yield a model of the same class and weights, whose module is imported again where the stand-ins are found.

    `faults` are functions that run in place of stand-ins and get them as their first argument.
    """
    name, kind = type(model).__module__, type(model).__name__
    before = sys.modules.pop(name)
    package, _, module_name = name.rpartition(".")
    sys.path.insert(0, str(FOLDER))
    CALLS.clear()
    FAULTS.update(faults)
    try:
        copy = getattr(importlib.import_module(name), kind)(model.config).eval().to(model.dtype)
        copy.load_state_dict(model.state_dict())
        copy.generation_config.eos_token_id = None
        yield copy
    finally:
        FAULTS.clear()
        sys.path.remove(str(FOLDER))
        for module in [module for module in sys.modules if module.partition(".")[0] in NAMES]:
            del sys.modules[module]
        sys.modules[name] = before
        # An import also sets the module as an attribute of its package, where the classes of `Auto` are looked up.
        setattr(sys.modules[package], module_name, before)
