"""Stores: bytes by name. `Store` is the port; folders, memory, object stores, and places that are only read."""

import importlib
from typing import TYPE_CHECKING

from milepost.store.base import Reader, Store, Traits, Writer
from milepost.store.generation import AtGeneration
from milepost.store.local import LocalStore
from milepost.store.location import Location, store_at
from milepost.store.memory import MemoryStore
from milepost.store.prefixed import Within

if TYPE_CHECKING:
    from milepost.store.cloud.options import CloudOptions
    from milepost.store.cloud.store import CloudStore
    from milepost.store.fsspec_store import FsspecView
    from milepost.store.http import HttpStore

__all__ = [
    "AtGeneration",
    "CloudOptions",
    "CloudStore",
    "FsspecView",
    "HttpStore",
    "LocalStore",
    "Location",
    "MemoryStore",
    "Reader",
    "Store",
    "Traits",
    "Within",
    "Writer",
    "store_at",
]

_WHEN_USED = {
    "CloudOptions": "milepost.store.cloud.options",
    "CloudStore": "milepost.store.cloud.store",
    "FsspecView": "milepost.store.fsspec_store",
    "HttpStore": "milepost.store.http",
}


def __getattr__(name: str) -> object:
    """Import what talks to a network when it is first used: a path needs none of it."""
    if name in _WHEN_USED:
        return getattr(importlib.import_module(_WHEN_USED[name]), name)
    raise AttributeError(f"module 'milepost.store' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
