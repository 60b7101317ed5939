"""Values of a checkpoint as they are spelled in its manifest, turned into text and into plain JSON. Runs nothing.

The codec would need the user's classes for some, torch for others, and permission for pickles. To look at a value needs
none of that.
"""

import base64
import binascii
from collections.abc import Callable
from typing import Any

from milepost.core.limits import MAX_DEPTH

_SHOWN = 20
"""How many items of one container are shown as text."""
_ITEMS = {"list": "[{}]", "tuple": "({})", "set": "{{{}}}", "frozenset": "frozenset({{{}}})"}
_ITEMS |= {"torch.Size": "torch.Size([{}])"}
_PAIRS = {"dict": "{{{}}}", "defaultdict": "{{{}}}", "OrderedDict": "OrderedDict({{{}}})", "Counter": "Counter({{{}}})"}
_NAMED = ("namedtuple", "dataclass")
_FAULTS = (TypeError, ValueError, KeyError, IndexError, AttributeError)


def text_of(data: Any) -> str:
    """A value as Python would write it. Long containers are cut, and what needs more to be read says so."""
    return _text(data, 0)


def _text(data: Any, depth: int) -> str:
    kind, content = _kind(data)
    if not kind or depth > MAX_DEPTH:
        return "…" if kind else repr(data)
    try:
        if kind in _ITEMS:
            items = _cut(content, lambda item: _text(item, depth + 1))
            return _ITEMS[kind].format(f"{items}," if kind == "tuple" and len(content) == 1 else items)
        if kind in _PAIRS:
            return _PAIRS[kind].format(_cut(_pairs(kind, content), lambda pair: _pair(pair, depth + 1)))
        if kind in _NAMED:
            return f"{content[0]}({_cut(content[1], lambda pair: f'{pair[0]}={_text(pair[1], depth + 1)}')})"
        return str(_SCALARS[kind](content))
    except _FAULTS:
        return f"<a damaged {kind}>"


def _pair(pair: Any, depth: int) -> str:
    return f"{_text(pair[0], depth)}: {_text(pair[1], depth)}"


def _cut(items: Any, text: Callable[[Any], str]) -> str:
    more = [f"… {len(items) - _SHOWN:,} more"] if len(items) > _SHOWN else []
    return ", ".join([*map(text, items[:_SHOWN]), *more])


def plain_of(data: Any) -> Any:
    """A value as plain JSON: dicts, lists, numbers and texts. What JSON has no word for is a text."""
    return _plain(data, 0)


def _plain(data: Any, depth: int) -> Any:
    kind, content = _kind(data)
    if not kind or depth > MAX_DEPTH:
        return "…" if kind else data
    try:
        if kind in _ITEMS:
            return [_plain(item, depth + 1) for item in content]
        if kind in _PAIRS or kind in _NAMED:
            pairs = _pairs(kind, content)
            return {name if isinstance(name, str) else text_of(name): _plain(value, depth + 1) for name, value in pairs}
        return _SCALARS[kind](content)
    except _FAULTS:
        return f"<a damaged {kind}>"


def _pairs(kind: str, content: Any) -> Any:
    return content[1] if kind == "defaultdict" or kind in _NAMED else content


def _kind(data: Any) -> tuple[str, Any]:
    """The kind of a spelled value and its content; no kind for what JSON itself can spell."""
    if isinstance(data, dict) and len(data) == 1:
        ((kind, content),) = data.items()
        return str(kind), content
    return ("", data) if data is None or isinstance(data, (bool, int, float, str)) else ("value", data)


def _numpy(content: Any) -> Any:
    import numpy as np  # noqa: PLC0415  # only for scalars of numpy

    number = np.frombuffer(_bytes(content[1]), dtype=np.dtype(str(content[0])), count=1)[0].item()
    return number if isinstance(number, (bool, int, float)) and np.isfinite(number) else str(number)


def _bytes(content: str) -> bytes:
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


def _complex(content: Any) -> str:
    return "complex({}, {})".format(*(part["float"] if isinstance(part, dict) else part for part in content))


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": lambda content: str(int(content, 16)),
    "float": str,
    "str": lambda content: _bytes(content).decode("utf-8", "backslashreplace"),
    "complex": _complex,
    "bytes": lambda content: f"<{len(_bytes(content)):,} bytes>",
    "bytearray": lambda content: f"<{len(_bytes(content)):,} bytes>",
    "BytesIO": lambda content: f"<{len(_bytes(content)):,} bytes>",
    "pickle": lambda content: f"<pickled: {len(_bytes(content)):,} bytes, not read>",
    "numpy": _numpy,
    "enum": lambda content: f"{content[0]}.{content[1]}",
    "flag": lambda content: f"{content[0]}({content[1]})",
    "torch.dtype": lambda content: f"torch.{content}",
    "torch.device": str,
}
