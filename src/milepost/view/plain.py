"""Saved values as plain data and as text, without making them: nothing is decoded, and torch is not imported. Pure."""

import json
import math
from collections.abc import Iterator
from typing import Any

_ITEMS = {"list": "[]", "tuple": "()", "set": "{}", "frozenset": "{}", "torch.Size": "()"}
_PAIRS = ("dict", "OrderedDict", "Counter")
_DEPTH = 12
"""How deep nested values are shown."""
_LETTERS = 2000


def plain(data: Any, depth: int = 0) -> Any:
    """An encoded value as JSON data: dicts, lists, numbers and text. What has no such form becomes text."""
    if data is None or isinstance(data, (bool, int, str)):
        return data if not isinstance(data, int) or abs(data) < 2**53 else str(data)
    if isinstance(data, float):
        return data if math.isfinite(data) else str(data)
    kind, content = _taken_apart(data)
    if depth >= _DEPTH:
        return "..."
    if kind in _ITEMS and isinstance(content, list):
        return [plain(item, depth + 1) for item in content]
    if kind in _PAIRS and isinstance(content, list):
        return {text(name): plain(value, depth + 1) for name, value in _pairs(content)}
    return text(data)


def text(data: Any, letters: int = _LETTERS) -> str:
    """An encoded value as a line of text, about as Python shows it. A long one is cut."""
    found = _text(data, 0, letters)
    return found if len(found) <= letters else f"{found[:letters]}..."


def _text(data: Any, depth: int, letters: int) -> str:
    if data is None or isinstance(data, (bool, int, float)):
        return str(data)
    if isinstance(data, str):
        return data if not depth else json.dumps(data[:letters], ensure_ascii=False)
    if depth >= _DEPTH:
        return "..."
    kind, content = _taken_apart(data)
    if kind in _ITEMS and isinstance(content, list):
        brackets = _ITEMS[kind]
        inside = _joined((_text(item, depth + 1, letters) for item in content), letters)
        return f"{brackets[0]}{inside}{brackets[1]}"
    if kind in _PAIRS and isinstance(content, list):
        pairs = (
            f"{_text(name, depth + 1, letters)}: {_text(value, depth + 1, letters)}" for name, value in _pairs(content)
        )
        return "{" + _joined(pairs, letters) + "}"
    return _special(kind, content, letters)


def _special(kind: str, content: Any, letters: int) -> str:
    if kind == "float":
        return str(content)
    if kind in ("bytes", "bytearray", "BytesIO", "pickle", "str") and isinstance(content, str):
        return f"{kind}, {len(content) * 3 // 4:,} bytes"
    if kind == "int" and isinstance(content, str) and len(content) < letters:
        return content
    return f"{kind} {_json(content)[:letters]}" if kind else _json(content)[:letters]


def _taken_apart(data: Any) -> tuple[str, Any]:
    if isinstance(data, dict) and len(data) == 1:
        ((kind, content),) = data.items()
        return str(kind), content
    return "", data


def _pairs(content: list[Any]) -> Iterator[tuple[Any, Any]]:
    return ((pair[0], pair[1]) for pair in content if isinstance(pair, list) and len(pair) == 2)


def _joined(parts: Iterator[str], letters: int) -> str:
    """The parts with commas between them, until there are enough."""
    found, length = [], 0
    for part in parts:
        found.append(part)
        length += len(part)
        if length > letters:
            break
    return ", ".join(found)


def _json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, default=str)
