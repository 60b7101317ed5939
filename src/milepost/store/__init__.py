"""Stores: bytes by name. `Store` is the port; local folders, memory and object stores are behind it."""

from milepost.store.base import Reader, Store, Traits, Writer
from milepost.store.cloud import CloudOptions, CloudStore
from milepost.store.generation import AtGeneration
from milepost.store.local import LocalStore
from milepost.store.location import Location, store_at
from milepost.store.memory import MemoryStore
from milepost.store.prefixed import Within

__all__ = [
    "AtGeneration",
    "CloudOptions",
    "CloudStore",
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
