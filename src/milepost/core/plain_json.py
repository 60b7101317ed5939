"""Records as JSON, whatever text is in them."""

from typing import Any

import msgspec


def plain_json(record: msgspec.Struct) -> bytes:
    r"""A record as JSON. NaN is null. Text that is no Unicode, as file systems permit, is spelled: `\udcff`."""
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        return msgspec.json.encode(_as_text(msgspec.to_builtins(record)))


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_as_text(name): _as_text(inner) for name, inner in value.items()}
    return [_as_text(inner) for inner in value] if isinstance(value, (list, tuple)) else value
