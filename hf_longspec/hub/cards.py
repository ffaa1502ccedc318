"""Model cards of published drafts, rendered from the templates beside this file."""

import dataclasses
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ..modeling.register_draft import DRAFTS

NOT_MEASURED = "Not measured."
OWN_CODE = """\
You need transformers 5.17 or newer and nothing else. The code is in this repository, and `trust_remote_code=True` runs
it."""
ENGINE_CODE = """\
You need transformers 5.17 or newer and nothing else. The code is in [{engine}](https://huggingface.co/{engine}), and
`trust_remote_code=True` runs it. `revision` chooses the weights and settings of this repository and does not pin the
code; `code_revision="<commit of {engine}>"` does."""
# Of https://huggingface.co/docs/hub/repositories-licenses
LICENSES = {
    "afl-3.0", "agpl-3.0", "apache-2.0", "apple-amlr", "apple-ascl", "artistic-2.0", "bigcode-openrail-m",
    "bigscience-bloom-rail-1.0", "bigscience-openrail-m", "bsd", "bsd-2-clause", "bsd-3-clause",
    "bsd-3-clause-clear", "bsl-1.0", "c-uda", "cc", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0",
    "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0", "cc-by-nc-sa-2.0",
    "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cc-by-nd-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0", "cc0-1.0",
    "cdla-permissive-1.0", "cdla-permissive-2.0", "cdla-sharing-1.0", "creativeml-openrail-m",
    "deepfloyd-if-license", "ecl-2.0", "epl-1.0", "epl-2.0", "etalab-2.0", "eupl-1.1", "eupl-1.2",
    "fair-noncommercial-research-license", "gemma", "gfdl", "gpl", "gpl-2.0", "gpl-3.0", "grok2-community",
    "h-research", "intel-research", "isc", "lgpl", "lgpl-2.1", "lgpl-3.0", "lgpl-lr", "llama2", "llama3",
    "llama3.1", "llama3.2", "llama3.3", "llama4", "lppl-1.3c", "mit", "mpl-2.0", "ms-pl", "ncsa", "odbl",
    "odc-by", "ofl-1.1", "openmdw-1.0", "openrail", "openrail++", "osl-3.0", "other", "pddl", "postgresql",
    "unknown", "unlicense", "wtfpl", "zlib",
}  # fmt: skip
LISTS = ("datasets", "language")  # fields that may hold several values on the Hub


@dataclass(frozen=True)
class Card:
    """
    Facts on a model card that do not follow from the draft. The card omits missing facts, or states that they are
    missing.

    Args:
        repo (`str`, *optional*): Id or folder from which the usage example loads the draft. Defaults to the repository
            that it is pushed to.
        base_model (`str`, *optional*): Hub id of the target. Defaults to the `target_name_or_path` of the draft.
        target (`str`, *optional*): Id or folder from which the usage example loads the target. Defaults to
            `base_model`.
        license (`str`, *optional*): License of the weights, as the Hub spells it. Defaults to that of the code for
            drafts without weights.
        language (`str` or `list[str]`, *optional*): Language of the training text.
        datasets (`list[str]`): Hub ids of the training data.
        settings (`str`): Reasons for the values in the draft's `generation_config`.
        acceptance (`str`): Markdown table of tau by context length, with the method of measurement.
        training (`str`): Steps, tokens, loss.
        command (`str`): The training command.
        commit (`str`, *optional*): Commit of the training code.
        limits (`str`): Further limits of the draft.
    """

    repo: str | None = None
    base_model: str | None = None
    target: str | None = None
    license: str | None = None
    language: str | list[str] | None = None
    datasets: list[str] = dataclasses.field(default_factory=list)
    settings: str = ""
    acceptance: str = ""
    training: str = ""
    command: str = ""
    commit: str | None = None
    limits: str = ""

    @classmethod
    def read(cls, facts: dict[str, Any]) -> "Card":
        """Build a card from facts by name.

        Raises:
            ValueError: If a name or the license is unknown, or a value has a wrong type.
        """
        known = {field.name: field.default for field in dataclasses.fields(cls)}
        if unknown := sorted(set(facts) - set(known)):
            raise ValueError(f"a card has no {', '.join(unknown)}: it has {', '.join(known)}.")
        for name, value in facts.items():
            if name in LISTS and isinstance(value, list) and all(isinstance(item, str) for item in value):
                continue
            if name == "datasets" or not (isinstance(value, str) or (value is None and known[name] is None)):
                expected = "a list of texts" if name == "datasets" else "a text"
                raise ValueError(f"{name}={value!r} on a card: expected {expected}. Correct it, or leave it out.")
        if (given := facts.get("license")) is not None and given not in LICENSES:
            raise ValueError(
                f"license={given!r} on a card: the Hub has no such id. Pass one of "
                "https://huggingface.co/docs/hub/repositories-licenses, such as apache-2.0, or other."
            )
        return cls(**facts)

    def complete(self, draft: Any, repo: str) -> "Card":
        """Return the card with missing facts filled in from the draft and the repository.

        Args:
            draft ([`DraftModel`]): The draft to publish.
            repo (`str`): Id of its repository, or name of its folder.

        Raises:
            ValueError: If the target has no Hub id.
        """
        base_model = self.base_model or draft.config.target_name_or_path
        if not is_hub_id(base_model) or (not self.base_model and Path(str(base_model)).is_dir()):
            raise ValueError(
                f"the target is known as {base_model!r}, which is no Hub id, and others load it by its id. Pass "
                "base_model (--base-model), such as Qwen/Qwen3-8B."
            )
        has_weights = not draft.weightless or next(draft.parameters(), None) is not None  # a draft by another model
        license = self.license or (None if has_weights else "apache-2.0")
        return dataclasses.replace(self, base_model=base_model, license=license, repo=self.repo or repo)


