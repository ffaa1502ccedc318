"""The figures of `python -m tests.house` stay within limits: no call walks through more files than it does now."""

import pytest

from hf_longspec import LongSpecDraftModel
from tests import house


@pytest.fixture(scope="module")
def pair():
    model = house.plain_target()
    return model, LongSpecDraftModel.from_target(model, intermediate_size=64)


def test_the_core_is_small():
    sizes = {name: len(house.code_lines(path)) for name, path in house.files()}
    core = house.core_files()
    assert len(core) <= 13 and sum(sizes[name] for name in core) <= 3000


def test_an_iteration_walks_through_no_special_case(pair):
    rooms = house.iteration(*pair).rooms
    assert len(rooms) <= 16 and "generation/decoding.py" in rooms
    assert not [name for name in rooms if "special_cases/" in name]


def test_a_second_call_asks_no_special_case(pair):
    rooms = house.hall(*pair).rooms
    assert len(rooms) <= 12 and "generation/call.py" in rooms
    assert not [name for name in rooms if "generation/special_case" in name]


def test_a_rare_case_is_seen():
    """The words by which mentions are counted occur in the files of each case."""
    for case, (pattern, own) in house.CASES.items():
        assert sum(house.mentions(pattern, ()).values()) > sum(house.mentions(pattern, own).values()), case
