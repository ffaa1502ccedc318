"""Stand-ins for the parts of this package that the repository of a published draft leaves out.

`hub/flatten.py` copies this file where the package itself has compiled_steps.py.
"""

from typing import Any

import torch


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
