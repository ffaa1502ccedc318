"""`hf-longspec env`: what a bug report should say of the machine."""

import json

from . import options
from .system_report import describe, system_report


def env(as_json: options.Json = False, debug: options.Debug = False) -> None:
    """Describe this installation, to paste into a bug report.

    Versions, processor and GPU, attention backends with the reasons against those that cannot run here, threads, and
    the commit of a checkout. No paths, no user names, no tokens.

    Examples:

    \b
    hf-longspec env
    hf-longspec env --json

    Exit status: 0.
    """
    with options.one_line_errors(debug):
        report = system_report()
        print(json.dumps(report, indent=2) if as_json else describe(report))
