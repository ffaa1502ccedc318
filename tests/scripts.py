"""The programs in recipes/ and examples/, imported as they import each other: from their own folder."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[1]


def script(name: str, folder: str = "recipes") -> ModuleType:
    """The module of a program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROJECT / folder))
        return importlib.import_module(name)


def run(name: str, *arguments: Any, folder: str = "recipes") -> Any:
    """The result of the main function of a program that is called with these arguments."""
    main = script(name, folder).main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        return main()
