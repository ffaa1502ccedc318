"""Models whose modules call the stand-ins of this folder, as they call the packages where these are installed."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
NAMES = "fla", "mamba_ssm", "causal_conv1d"


@contextmanager
def packages_installed() -> Iterator[None]:
    """Let Python find the stand-ins, and restore the modules of transformers that are imported again meanwhile."""
    before = {name: module for name, module in sys.modules.items() if ".modeling_" in name}
    sys.path.insert(0, str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
        for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
            del sys.modules[name]
        sys.modules.update(before)


def with_packages(model: Any) -> Any:
    """Return a model of the same class, config and weights, from a module that is imported again."""
    name, kind = type(model).__module__, type(model).__name__
    sys.modules.pop(name)
    copy = getattr(importlib.import_module(name), kind)(model.config).eval().to(model.dtype)
    copy.load_state_dict(model.state_dict())
    copy.generation_config.eos_token_id = None
    return copy
