"""Whole numbers in untrusted text. Pure."""

import re

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


def number_of(text: str) -> int | None:
    """The number that `text` spells exactly as `str` would, of up to 18 digits; None for any other text.

    `int` accepts far more: digits of every script, underscores, spaces, signs and leading zeros. It raises an error for
    text of thousands of digits.
    """
    return int(text) if _NUMBER.fullmatch(text) else None
