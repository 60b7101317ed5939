"""Numbers as text: what `str` writes is read, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.core.strict_int import number_of
from tests.strategies import examples


@examples(100)
@given(st.integers(0, 10**18 - 1))
def test_a_number_comes_back(number):
    assert number_of(str(number)) == number


@examples(300)
@given(st.text() | st.text(st.sampled_from("0123456789_+- \n٣²x"), max_size=6))
def test_any_other_text_is_none(text):
    number = number_of(text)
    assert number is None or str(number) == text


@pytest.mark.parametrize(
    "text", ["", "٣", "²", "١٢", "007", "00", "+1", "-1", "1_0", " 1", "1\n", "1.0", "9" * 19, "9" * 5000]
)
def test_what_int_would_take_or_choke_on_is_none(text):
    assert number_of(text) is None
