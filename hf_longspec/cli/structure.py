"""The structure that a text must have, as options and requests give it."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..cli import CommandError, one_line


def given(json_schema: Path | None, regex: str | None) -> dict[str, Any]:
    """Return the structure of `--json-schema` or `--regex`, by its name; empty without one."""
    if regex is not None:
        _require_grammar(f"--regex {regex}", "regex", regex)
        return {"regex": regex}
    if json_schema is None:
        return {}
    if not json_schema.is_file():
        raise CommandError(f"--json-schema: the file {str(json_schema)!r} does not exist. Check the path.")
    try:
        schema = json.loads(json_schema.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CommandError(
            f"--json-schema {json_schema} is not JSON: {error}. Pass a file with a JSON schema."
        ) from error
    _require_grammar(f"--json-schema {json_schema}", "json_schema", schema)
    return {"json_schema": schema}


def _require_grammar(option: str, kind: str, value: Any) -> None:
    """Refuse what the parser cannot follow. Whether it is installed is said when it is needed."""
    with suppress(ImportError):
        from llguidance import LLMatcher

        grammar = getattr(LLMatcher, f"grammar_from_{kind}")(value)
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, None)
        if is_wrong:
            raise CommandError(
                f"{option} cannot be followed: {one_line(ValueError(messages[0])).rstrip('.')}. Correct it."
            )


def processors(structure: dict[str, Any], tokenizer: Any, model: Any) -> dict[str, Any]:
    """Return the arguments of `generate` for a structure; none without one."""
    if not structure:
        return {}
    from ..structured_output import StructuredOutput  # imports torch

    ends = model.generation_config.eos_token_id
    return {"logits_processor": [StructuredOutput(tokenizer, **structure, eos_token_id=ends)]}
