"""Places in places: whether two are one or lie in each other, and whether a folder is a run of checkpoints."""

import os
import re
from typing import Literal

from milepost.commit.beside import METADATA, names_at
from milepost.commit.find import generations_in
from milepost.errors import InvalidRequest
from milepost.store import LocalStore, Store, Within

_DIGIT = re.compile("[0-9]")


def relation(source: Store, target: Store) -> Literal["same", "inside", ""]:
    """Whether the target is the place of the source, or lies in it. Empty where neither is known."""
    here, there = _spot(source), _spot(target)
    if here == there:
        return "same"
    return "inside" if here[0] == there[0] and f"{there[1]}/".startswith(f"{here[1]}/") else ""


def _spot(store: Store) -> tuple[object, str]:
    """What two stores have in common if they may be one place, and the path in it."""
    inner: object = store
    while hasattr(inner, "inner"):  # `Within`, `AtGeneration`, and stores of others that wrap one
        inner = inner.inner
    if isinstance(inner, LocalStore):
        return LocalStore, os.path.realpath(store.url)
    options = getattr(inner, "options", None)
    if options is not None:
        return (options.endpoint, options.account), store.url.rstrip("/")
    return id(inner), store.url.rstrip("/")


def folder_in(root: Store, name: str) -> Store:
    """The store of one folder. Not `Within` in a local folder: each listing would go through the whole run first."""
    return LocalStore(root.root / name) if isinstance(root, LocalStore) else Within(root, name)


def refuse_file(target: Store, advice: str) -> None:
    """Raise InvalidRequest where a checkpoint, which is a folder, would be written to a file. `advice`: what to do."""
    if isinstance(target, LocalStore) and os.path.isfile(target.root):
        raise InvalidRequest(f"{target.url} is a file, not a folder; {advice}")


def refuse_run(target: Store, becomes: str) -> None:
    """Raise InvalidRequest where a checkpoint would be written over a run, and not into it: it would hide the steps.

    `becomes`: what the new checkpoint is, for the message.
    """
    names = names_at(target)
    if generations_in(target, names):
        return
    folders = (name.removesuffix("/") for name in names if name.endswith("/") and name != "data/")
    for name in filter(_DIGIT.search, folders):
        place = folder_in(target, name)
        inside = names_at(place)
        if METADATA in inside or generations_in(place, inside):
            raise InvalidRequest(
                f"{target.url} is a run: it has a checkpoint in {name}. Say which step the {becomes} becomes: "
                f"{target.url.rstrip('/')}/step-0000000100, for example"
            )
