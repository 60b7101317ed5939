"""Whole numbers in text that somebody else may have written. Pure."""

import re

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


def number_of(text: str) -> int | None:
    """The number that `text` spells as `str` would, from 0 to 18 digits long; None for any other text.

    `int` takes far more than anybody here writes: digits of every script, underscores, spaces, signs, zeros in front; and
    text of thousands of digits makes it raise.
    """
    return int(text) if _NUMBER.fullmatch(text) else None
