"""Which storage a place asks for."""

import os
from typing import Any

from milepost.dcp._engine.lent import lend
from milepost.dcp.filesystem import FileSystemReader, FileSystemWriter


def storage_setup(storage: Any, checkpoint_id: str | os.PathLike[str] | None, reader: bool = False) -> Any:
    """The storage to use, reset to `checkpoint_id`; where none is given, Milepost's for that place."""
    if storage:
        if checkpoint_id is not None:
            storage.reset(checkpoint_id)
        return storage
    if not checkpoint_id:
        raise RuntimeError("`checkpoint_id` must be specified if storage_reader/storage_writer is None.")
    target = FileSystemReader if reader else FileSystemWriter
    if not target.validate_checkpoint_id(checkpoint_id):
        raise RuntimeError(
            "Cannot detect which StorageReader or StorageWriter to use. "
            f"Please specify the storage_reader/storage_writer for {checkpoint_id!r}."
        )
    found = target(checkpoint_id)
    found.reset(checkpoint_id)
    return found


_storage_setup = storage_setup

lend(__name__)
