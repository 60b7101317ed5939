"""The limit for all contenders: bytes between page-aligned memory and one file, and nothing else.

The memory may be shorter than the file: it is then used again from its start. So a small pinned buffer can stand in for
the memory of a device.
"""

import ctypes
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PAGE_BYTES = 4096
WRITE_BYTES = 1 << 20
"""The size of one buffered write. Larger calls at round offsets get huge pages in the page cache. In a virtual machine
that returns free memory to its host, these took up to three times the CPU seconds."""

READ_BYTES = 8 << 20
DIRECT_BYTES, DIRECT_THREADS = 4 << 20, 4

_libc = ctypes.CDLL(None)


def aligned(size_bytes: int) -> memoryview:
    """New memory of whole pages, at least one. Every page has been touched."""
    # Private: the kernel treats shared anonymous memory as pages of a file.
    memory = mmap.mmap(-1, max(1, padded(size_bytes)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, len(memory))
    return memoryview(memory)


def padded(size_bytes: int) -> int:
    """The size, rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def write(path: Path, memory: memoryview, size_bytes: int, preallocate: bool = True) -> None:
    """Write a file of `size_bytes` through the page cache, and sync it."""
    handle = os.open(path, os.O_CREAT | os.O_WRONLY, 0o666)
    try:
        if preallocate:
            _preallocate(handle, size_bytes)
        _transfer(os.pwritev, handle, memory, size_bytes, WRITE_BYTES)
        os.fsync(handle)
    finally:
        os.close(handle)


def write_direct(path: Path, memory: memoryview, size_bytes: int) -> None:
    """Write a file of `size_bytes`, in whole pages, by direct I/O with several threads, and sync it."""
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o666)
    try:
        _preallocate(handle, size_bytes)
        _transfer(os.pwritev, handle, memory, size_bytes, DIRECT_BYTES, DIRECT_THREADS)
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path, memory: memoryview, size_bytes: int) -> None:
    """Read `size_bytes` of a file through the page cache, directly into place, with one thread."""
    handle = os.open(path, os.O_RDONLY)
    try:
        _transfer(os.preadv, handle, memory, size_bytes, READ_BYTES)
    finally:
        os.close(handle)


def read_direct(path: Path, memory: memoryview, size_bytes: int) -> None:
    """Read `size_bytes` of a file, in whole pages, by direct I/O, directly into place, with several threads."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        _transfer(os.preadv, handle, memory, size_bytes, DIRECT_BYTES, DIRECT_THREADS)
    finally:
        os.close(handle)


def direct_works_in(folder: Path, rank: int = 0, memory: memoryview | None = None) -> bool:
    """Whether direct I/O works in this folder, from this memory if given. Several ranks may call this at once."""
    probe = folder / f"probe-{rank}"
    try:
        write_direct(probe, memory or aligned(PAGE_BYTES), PAGE_BYTES)
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def _preallocate(handle: int, size_bytes: int) -> None:
    # Not posix_fallocate: it writes zeros where the file system cannot preallocate. A failure does not matter here.
    _libc.fallocate(handle, 0, ctypes.c_long(0), ctypes.c_long(size_bytes))


def _transfer(
    call: Callable[..., int], handle: int, memory: memoryview, size_bytes: int, piece_bytes: int, threads: int = 1
) -> None:
    """Call pwritev or preadv for all pieces. Memory that is shorter than the file holds whole pieces."""

    def move(position: int) -> None:
        start, wanted = position % len(memory), min(piece_bytes, size_bytes - position)
        if call(handle, [memory[start : start + wanted]], position) != wanted:
            raise OSError("a transfer was cut short")

    positions: Any = range(0, size_bytes, piece_bytes)
    if threads == 1:
        for position in positions:
            move(position)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(move, positions))
