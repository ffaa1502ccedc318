"""Numbers of the pages that the code or other tests decide."""

import re
from pathlib import Path

from hf_longspec.cli.demo import draft_names, tiny_target
from tests.docs.blocks import read


def test_readme_has_the_drafts_of_the_demo():
    (drafts,) = re.findall(
        r"`make demo` runs four drafts on the bundled model: ([^.]*)\.", read("README.md").replace("\n", " ")
    )
    kinds = {"ngram": "n-grams", "specattn": "SpecAttn", "tiny-longspec": "LongSpec", "tiny-tokenswift": "TokenSwift"}
    bundled, others = (draft_names(target, None) for target in (tiny_target(), "org/model"))
    assert [kinds[Path(name).name] for name in bundled] == re.split(", | and ", drafts)
    assert others == bundled[:2]