def render(draft: Any, card: Card, engine: str | None = None) -> str:
    """Return the README.md of a draft.

    Args:
        draft ([`DraftModel`]): The draft.
        card ([`Card`]): A result of [`Card.complete`].
        engine (`str`, *optional*): Repository that holds the code of the draft.
    """
    kind = draft.config.model_type
    tags = ["speculative-decoding", kind.replace("_", "-"), "draft-model", "long-context", "custom_code"]
    data = ModelCardData(
        library_name="transformers",
        base_model=card.base_model,
        license=card.license,
        language=card.language,
        datasets=card.datasets or None,
        tags=tags,
    )
    base_model = str(card.base_model)
    if kind not in DRAFTS:
        raise ValueError(
            f"no draft of model_type={kind!r} is registered: call hf_longspec.register_draft, with a card."
        )
    about, limits = (
        DRAFTS[kind]
        .card_template()
        .format(
            config=draft.config,
            parameters=f"{sum(weight.numel() for weight in draft.parameters()) / 1e6:.2f}M",
            name=base_model.split("/")[-1],
            link=f"[{base_model}]({'https://huggingface.co' if '/' in base_model else '..'}/{base_model})",
        )
        .split("\n## Limits\n")
    )
    place = ENGINE_CODE.format(engine=engine) if engine else OWN_CODE
    return _template("card").format(
        code=place,
        custom_generate=engine or card.repo,
        metadata=data.to_yaml().strip(),
        about=about.strip(),
        target=card.target or base_model,
        repo=card.repo,
        settings=_settings(draft, card),
        acceptance=card.acceptance.strip() or NOT_MEASURED,
        training="" if draft.weightless and not card.training else f"## Training\n\n{_training(card)}\n\n",
        limits=_paragraphs(limits, card.limits, _license(card)),
    )


def render_engine(engine: str) -> str:
    """Return the README.md of a repository that holds the code of drafts."""
    return _template("engine").format(engine=engine)


def _settings(draft: Any, card: Card) -> str:
    named = ", ".join(f"`{name}={draft.setting(name)!r}`" for name in draft.settings)
    return _paragraphs(f"Settings in `generation_config.json`: {named or 'none'}.", card.settings)


def _training(card: Card) -> str:
    command = f"```\n{card.command}\n```" if card.command else "The training command was not recorded."
    commit = f"Commit of the code: {card.commit}." if card.commit else "The commit of the code was not recorded."
    return _paragraphs(card.training, command, commit)


def _paragraphs(*parts: str) -> str:
    return "\n\n".join(part.strip() for part in parts if part.strip())


def _license(card: Card) -> str:
    return "" if card.license else "The code is licensed under Apache-2.0; the license of the weights was not stated."


def is_hub_id(name: str | None) -> bool:
    """Return whether a name is valid for a repository on the Hub."""
    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return False
    return True


def _template(name: str) -> str:
    return (files(__package__) / "templates" / f"{name}.md").read_text(encoding="utf-8")
