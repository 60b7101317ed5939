"""What a place gives: raw reads and writes beside `milepost.save` and `milepost.load`, in one process."""

import contextlib
import platform
import time
from collections.abc import Iterator

import torch

from milepost.bench.folder import FolderContenders
from milepost.bench.objects import ObjectContenders
from milepost.bench.records import BenchResult
from milepost.bench.rounds import rows_of, run_rounds
from milepost.core.limits import MIB
from milepost.doctor.mounts import file_system_of
from milepost.doctor.scratch import ScratchCorner, scratch_in
from milepost.errors import CheckpointError, InvalidRequest, StorageError
from milepost.store import Location
from milepost.store.advice import explain
from milepost.store.location import store_to_save
from milepost.version import __version__

SIZE_BYTES = 256 * MIB
SECONDS = 60.0
_PIECE_BYTES = 4096


def measure(path: Location, *, size_bytes: int = SIZE_BYTES, seconds: float = SECONDS) -> BenchResult:
    """Measure what a place gives, for about so many seconds. Everything that is written for that is removed again.

    `size_bytes`: how much is written and read in one run; it takes three times as much memory. Raises StorageError for
    a place that does not do its work, and InvalidRequest for one that is only read, and for too little memory.
    """
    store, began = store_to_save(path), time.monotonic()
    size_bytes = max(size_bytes // _PIECE_BYTES, 1) * _PIECE_BYTES
    _refuse_too_large(size_bytes)
    with _explained(store.url), scratch_in(store, "bench") as corner:
        contenders = list(_contenders(corner, size_bytes).all())
        rounds = run_rounds(contenders, seconds - (time.monotonic() - began))
        found = file_system_of(corner.folder) if corner.folder is not None else None
    return BenchResult(
        url=store.url,
        kind="object store" if corner.folder is None else "folder",
        place=found.text if found is not None else store.url,
        size_bytes=size_bytes,
        rounds=len(rounds),
        seconds=round(time.monotonic() - began, 3),
        versions=f"milepost {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        rows=rows_of(contenders, rounds),
    )


def _refuse_too_large(size_bytes: int) -> None:
    try:
        torch.empty(3 * size_bytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise InvalidRequest(
            f"there is no memory for three times {size_bytes / MIB:,.0f} MiB; measure with less (--size)"
        ) from error


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    """Inside, an error of the system says where it was, and what to do."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise StorageError(f"cannot measure {url}: {explain(error)}", errno=error.errno) from error


def _contenders(corner: ScratchCorner, size_bytes: int) -> FolderContenders | ObjectContenders:
    if corner.folder is not None:
        return FolderContenders(corner.folder, size_bytes)
    if not corner.store.traits.part_bytes:
        raise InvalidRequest(f"{corner.store.url} is neither a folder nor an object store; only those are measured")
    return ObjectContenders(corner.store, size_bytes)
