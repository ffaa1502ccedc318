"""Benchmarks that the authors run: fixed configurations for the tables in the documentation, and their results.

Run one as `python -m benchmarks.figure`, from the root of a checkout. The rules of `hf_longspec.cli.measuring` hold for
every number. suites/ has the cells and methods of the larger ones, pages.yaml the words of all reports.
"""

from pathlib import Path
from typing import Any

import yaml


def read_yaml(name: str) -> dict[str, Any]:
    """A file beside this one, such as `suites/figure.yaml`."""
    return yaml.safe_load((Path(__file__).parent / name).read_text(encoding="utf-8"))
