"""The programs in examples/, imported as they import each other: from their own folder."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def script(name: str) -> ModuleType:
    """The module of a program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return importlib.import_module(name)


def run(name: str, *arguments: Any) -> Any:
    """The result of the main function of a program that is called with these arguments."""
    main = script(name).main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        return main()
