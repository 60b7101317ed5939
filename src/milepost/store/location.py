"""From what the user writes to a store: a path, a `file://` or `memory://` URL, or a store itself."""

import os
from urllib.parse import unquote

from milepost.errors import InvalidRequest
from milepost.store.base import Store
from milepost.store.local import LocalStore
from milepost.store.memory import MemoryStore

Location = str | os.PathLike[str] | Store

_VERBS = ("create", "writer", "reader", "list", "delete", "url")
# Memory stores by name, for as long as the process lives: `memory://a` must be the same place in each call.
_MEMORY: dict[str, MemoryStore] = {}


def store_at(path: Location) -> Store:
    """The store at this place. Nothing is made or read yet. Raises InvalidRequest for a URL that is not known.

    >>> milepost.store.store_at("file:///data/runs/a").url
    '/data/runs/a'
    """
    if isinstance(path, os.PathLike):
        return _in_folder(os.fspath(path))
    if not isinstance(path, str) and all(hasattr(path, verb) for verb in _VERBS):
        # Not isinstance: that would not see the methods that a wrapper forwards to another store.
        return path
    if not path or not isinstance(path, str):
        raise InvalidRequest(f"a checkpoint's place is a path, a URL or a Store, not {path!r}")
    scheme, separator, rest = path.partition("://")
    if not separator:
        return _in_folder(path)
    if scheme == "memory":
        return _MEMORY.setdefault(rest.strip("/"), MemoryStore(path.rstrip("/")))
    if scheme == "file":
        # All of it is the path, `?` and `#` too: two places must not become one.
        host, slash, inside = rest.partition("/")
        if host not in ("", "localhost") or not slash:
            raise InvalidRequest(f"{path!r} names the host {host!r}; a file URL has three slashes: file:///path")
        return _in_folder(unquote(f"/{inside}", errors="surrogateescape"))
    raise InvalidRequest(f"{path!r} is not a path, file:// or memory:// URL; pass a Store object for other places")


def required(path: Location | None) -> Location:
    """The path. Raises InvalidRequest if there is none."""
    if path is None:
        raise InvalidRequest("say where: a path, a URL or a Store")
    return path


def _in_folder(path: str) -> LocalStore:
    try:
        if b"\0" in os.fsencode(path):
            raise InvalidRequest(f"{path!r} is not a path: it holds a null character")
        return LocalStore(path)
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{path!r} is not a path: {error.reason}") from None
    except FileNotFoundError:
        raise InvalidRequest(
            f"{path!r} starts at the working folder, which was removed; pass an absolute path"
        ) from None
