"""How users spell a place: strings, bytes, objects with `__fspath__`, and URLs that pathlib took for paths."""

import os
import re
from typing import Any

from milepost.errors import InvalidRequest

_LOST_SLASH = re.compile(
    r"(file|memory|https?|s3a?|gc?s|az|azure|abfss?|hf|s?ftp|ssh|github|webdav):/(?!/)(.*)", re.DOTALL
)
"""A URL that lost one of its two slashes. A folder of such a name is written with `./` before it."""


def spelled(path: Any) -> str:
    """The path or URL as one string. Raises InvalidRequest for what is none, and for a URL that pathlib has spoilt."""
    if _is_universal(path):
        return _of_universal(path)
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise no_place(path)
    try:
        text = path if isinstance(path, str) else os.fsdecode(path)
    except TypeError:  # its `__fspath__` gives something else
        raise no_place(path) from None
    lost = _LOST_SLASH.match(text)
    if lost is not None:
        why = (
            "pathlib makes one slash of two: pass a string"
            if isinstance(path, os.PathLike)
            else "a URL has two slashes"
        )
        raise InvalidRequest(
            f"{text!r} is not a URL; {why}, {f'{lost[1]}://{lost[2]}'!r}. (For a folder of that name, write ./{text})"
        )
    return text


def no_place(path: object) -> InvalidRequest:
    """The error for something that is no place."""
    return InvalidRequest(f"a checkpoint's place is a path, a URL or a Store, not {path!r}")


def shown(path: object) -> str:
    """A place as the user passed it, for messages: without the password and the query of a URL."""
    url = getattr(path, "url", None)
    if isinstance(url, str):
        return url
    text = os.fsdecode(path) if isinstance(path, bytes) else str(path)
    return without_secrets(text)


def inside(path: str | os.PathLike[str], name: str) -> str:
    """The path or URL of a name below a place. The settings of a URL stay at its end."""
    place = spelled(path)
    if "://" not in place or place.lower().startswith("file://"):
        return os.path.join(place, name)
    base, mark, query = place.partition("?")
    return f"{base.rstrip('/')}/{name}{mark}{query}"


def without_secrets(url: str) -> str:
    """A URL without its password and its query; a path as it is."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.lower() == "file":
        return url
    host, slash, path = rest.partition("?")[0].partition("/")
    user, at, host = host.rpartition("@")
    return f"{scheme}{separator}{user.partition(':')[0]}{at}{host}{slash}{path}"


def _is_universal(path: object) -> bool:
    """Whether it is a path of universal_pathlib to another place than the local disk: its `str` is the URL."""
    protocol = getattr(path, "protocol", None)
    return isinstance(protocol, str) and hasattr(path, "storage_options") and protocol not in ("", "file", "local")


def _of_universal(path: Any) -> str:
    if path.storage_options:
        raise InvalidRequest(
            f"{shown(path)!r} has storage options for fsspec, which Milepost does not use: pass the URL as a string, "
            "or a milepost.store.CloudStore with options of its own"
        )
    return str(path)
