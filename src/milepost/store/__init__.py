"""Stores: bytes by name. `Store` is the port; folders, memory, object stores, and places that are only read."""

from milepost.store.base import Reader, Store, Traits, Writer
from milepost.store.cloud import CloudOptions, CloudStore
from milepost.store.fsspec_store import FsspecView
from milepost.store.generation import AtGeneration
from milepost.store.http import HttpStore
from milepost.store.local import LocalStore
from milepost.store.location import Location, store_at
from milepost.store.memory import MemoryStore
from milepost.store.prefixed import Within

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
