"""What a result file says of one draft, as its model card quotes it."""

from pathlib import Path

from .report_parts import environment_line, note, of_kind
from .reports import acceptance_headline
from .results import read_records


def acceptance_section(results: Path, draft: str) -> str:
    """Table of tau by context length, with its note and its environment, as Markdown.

    Args:
        results (`Path`): What `benchmarks/acceptance.py --draft` wrote.
        draft (`str`): Name of the draft in it.

    Raises:
        ValueError: If the file holds no acceptance of that draft.
        OSError: If it cannot be read.
    """
    records = read_records(results)
    own = [record for record in records if record.get("options", {}).get("draft", draft) == draft]
    if not of_kind(own, "acceptance") or not of_kind(own, "environment"):
        names = dict.fromkeys(record["options"].get("draft") for record in records if record.get("options"))
        found = ", ".join(str(name) for name in names if name) or "none"
        raise ValueError(f"{results} holds no acceptance of the draft {draft!r}, but of: {found}. Name one of them.")
    return "\n\n".join([acceptance_headline(own), note(own), environment_line(own)])
