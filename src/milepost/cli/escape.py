r"""Keys as they are shown, and may be typed: what cannot be printed is spelled as in Python, `\x1b`, `\u202e`.

A backslash is doubled, so that each key has one spelling, and `meant` turns it back.
"""

import re

from milepost.core.printable import printable

_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(\\))")


def shown(key: str) -> str:
    """A key as it is shown, and may be typed: spelled out, with backslashes doubled."""
    return printable(key.replace("\\", "\\\\"))


def meant(text: str) -> str:
    """The key that `shown` was given, from what it gave."""
    return _ESCAPED.sub(lambda found: found[4] or chr(int(found[1] or found[2] or found[3], 16)), text)
