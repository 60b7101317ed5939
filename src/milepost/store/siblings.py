"""Places beside a place, and second names for objects of theirs."""

import os
from typing import TypeVar

from milepost.errors import InvalidRequest
from milepost.store.base import Store
from milepost.store.local import LocalStore
from milepost.store.memory import MemoryStore
from milepost.store.prefixed import Within, innermost

S = TypeVar("S", LocalStore, MemoryStore)


def parent_of(store: Store) -> tuple[Store, str] | None:
    """The place around a store, and the name of the store in it; None where there is none, or it cannot be told."""
    if isinstance(store, LocalStore):
        above = store.root.parent
        return (LocalStore(above), store.root.name) if above != store.root else None
    if hasattr(store, "parent"):
        found: tuple[Store, str] | None = store.parent()
        return found
    inner = getattr(store, "inner", None)
    return parent_of(inner) if inner is not None else None


def beside(store: Store, name: str) -> Store:
    """The store of the place that has this name beside a store. Raises InvalidRequest where that cannot be told."""
    if isinstance(store, LocalStore):
        # A symbolic link may lead to the step, as `latest` does, or from the run to where the step lies.
        behind = os.path.join(os.path.dirname(os.path.realpath(store.root)), name)
        if not os.path.isdir(store.root.parent / name) and os.path.isdir(behind):
            return LocalStore(behind)
    found = parent_of(store)
    if found is None:
        raise InvalidRequest(
            f"{store.url} uses data of {name!r} beside it, and it cannot be told what is beside it. Open it by its path"
        )
    return Within(found[0], name)


def are_one(one: Store, other: Store) -> bool:
    """Whether two stores are the same place."""
    (one, name), (other, other_name) = innermost(one, "-"), innermost(other, "-")
    same = one is other or (not isinstance(one, MemoryStore) and type(one) is type(other) and one.url == other.url)
    return same and name == other_name


def link(target: Store, name: str, source: Store, source_name: str) -> bool:
    """Give an object of one place a second name in another one: True if it has that now. No byte is copied.

    False where the stores have no such names, or the object is gone: then the caller writes the data itself. The name
    is as durable as others that were created in its folder: whoever commits a file there makes it durable too.
    """
    linking = getattr(target, "link", None)
    return linking is not None and bool(linking(name, source, source_name))
