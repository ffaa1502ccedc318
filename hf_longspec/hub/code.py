"""The code of a published draft: a stub, and where the package is not installed, a copy of it.

`auto_map` in config.json names the stub. Transformers imports it from a folder of its own, so that it cannot know where
it came from, and calls `from_pretrained` of its classes with the folder or Hub id of the draft. Then the stub finds the
package and lets it load the draft. So all classes are those of the one package of a process.
"""

from importlib import import_module
from pathlib import Path
from shutil import copytree, ignore_patterns

from ..modeling.saved_config import FORMAT_VERSION

TEMPLATES = Path(__file__).parent / "templates"
# Not resolved: in the cache of the Hub, files are links to another folder.
PACKAGE = Path(__file__).parents[1]
STUB = "longspec_draft.py"
AUTO_MAP = {"AutoConfig": "longspec_draft.DraftConfig", "AutoModel": "longspec_draft.DraftModel"}
# The engine of a draft that holds the copy itself.
OWN = "."
# Commands, which no draft needs.
LEFT_OUT = "cli", "__pycache__"


def write_code(folder: Path, engine: str = OWN) -> None:
    """Write the stub into the folder of a draft, and the package if the draft holds it itself.

    Args:
        folder (`Path`): The folder.
        engine (`str`): `"owner/name@commit"` of the repository that holds the package, or `"."`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = template(STUB).replace("{version}", FORMAT_VERSION).replace("{engine}", engine)
    (folder / STUB).write_text(text, encoding="utf-8", newline="\n")
    if engine == OWN:
        write_package(folder)


def write_package(folder: Path) -> None:
    """Copy the package into a folder, unless it is the one that runs."""
    copied = folder / PACKAGE.name
    if not (copied.exists() and copied.samefile(PACKAGE)):
        copytree(PACKAGE, copied, ignore=ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)


def running_engine() -> str | None:
    """Return the engine that this package was copied from; `None` if it is installed."""
    engine: str | None = import_module(PACKAGE.name).copied_from
    return engine


def template(name: str) -> str:
    """Return the text of a template."""
    return (TEMPLATES / name).read_text(encoding="utf-8")
