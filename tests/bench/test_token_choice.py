"""Ways to choose tokens: what generate is told, what a result says of them, what is refused."""

import pytest

from hf_longspec.bench.token_choice import decoding_of


def test_ways_to_choose_tokens_are_checked():
    assert decoding_of({"temperature": 0.0}).options() == {"do_sample": False}
    assert decoding_of({"penalty": 1.2, "window": 64}).to_dict() == {"penalty": 1.2, "window": 64}
    with pytest.raises(ValueError, match="window=64 without a penalty"):
        decoding_of({"window": 64})
    for values in ({"temperature": -1.0}, {"top_p": 0.0}, {"penalty": 0.0}):
        with pytest.raises(ValueError, match="expected"):
            decoding_of(values)
