"""The settings of n-grams, which every draft has whose trees they may join."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..setting_checks import check_choice, check_integer

SOURCES = ("both", "pool", "lookup")
# Each length of keys has tables of its own, and hardly a text repeats this much without repeating more.
LONGEST_KEY = 16

# Defaults of drafts that n-grams may join; with 0 candidates they do not.
NGRAM_DEFAULTS: dict[str, Any] = {
    "ngram_candidates": 0,
    "ngram_num_tokens": 8,
    "ngram_size": 3,
    "ngram_source": "both",
    "ngram_preload": True,
}


@dataclass(frozen=True)
class NgramSettings:
    """How n-grams are proposed in one call.

    Args:
        num_tokens (`int`): Tokens of a path.
        candidates (`int`): Paths; the nodes that they share are room for further ones.
        size (`int`): Confirmed tokens of the longest key.
        source (`str`): Continuations of the `pool` by their counts, those of the suffix `lookup` by the length of the
            match, or `both`: the best one of the lookup, then the pool's.
        preload (`bool`): Whether the prompt's n-grams count, or only those of what is generated.
    """

    num_tokens: int
    candidates: int
    size: int
    source: str
    preload: bool

    @classmethod
    def read(
        cls, setting: Callable[[str], Any], num_tokens: str = "ngram_num_tokens", fewest: int = 0
    ) -> "NgramSettings":
        """From a draft's settings.

        Args:
            setting (`Callable[[str], Any]`): Gives the value of a setting.
            num_tokens (`str`): Name of the setting that says how long a path is.
            fewest (`int`): Fewest candidates that make sense.

        Raises:
            ValueError: If a value is out of range.
        """
        ranges = {num_tokens: (1, None), "ngram_candidates": (fewest, None), "ngram_size": (1, LONGEST_KEY)}
        for name, (least, most) in ranges.items():
            check_integer(name, setting(name), least, most)
        check_choice("ngram_source", source := setting("ngram_source"), SOURCES)
        if type(preload := setting("ngram_preload")) is not bool:
            raise ValueError(f"ngram_preload={preload!r}: expected True or False.")
        return cls(setting(num_tokens), setting("ngram_candidates"), setting("ngram_size"), source, preload)

    @property
    def num_nodes(self) -> int:
        """Nodes of the trie without the root."""
        return self.num_tokens * self.candidates
