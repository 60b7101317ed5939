"""Linux file operations that Python's `os` lacks. Where one is missing or refused, each says what happens."""

import ctypes
import errno
import mmap
import os
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_WRITE_OUT = 2  # SYNC_FILE_RANGE_WRITE: start, and do not wait
_EMPTY_PATH, _DIRECT_MASK = 0x1000, 0x2000  # AT_EMPTY_PATH, STATX_DIOALIGN
_STATX_BYTES, _MASK_AT, _DIRECT_AT = 256, 0, 152
_IN_MEMORY = {0x01021994, 0x858458F6}  # tmpfs, ramfs
_SAMPLES = 4
"""At how many pages of a range the page cache is asked."""
O_DIRECT: int = getattr(os, "O_DIRECT", 0)


def _function(name: str, *arguments: Any, result: Any = ctypes.c_int) -> Any:
    """A function of the C library, or None where it has none of this name."""
    found = getattr(_libc, name, None)
    if found is not None:
        found.argtypes, found.restype = arguments, result
    return found


_fallocate = _function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_sync_range = _function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_statx = _function("statx", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
_fstatfs = _function("fstatfs", ctypes.c_int, ctypes.c_void_p)
_mincore = _function("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_map = _function(
    "mmap",
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
    result=ctypes.c_void_p,
)
_unmap = _function("munmap", ctypes.c_void_p, ctypes.c_size_t)
_syncfs = _function("syncfs", ctypes.c_int)
_rename = _function("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
_HERE, _NO_REPLACE = -100, 1  # AT_FDCWD, RENAME_NOREPLACE
_UNKNOWN_FLAG = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def preallocate(handle: int, size_bytes: int) -> None:
    """Reserve the blocks of a file. Raises OSError where there is no room; ignored where the file system cannot do it.

    Not `posix_fallocate`, which writes zeros over the whole file where the file system has no such call.
    """
    if _fallocate is None or size_bytes == 0:
        return
    if _fallocate(handle, 0, 0, size_bytes) != 0 and ctypes.get_errno() in _FULL:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def sync_file_system(handle: int) -> None:
    """Return once all of the file system that a handle is on is durable. Raises OSError."""
    if _syncfs is None:
        os.sync()
    elif _syncfs(handle) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def rename_to_free_name(source: str, target: str) -> None:
    """Rename a file. Raises FileExistsError for a taken name, where the file system can tell; else it is replaced."""
    if _rename is None:
        os.rename(source, target)
    elif _rename(_HERE, os.fsencode(source), _HERE, os.fsencode(target), _NO_REPLACE) != 0:
        number = ctypes.get_errno()
        if number not in _UNKNOWN_FLAG:
            raise OSError(number, os.strerror(number), source, None, target)
        os.rename(source, target)


def start_writeback(handle: int, offset: int, length: int) -> None:
    """Start to write a range to the device, so that the final sync has little left to do. That sync reports errors."""
    if _sync_range is not None:
        _sync_range(handle, offset, length, _WRITE_OUT)


def direct_handle(handle: int, access: int) -> int | None:
    """A second handle on an open file, for direct I/O; None where that is not possible or would gain nothing."""
    if not O_DIRECT or not _does_direct(handle):
        return None
    try:
        return os.open(f"/proc/self/fd/{handle}", access | O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None


def _does_direct(handle: int) -> bool:
    """Whether the file system supports direct I/O. Those in memory accept the flag, but copy nevertheless."""
    words = (ctypes.c_long * 32)()  # struct statfs begins with the type of the file system
    if _fstatfs is not None and _fstatfs(handle, words) == 0 and words[0] in _IN_MEMORY:
        return False
    if _statx is None:
        return True
    record = (ctypes.c_uint32 * (_STATX_BYTES // 4))()
    if _statx(handle, b"", _EMPTY_PATH, _DIRECT_MASK, record) != 0 or not record[_MASK_AT // 4] & _DIRECT_MASK:
        return True  # an old kernel does not know; opening and writing will show
    return 0 < record[_DIRECT_AT // 4] <= mmap.PAGESIZE


def address_of(view: memoryview) -> int:
    """Where the memory of a view starts; 0 for read-only and empty memory."""
    if view.readonly or not len(view):
        return 0
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Residency:
    """Which parts of an open file are in the page cache. All of them, where the kernel gives no answer."""

    def __init__(self, handle: int, size_bytes: int) -> None:
        self._size = size_bytes
        self._at: int | None = None
        if _map is not None and _mincore is not None and size_bytes:
            found = _map(None, size_bytes, 0, mmap.MAP_SHARED, handle, 0)
            self._at = None if found in (None, ctypes.c_void_p(-1).value) else found

    def is_cached(self, offset: int, length: int) -> bool:
        """Whether most of a range is in the cache, by a look at some of its pages.

        To look at all of them would take a quarter of the time in which they are read, and each look 2 µs.
        """
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        count = -(-(min(offset + length, self._size) - start) // mmap.PAGESIZE)
        if self._at is None or count <= 0:
            return True
        looked_at = range(0, count, -(-count // _SAMPLES))
        found = ctypes.create_string_buffer(len(looked_at))
        at, result = self._at + start, ctypes.addressof(found)
        for number, page in enumerate(looked_at):
            if _mincore(at + page * mmap.PAGESIZE, 1, result + number) != 0:
                return True
        return 2 * sum(byte & 1 for byte in found.raw) >= len(looked_at)

    def close(self) -> None:
        """Release the mapping."""
        at, self._at = self._at, None
        if at is not None:
            _unmap(at, self._size)
