"""hf_longspec: lossless speculative decoding at long context inside plain `model.generate()`.

Importing it registers the attention backends, the Auto classes and the route of `generate(assistant_model=draft)`.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# Of a copy that a published draft brought, where it lies: "owner/name@commit", or "." for the draft's own repository.
copied_from: str | None = None

_LAZY = {
    "AuditReport": "auditing",
    "AutoDraft": "auto",
    "Batcher": "batching",
    "Binding": "generation.drafter",
    "ContextualPenaltyLogitsProcessor": "generation.sampling",
    "DraftTree": "generation.draft_tree",
    "Drafter": "generation.drafter",
    "FileStreamer": "streaming",
    "IncrementalDecoder": "streaming",
    "PrefixCache": "prefix_cache",
    "SamplingReport": "auditing",
    "audit": "auditing",
    "audit_sampling": "auditing",
    "bind": "bound",
    "SpeculationStats": "generation.sequences",
    "SpeculativeCache": "generation.cache",
    "StructuredOutput": "structured_output",
    "Verification": "generation.drafter",
}

# The script `hf-longspec` (on Windows a file in hf-longspec.exe) shows its version and help without torch and
# transformers; a command that runs imports them. In processes that it starts, `__main__` is another module.
_MAIN = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
if _MAIN.name != "hf-longspec" and _MAIN.parent.name != "hf-longspec.exe":
    from .drafts import *  # noqa: F403
    from .drafts import __all__ as _DRAFTS

    __all__ = [*_DRAFTS, *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    if not name.startswith("_") and hasattr(drafts := import_module(".drafts", __name__), name):
        return getattr(drafts, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
