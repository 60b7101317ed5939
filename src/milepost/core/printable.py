r"""Text that others wrote, made safe for a terminal and for one line of a log. Pure.

What cannot be printed is spelled as in Python: `\x1b`, `\u202e`. So it moves no cursor, changes no colour or direction,
and begins no line of its own.
"""


def printable(text: str) -> str:
    """The text with every character that cannot be printed spelled out."""
    return text if text.isprintable() else "".join(map(_spelled, text))


def in_one_line(text: str) -> str:
    """The same for a text of several lines, such as that of an error: they stand one behind the other."""
    return printable(" ".join(line.strip() for line in text.splitlines() if line.strip()))


def _spelled(letter: str) -> str:
    if letter.isprintable():
        return letter
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
