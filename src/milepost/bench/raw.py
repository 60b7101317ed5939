"""The limit: bytes between page-aligned memory and one file, and nothing else."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from milepost.core.limits import MIB
from milepost.store import linux
from milepost.store.stopping import side_by_side

_WRITE_BYTES, _READ_BYTES = MIB, 8 * MIB
_DIRECT_BYTES, _DIRECT_THREADS = 4 * MIB, 4
_Call = Callable[[int, Sequence[memoryview], int], int]


def write_cached(path: Path, memory: memoryview) -> None:
    """Write a new file through the page cache, and sync it and its folder."""
    _write(path, memory, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _WRITE_BYTES, 1)


def write_direct(path: Path, memory: memoryview) -> None:
    """Write a new file past the page cache, by several threads, and sync it and its folder."""
    _write(path, memory, os.O_CREAT | os.O_EXCL | os.O_WRONLY | linux.O_DIRECT, _DIRECT_BYTES, _DIRECT_THREADS)


def read_cached(path: Path, memory: memoryview) -> None:
    """Fill the memory from a file through the page cache, by one thread."""
    _read(path, memory, os.O_RDONLY, _READ_BYTES, 1)


def read_direct(path: Path, memory: memoryview) -> None:
    """Fill the memory from a file past the page cache, by several threads."""
    _read(path, memory, os.O_RDONLY | linux.O_DIRECT, _DIRECT_BYTES, _DIRECT_THREADS)


def does_direct(folder: Path, memory: memoryview) -> bool:
    """Whether direct I/O works in this folder."""
    probe = folder / "probe"
    try:
        write_direct(probe, memory[:4096])
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return linux.O_DIRECT != 0


def write_small(folder: Path, name: str, data: bytes) -> None:
    """Write a small new file and make it durable, as little as that takes."""
    handle = os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        os.write(handle, data)
        os.fsync(handle)
    finally:
        os.close(handle)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where its file system can do that."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError:
        linux.sync_file_system(handle)
    finally:
        os.close(handle)


def drop(folder: Path) -> None:
    """Drop all files below a folder from the page cache of this machine."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)  # pages that are not written back yet would stay
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def _write(path: Path, memory: memoryview, flags: int, piece_bytes: int, threads: int) -> None:
    handle = os.open(path, flags, 0o666)
    try:
        linux.preallocate(handle, len(memory))
        _move(os.pwritev, handle, memory, piece_bytes, threads)
        os.fsync(handle)
    finally:
        os.close(handle)
    sync_folder(path.parent)


def _read(path: Path, memory: memoryview, flags: int, piece_bytes: int, threads: int) -> None:
    handle = os.open(path, flags)
    try:
        _move(os.preadv, handle, memory, piece_bytes, threads)
    finally:
        os.close(handle)


def _move(call: _Call, handle: int, memory: memoryview, piece_bytes: int, threads: int) -> None:
    def move(start: int) -> None:
        piece = memory[start : start + piece_bytes]
        if call(handle, [piece], start) != len(piece):
            raise OSError("a transfer was cut short")

    side_by_side(move, range(0, len(memory), piece_bytes), threads)
