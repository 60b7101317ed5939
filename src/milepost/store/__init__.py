"""Stores: bytes by name. `Store` is the port; local folders and memory are behind it."""

from milepost.store.base import Reader, Store, Writer
from milepost.store.local import LocalStore
from milepost.store.location import Where, store_at
from milepost.store.memory import MemoryStore
from milepost.store.prefixed import Within

__all__ = ["LocalStore", "MemoryStore", "Reader", "Store", "Where", "Within", "Writer", "store_at"]
