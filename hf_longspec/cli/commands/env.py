"""`hf-longspec env`: versions, machine and backends for a bug report, without paths and user names."""

import json

from .. import options


def env(as_json: options.Json = False, debug: options.Debug = False) -> None:
    """Describe this installation, to paste into a bug report.

    Versions, processor and GPU, attention backends with the reasons against those that cannot run here, threads, and
    the commit of a checkout. No paths, no user names, no tokens.

    Examples:

    - hf-longspec env
    - hf-longspec env --json

    Exit status: 0.
    """
    with options.one_line_errors(debug):
        from ..env import describe, system_report

        report = system_report()
        print(json.dumps(report, indent=2) if as_json else describe(report))
