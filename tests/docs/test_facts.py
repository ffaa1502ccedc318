"""Numbers of the pages that the code or other tests decide."""

import re

from tests.docs.blocks import read
from tests.hub.test_flatten import MOST_FILES, MOST_LINES


def test_the_page_on_publishing_has_the_limits_of_the_portable_engine():
    (found,) = re.findall(r"at most (\d+) files and ([\d,]+) lines of code", read("docs/publishing.md").replace("\n", " "))
    assert [int(number.replace(",", "")) for number in found] == [MOST_FILES, MOST_LINES]
