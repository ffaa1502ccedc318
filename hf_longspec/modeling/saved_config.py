"""Reading of a config.json of any content: what is wrong with it is one line that names the file and the field."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from packaging.version import Version
from transformers import PreTrainedConfig

# First version of the package that reads the drafts that this one publishes; raised when they change.
FORMAT_VERSION = "0.1.0"
# Field of a published config.json with that version.
FORMAT_FIELD = "hf_longspec_version"
# What code raises that reads a value of another kind or size than it expects.
UNEXPECTED = ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError, StrictDataclassError


def read_config(source: Any, **hub: Any) -> dict[str, Any]:
    """Return the contents of the config.json of a folder or Hub id; `hub` are arguments of transformers for the Hub.

    Raises:
        OSError: If there is none, or it is not JSON.
        ValueError: If it holds something else than fields, or `model_type` is not a string.
    """
    with readable(f"config.json of {source}"):
        fields = PreTrainedConfig.get_config_dict(source, **hub)[0]
        if not isinstance(fields, dict):
            raise TypeError(f"it holds {shortened(fields)} in place of fields")
        if not isinstance(kind := fields.get("model_type"), str | None):
            raise TypeError(f"model_type={shortened(kind)}, expected a string")
    return fields


def require_version(needed: str) -> None:
    """Refuse a draft that was published for a newer version of the package than the one of this process."""
    package = import_module("hf_longspec")
    with readable(f"{FORMAT_FIELD} in config.json of the draft"):
        is_older = Version(package.__version__) < Version(needed)
    if is_older:
        raise ValueError(
            f"the draft needs hf_longspec {needed} or newer, and this process has {package.__version__} of "
            f"{package.__path__[0]}. Run `pip install --upgrade hf_longspec`, and load the draft in a new process."
        )


@contextmanager
def readable(
    file: str, fields: Mapping[str, Any] | None = None, read: Callable[[dict[str, Any]], Any] | None = None
) -> Iterator[None]:
    """Replace errors about the content of a file by a ValueError of one line.

    Args:
        file (`str`): The file, for messages.
        fields (`Mapping[str, Any]`, *optional*): Its fields.
        read (`Callable`, *optional*): What reads fields. It is called with one field at a time, to find the wrong one.
    """
    try:
        yield
    except OSError:
        raise
    except UNEXPECTED as error:
        wrong = next((field for field in (fields or {}).items() if read and _fails(read, dict([field]))), None)
        if wrong is None and type(error) is ValueError and len(str(error).splitlines()) == 1:
            raise  # worded for the user
        fact = "" if wrong is None else f"{wrong[0]}={shortened(wrong[1])}: "
        raise ValueError(f"{file}: {fact}{described(error)}. Correct the file, or save it again.") from error


def described(error: Exception) -> str:
    """Return the kind of an error and the beginning of its message, in one line.

    >>> described(KeyError("weight_map"))
    "KeyError: 'weight_map'"
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def shortened(value: Any) -> str:
    """Return a value for a message.

    >>> shortened("x" * 1000)[-4:], len(shortened("x" * 1000))
    ('x...', 63)
    """
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # deeply nested, or a number of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:60] + "..."


def _fails(read: Callable[[dict[str, Any]], Any], field: dict[str, Any]) -> bool:
    try:
        read(field)
    except UNEXPECTED:
        return True
    return False
