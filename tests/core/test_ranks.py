"""Ranks as text."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from milepost.core.limits import MAX_RANKS
from milepost.core.ranks import pack_ranks, show_ranks, unpack_ranks
from tests.strategies import examples


@examples(150)
@given(st.lists(st.integers(0, 12) | st.integers(0, MAX_RANKS - 1)))
def test_a_sequence_of_ranks_comes_back_in_its_order(ranks):
    assert unpack_ranks(pack_ranks(ranks)) == tuple(ranks)


@examples(200)
@given(st.text(st.sampled_from("0123456789-, ٣²x"), max_size=12))
@example("0-1048576")
@example("0-1048575,0")
@example("5-4")
@example("9" * 5000)
def test_any_text_is_a_list_of_ranks_or_a_value_error(text):
    try:
        ranks = unpack_ranks(text)
    except ValueError:
        return
    assert len(ranks) <= MAX_RANKS
    assert all(0 <= rank < MAX_RANKS for rank in ranks)
    assert all(number == str(int(number)) for number in re.split("[,-]", text) if text)


@pytest.mark.parametrize(
    "text", ["٣", "0-٣", "³", "03", "0-07", "+1", "1_0", " 1", "1 ", "0,", ",", "1-", "-1", "0-1-2"]
)
def test_only_what_is_written_is_read_as_ranks(text):
    with pytest.raises(ValueError, match="not a list of ranks"):
        unpack_ranks(text)


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([8, 1, 0, 2, 2], "ranks 0-2, 8"), ([], "ranks "), ([4, 5], "ranks 4-5")]
)
def test_a_message_names_ranks_sorted_and_once(ranks, text):
    assert show_ranks(ranks) == text


def test_a_message_cuts_a_long_list_of_ranks_and_says_how_many_there_are():
    text = show_ranks(range(0, 2000, 2))
    assert len(text) < 100
    assert text.startswith("ranks 0, 2, 4")
    assert text.endswith("(1000 in all)")
