"""Docstrings are plain text with `code` in backticks, indented blocks, `>>>` examples and lists. Sphinx gets reST.

A line that starts with an option (`name`: or `name=value`:) starts an item of a list. A name of the public API becomes
a link. Everything else is text: no docstring can hold markup by accident.
"""

import importlib
import re
from collections.abc import Iterator
from typing import Any

PUBLIC = ("milepost", "milepost.planning", "milepost.store", "milepost.testing")
OPTION = re.compile(r"`[^`]+`(, `[^`]+`)*:( |$)")
BULLET = re.compile(r"(?:[*-]|\d+\.) ")


def public_names() -> dict[str, str]:
    """The full name of each public name, for docstrings that mention it without a module."""
    found: dict[str, str] = {}
    for module in PUBLIC:
        for name in importlib.import_module(module).__all__:
            found.setdefault(name, f"{module}.{name}")
    found["Store"] = "milepost.store.Store"
    return found


def inline(text: str, names: dict[str, str]) -> str:
    """One paragraph of text, with its code spans marked and all other markup escaped."""
    parts = re.split(r"`([^`]+)`", text)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            parts[i] = re.sub(r"([\\*_|`])", r"\\\1", part)
        elif part in names:
            parts[i] = f":py:obj:`{part} <{names[part]}>`\\ "
        else:
            parts[i] = f"``{part}``\\ "
    return "".join(parts)


def blocks(lines: list[str]) -> Iterator[list[str]]:
    """Runs of lines without a blank one; an indented block keeps its blank lines."""
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip() or (block and block[0].startswith("    ") and line is not lines[-1]):
            if block and block[0].startswith("    ") and line.strip() and not line.startswith("    "):
                yield block
                block = []
            block.append(line)
        elif block:
            yield block
            block = []
    if block:
        yield block


def paragraph(block: list[str], names: dict[str, str]) -> Iterator[str]:
    """A paragraph, or the items of a list that it is made of."""
    items: list[tuple[str, list[str]]] = []
    for line in block:
        bullet = BULLET.match(line)
        if bullet:
            items.append(("* ", [line[bullet.end() :]]))
        elif OPTION.match(line):
            items.append(("* ", [line]))
        elif items:
            items[-1][1].append(line.strip())
        else:
            items.append(("", [line.strip()]))
    for mark, text in items:
        yield f"{mark}{inline(' '.join(text), names)}"
        yield ""


def to_rest(lines: list[str], names: dict[str, str]) -> list[str]:
    """The docstring as reST."""
    result: list[str] = []
    for block in blocks(lines):
        if block[0].lstrip().startswith(">>>"):
            result += [".. code-block:: pycon", "", *(f"   {line.strip()}" for line in block), ""]
        elif block[0].startswith("    "):
            result += ["::", "", *(f"   {line}" for line in block), ""]
        elif block[0].startswith("```"):
            result += [".. code-block:: python", "", *(f"   {line}" for line in block[1:-1]), ""]
        else:
            result += paragraph(block, names)
    return result


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    names = public_names()

    def convert(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
        del app, name, obj, options
        # A constant has no docstring of its own, only that of its type.
        lines[:] = [] if what == "data" else to_rest(lines, names)

    app.connect("autodoc-process-docstring", convert)
    return {"parallel_read_safe": True}
