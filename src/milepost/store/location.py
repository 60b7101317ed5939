"""From what the user writes to a store: a path, a URL, or a store itself.

A path or URL is a `str`, `bytes`, or an object with `__fspath__`. `~` and `~name` at the start of a path are home
folders, as in a shell. A relative path starts at the working folder of the process. In a URL, `~` is a character like
any other. `milepost.store.spelling` has the first step, from what was passed to one string.
"""

import os
from typing import cast
from urllib.parse import unquote

from milepost.errors import InvalidRequest
from milepost.store.base import Store
from milepost.store.local import LocalStore
from milepost.store.memory import MemoryStore
from milepost.store.read_only import refuse_read_only
from milepost.store.spelling import no_place, spelled

Location = str | bytes | os.PathLike[str] | os.PathLike[bytes] | Store

_VERBS = ("create", "writer", "reader", "list", "delete", "url", "traits")
# Memory stores by name, for as long as the process lives: `memory://a` must be the same place in each call.
_MEMORY: dict[str, MemoryStore] = {}


def store_at(path: Location) -> Store:
    """The store at this place. Nothing is made or read yet. Raises InvalidRequest for a URL that is not known.

    `~` and `~name` at the start of a path are home folders. `./~` is a folder of that name. Kinds of URLs: `file://`,
    `memory://`; of object stores `s3://`, `s3a://`, `gs://`, `gcs://`, `az://`, `azure://`, `abfs://`, `abfss://`; and
    for reading only `https://`, `http://` and what fsspec knows.

    >>> milepost.store.store_at("file:///data/runs/a").url, milepost.store.store_at(b"/data/runs/a/").url
    ('/data/runs/a', '/data/runs/a')
    """
    if all(hasattr(path, verb) for verb in _VERBS):
        # Not isinstance: that would not see the methods that a wrapper forwards to another store.
        return cast("Store", path)
    path = spelled(path)
    scheme, separator, rest = path.partition("://")
    return _at_url(scheme.lower(), rest, path) if separator else _in_folder(path)


def _at_url(scheme: str, rest: str, path: str) -> Store:
    if scheme == "memory":
        return _MEMORY.setdefault(rest.strip("/"), MemoryStore(path.rstrip("/")))
    if scheme == "file":
        # All of it is the path, `?` and `#` too: two places must not become one.
        host, slash, inside = rest.partition("/")
        if host not in ("", "localhost") or not slash:
            what = "no URL names a home folder" if host.startswith("~") else f"it names the host {host!r}"
            raise InvalidRequest(f"{path!r}: {what}; a file URL has three slashes and the whole path: file:///path")
        return _in_folder(unquote(f"/{inside}", errors="surrogateescape"))
    # What talks to a network takes a while to import, and most places are paths.
    from milepost.store.cloud.url import PROVIDERS  # noqa: PLC0415

    if scheme in PROVIDERS:
        from milepost.store.cloud.store import CloudStore  # noqa: PLC0415

        return CloudStore(f"{scheme}://{rest}")
    if scheme in ("http", "https"):
        from milepost.store.http import HttpStore  # noqa: PLC0415

        return HttpStore(path)
    from milepost.store.fsspec_store import view_by_fsspec  # noqa: PLC0415

    return view_by_fsspec(path)


def store_to_save(path: Location | None) -> Store:
    """The store at this place, for a save. Raises InvalidRequest if there is none, or if it is only read."""
    store = store_at(required(path))
    refuse_read_only(store)
    return store


def required(path: Location | None) -> Location:
    """The path. Raises InvalidRequest if there is none."""
    if path is None:
        raise InvalidRequest("say where: a path, a URL or a Store")
    return path


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
        raise no_place(path)
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
