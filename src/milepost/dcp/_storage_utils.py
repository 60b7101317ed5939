"""Which storage a place asks for."""

import os
from collections.abc import Iterator
from typing import Any

from milepost.dcp._engine.lent import lend
from milepost.dcp.filesystem import FileSystemReader, FileSystemWriter
from milepost.errors import InvalidRequest
from milepost.store import store_at
from milepost.store.read_only import refuse_read_only


def reset_to(storage: Any, checkpoint_id: str | os.PathLike[str] | None) -> Any:
    """The storage that was given, reset to the place. None where only a place was given."""
    if storage:
        if checkpoint_id is not None:
            storage.reset(checkpoint_id)
        return storage
    if not checkpoint_id:
        raise RuntimeError("`checkpoint_id` must be specified if storage_reader/storage_writer is None.")
    return None


def storage_setup(storage: Any, checkpoint_id: str | os.PathLike[str] | None, reader: bool = False) -> Any:
    """The storage to use, reset to `checkpoint_id`; where none is given, what knows that place."""
    given = reset_to(storage, checkpoint_id)
    if given is not None:
        return given
    missing = ""
    for target in _candidates(reader):
        try:
            if not target.validate_checkpoint_id(checkpoint_id):
                continue
        except ImportError as error:  # fsspec knows such places, and needs another package for them
            missing = f" {error}."
            continue
        found = target(checkpoint_id)
        found.reset(checkpoint_id)
        return found
    if not reader:
        missing = _why_not(checkpoint_id) or missing
    raise RuntimeError(
        "Cannot detect which StorageReader or StorageWriter to use. "
        f"Please specify the storage_reader/storage_writer for {checkpoint_id!r}.{missing}"
    )


def _why_not(checkpoint_id: Any) -> str:
    """Why a place is refused that is only read; empty for others."""
    try:
        refuse_read_only(store_at(checkpoint_id))
    except InvalidRequest as error:
        return f" {error}"
    return ""


def _candidates(reader: bool) -> Iterator[Any]:
    """The storage to try, in order: Milepost's own places, then those that fsspec knows, where it is installed."""
    yield FileSystemReader if reader else FileSystemWriter
    try:
        from milepost.dcp._fsspec_filesystem import FsspecReader, FsspecWriter  # noqa: PLC0415  # needs fsspec
    except ImportError:
        return
    yield FsspecReader if reader else FsspecWriter


_storage_setup = storage_setup

lend(__name__)
