"""Lines of a result file of the acceptance benchmark, as the model card of a draft reads them."""

import json

ENVIRONMENT = {"kind": "environment", "benchmark": "acceptance", "cpu": "a processor", "cores": 2, "usable_cores": 2}
ENVIRONMENT |= {"threads": 1, "native_bfloat16": False, "torch": "2.13", "transformers": "5.23", "commit": "abc"}
ENVIRONMENT |= {"load_average": 0.5, "date": "today", "command": "python benchmarks/acceptance.py"}


def measured(draft, mean, length=1024, **settings):
    """tau of a draft at one length."""
    line = {"kind": "acceptance", "mode": "greedy", "options": {"draft": draft} | settings, "length": length}
    return line | {"tau": {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}}


def write_lines(path, *lines):
    """A finished run: the environment, these lines, the end."""
    path.write_text("\n".join(map(json.dumps, [ENVIRONMENT, *lines, {"kind": "end"}])) + "\n")
