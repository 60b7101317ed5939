"""A corner of a place to try things in, of which nothing remains: not after an error, and not after Ctrl-C.

Its name starts with `.milepost-`, and nothing in it is called `manifest-` or `data/`: no reader takes it, or anything
in it, for a checkpoint or for what a save left.
"""

import contextlib
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from milepost.errors import CheckpointError, StorageError
from milepost.store import LocalStore, Store, Within
from milepost.store.advice import explain

PREFIX = ".milepost-"
_log = logging.getLogger("milepost")


@dataclass(frozen=True, slots=True)
class ScratchCorner:
    """The corner: a store, and the folder behind it where it is one of this machine."""

    store: Store
    folder: Path | None


@contextlib.contextmanager
def scratch_in(place: Store, purpose: str, name: str | None = None) -> Iterator[ScratchCorner]:
    """Inside, there is a corner of the place to try things in. Folders on the way to it are made, and removed again.

    `name`: that of a corner that several processes share; each may remove it. Raises StorageError.
    """
    name = name or scratch_name(purpose)
    if not isinstance(place, LocalStore):
        store = Within(place, name)
        try:
            yield ScratchCorner(store, None)
        finally:
            _clear(store)
        return
    folder, made = place.root / name, list[Path]()
    try:
        try:
            _make(folder, made)
        except OSError as error:
            raise StorageError(f"cannot make {folder}: {explain(error)}", errno=error.errno) from error
        yield ScratchCorner(LocalStore(folder), folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for one in reversed(made):
            with contextlib.suppress(OSError):  # others have put something there meanwhile
                one.rmdir()
        if os.path.lexists(folder):
            _log.warning("%s could not be removed: remove it yourself", folder)


def scratch_name(purpose: str) -> str:
    """A name that nobody else has."""
    return f"{PREFIX}{purpose}-{secrets.token_hex(6)}"


def _make(folder: Path, made: list[Path]) -> None:
    """Make a folder and those above it; `made` gets those that were not there, without the folder itself."""
    missing = [folder]
    while not os.path.lexists(missing[-1].parent):
        missing.append(missing[-1].parent)
    for one in reversed(missing):
        try:
            one.mkdir()
        except FileExistsError:
            if not one.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(one)) from None
            continue
        if one != folder:
            made.append(one)


def _clear(store: Store) -> None:
    try:
        store.delete(*store.list(""))
    except (CheckpointError, OSError) as error:
        _log.warning("%s could not be removed: %s", store.url, error)
