"""New settings in the generation_config.json of a draft, in one step or not at all."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

NAME = "generation_config.json"


def update_settings(folder: Path, settings: dict[str, Any]) -> Path:
    """Set some keys of the file and keep all others; returns its path.

    The new content is written beside the old file and takes its place when it is complete: whoever reads meanwhile, or
    whatever goes wrong, finds the old file or the new one.

    Raises:
        OSError: If it cannot be written; the old file is as it was.
    """
    path = folder / NAME
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    handle, name = tempfile.mkstemp(prefix=f".{NAME}.", dir=folder)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(content | settings, indent=2, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, name)
        else:
            os.chmod(name, 0o644)  # a temporary file is its owner's alone
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path
