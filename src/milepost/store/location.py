"""From what the user writes to a store: a path, the URL of a file, memory or object store, or a store itself.

A path is a `str`, `bytes`, or an object with `__fspath__`. `~` and `~name` at its start are home folders, as in a
shell. A relative path starts at the working folder of the process. In a URL, `~` is a character like any other.
"""

import os
from urllib.parse import unquote

from milepost.errors import InvalidRequest
from milepost.store.base import Store
from milepost.store.cloud.store import CloudStore
from milepost.store.cloud.url import PROVIDERS
from milepost.store.local import LocalStore
from milepost.store.memory import MemoryStore

Location = str | bytes | os.PathLike[str] | os.PathLike[bytes] | Store

_VERBS = ("create", "writer", "reader", "list", "delete", "url")
# Memory stores by name, for as long as the process lives: `memory://a` must be the same place in each call.
_MEMORY: dict[str, MemoryStore] = {}


def store_at(path: Location) -> Store:
    """The store at this place. Nothing is made or read yet. Raises InvalidRequest for a URL that is not known.

    `~` and `~name` at the start of a path are home folders. `./~` is a folder of that name.

    >>> milepost.store.store_at("file:///data/runs/a").url, milepost.store.store_at(b"/data/runs/a/").url
    ('/data/runs/a', '/data/runs/a')
    """
    if isinstance(path, (bytes, os.PathLike)):
        return _in_folder(_spelled(path))
    if not isinstance(path, str):
        if all(hasattr(path, verb) for verb in _VERBS):
            # Not isinstance: that would not see the methods that a wrapper forwards to another store.
            return path
        raise _no_place(path)
    scheme, separator, rest = path.partition("://")
    if not separator:
        return _in_folder(path)
    if scheme == "memory":
        return _MEMORY.setdefault(rest.strip("/"), MemoryStore(path.rstrip("/")))
    if scheme in PROVIDERS:
        return CloudStore(path)
    if scheme == "file":
        # All of it is the path, `?` and `#` too: two places must not become one.
        host, slash, inside = rest.partition("/")
        if host not in ("", "localhost") or not slash:
            what = "no URL names a home folder" if host.startswith("~") else f"it names the host {host!r}"
            raise InvalidRequest(f"{path!r}: {what}; a file URL has three slashes and the whole path: file:///path")
        return _in_folder(unquote(f"/{inside}", errors="surrogateescape"))
    raise InvalidRequest(
        f"{path!r} is not a path, and no URL of a known kind (file, memory, {', '.join(PROVIDERS)}); "
        "pass a Store object for other places"
    )


def required(path: Location | None) -> Location:
    """The path. Raises InvalidRequest if there is none."""
    if path is None:
        raise InvalidRequest("say where: a path, a URL or a Store")
    return path


def _no_place(path: object) -> InvalidRequest:
    return InvalidRequest(f"a checkpoint's place is a path, a URL or a Store, not {path!r}")


def _spelled(path: bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    try:
        return os.fsdecode(path)
    except TypeError:  # its `__fspath__` gives something else
        raise _no_place(path) from None


def _at_home(path: str) -> str:
    """The path, with the home folder in place of `~` or `~name` at its start."""
    if not path.startswith("~"):
        return path
    name, slash, rest = path.partition("/")
    home = os.path.expanduser(name)
    if not os.path.isabs(home) or (name == "~" and os.environ.get("HOME") == ""):
        raise InvalidRequest(
            f"{path!r} starts at the home folder {name}, which is not known; write ./{name} if you mean "
            "a folder of that name"
        )
    return os.path.join(home, rest) if slash else home


def _in_folder(path: str) -> LocalStore:
    if not path:
        raise _no_place(path)
    try:
        if b"\0" in os.fsencode(path):
            raise InvalidRequest(f"{path!r} is not a path: it holds a null character")
        return LocalStore(_at_home(path))
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{path!r} is not a path: {error.reason}") from None
    except FileNotFoundError:
        raise InvalidRequest(
            f"{path!r} starts at the working folder, which was removed; pass an absolute path"
        ) from None
