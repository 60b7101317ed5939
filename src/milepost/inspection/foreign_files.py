"""The files of another library's checkpoint: their size and time, and whether all are there. Reads no data."""

import contextlib
import os
import stat
from datetime import UTC, datetime

from milepost.core.manifest import ShardFile
from milepost.data.read import Files
from milepost.errors import CheckpointDamaged
from milepost.store import LocalStore, Store
from milepost.store.stopping import side_by_side

_LOOKS = 16
"""How many files are opened at the same time."""


def look_at_foreign(files: Files) -> None:
    """Raise CheckpointDamaged if a file is missing, or shorter than what it should hold."""

    def look(record: ShardFile) -> None:
        with contextlib.closing(files.make(record.rank)) as file:
            if file.reader.size_bytes < record.size_bytes:
                raise CheckpointDamaged(
                    f"{file.where} has {file.reader.size_bytes} bytes, and what it should hold ends at byte "
                    f"{record.size_bytes}"
                )

    side_by_side(look, files.manifest.files, _LOOKS)


def size_and_time(place: Store) -> tuple[int | None, str | None]:
    """The size of a local file, or of all files in a folder, and the time of the newest; not known elsewhere."""
    if not isinstance(place, LocalStore):
        return None, None
    size_bytes, newest_s = 0, 0.0
    root = str(place.root)
    for path in [root, *(os.path.join(at, name) for at, _, names in os.walk(root) for name in names)]:
        try:
            status = os.stat(path, follow_symlinks=path == root)
        except OSError:
            continue
        if not stat.S_ISDIR(status.st_mode):
            size_bytes, newest_s = size_bytes + status.st_size, max(newest_s, status.st_mtime)
    return size_bytes, iso(newest_s)


def iso(seconds: float) -> str | None:
    """A time of a file system, as in ISO 8601; None for none."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if seconds else None
