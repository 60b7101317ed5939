r"""Text that comes from a checkpoint, made safe for a terminal: it moves no cursor, and changes no colour or direction.

What cannot be printed is spelled as in Python: `\x1b`, `\u202e`. In keys a backslash is doubled, so that each key has
one spelling, and `meant` turns it back.
"""

import re

_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(\\))")


def printable(text: str) -> str:
    """The text with every character that cannot be printed spelled out."""
    return text if text.isprintable() else "".join(map(_spelled, text))


def _spelled(letter: str) -> str:
    if letter.isprintable():
        return letter
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shown(key: str) -> str:
    """A key as it is shown, and may be typed: spelled out, with backslashes doubled."""
    return printable(key.replace("\\", "\\\\"))


def meant(text: str) -> str:
    """The key that `shown` was given, from what it gave."""
    return _ESCAPED.sub(lambda found: found[4] or chr(int(found[1] or found[2] or found[3], 16)), text)
