"""Host memory for copies of states: made once, pinned where there is a GPU, shared with the process that writes."""

import contextlib
import ctypes
import logging
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch

from milepost.core.limits import MIB, PAGE_BYTES
from milepost.data.transfer import new_pages, run_all

_log = logging.getLogger("milepost")
_POPULATE_AT_ONCE_BYTES = 64 * MIB
_POPULATE_THREADS = 8
_MADV_POPULATE_WRITE = 23
_SHARE_OF_FREE = 0.8
_CONTAINERS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """Memory that is kept from one save to the next. `shared`: backed by a file in memory that other processes can map.

    Nothing may use the memory when it grows or is freed.
    """

    def __init__(self, shared: bool) -> None:
        self.shared = shared
        self.capacity = 0
        self.version = 0
        self.handle = -1
        self._registered: weakref.finalize[[int], Arena] | None = None
        self._tried_to_pin = False
        self._data: torch.Tensor | None = None

    @property
    def data(self) -> torch.Tensor:
        """All of it, as bytes."""
        return self._data if self._data is not None else torch.empty(0, dtype=torch.uint8, device="cpu")

    def reserve(self, size_bytes: int, pinned: bool) -> None:
        """Have at least this much memory, pinned if asked for. `version` grows when the memory is replaced.

        Raises MemoryError or OSError if there is not enough; then the arena is empty.
        """
        if size_bytes <= self.capacity and (self._tried_to_pin or not pinned):
            return
        size_bytes = max(-(-size_bytes // PAGE_BYTES) * PAGE_BYTES, self.capacity, PAGE_BYTES)
        self.free()
        self.version += 1  # first: whatever stops this, a process that maps the old memory must not be taken as current
        self._tried_to_pin = pinned
        pages = self._new_pages(size_bytes)
        self._data = torch.frombuffer(pages, dtype=torch.uint8)
        self.capacity = size_bytes
        _populate(int(self._data.data_ptr()), size_bytes)
        if pinned:
            self._pin()

    def _new_pages(self, size_bytes: int) -> mmap.mmap:
        if not self.shared:
            return new_pages(size_bytes)
        self.handle = os.memfd_create("milepost-staging")
        os.truncate(self.handle, size_bytes)
        pages = mmap.mmap(self.handle, size_bytes)
        with contextlib.suppress(OSError, AttributeError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def _pin(self) -> None:
        """Register the memory with the driver. New pinned memory takes much longer to make, and cannot be shared."""
        address = int(self.data.data_ptr())
        error = int(torch.cuda.cudart().cudaHostRegister(address, self.capacity, 0))  # type: ignore[no-untyped-call]
        if error == 0:
            self._registered = weakref.finalize(self, _unpin, address)
        else:
            _log.warning(
                "cannot pin %d bytes of host memory (CUDA error %d); saves will copy more slowly. Is there a limit on "
                "locked memory (ulimit -l)?",
                self.capacity,
                error,
            )

    def free(self) -> None:
        """Give all of it back."""
        if self._registered is not None:
            self._registered()
        if self.handle >= 0:
            os.close(self.handle)
        self._registered, self.handle, self.capacity, self._data = None, -1, 0, None


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _populate(address: int, size_bytes: int) -> None:
    """Let the kernel map all pages now, by several threads: the copy then runs at full speed. Old kernels map later."""

    def worker(start: int) -> None:
        length = min(_POPULATE_AT_ONCE_BYTES, size_bytes - start)
        _libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)

    starts: Iterator[int] = iter(range(0, size_bytes, _POPULATE_AT_ONCE_BYTES))
    run_all(starts, lambda: worker, min(_POPULATE_THREADS, os.cpu_count() or 1))


def budget_of(given: int | None, held_bytes: int) -> int:
    """How much staging memory a rank may have: as the caller says, or what it holds and its share of what is free."""
    if given is not None:
        return given
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return held_bytes + int(free_bytes() * _SHARE_OF_FREE) // max(ranks_here, 1)


def free_bytes() -> int:
    """The free memory of the machine and of the container of this process. Very much if neither is known."""
    free = [1 << 60]
    with contextlib.suppress(OSError, ValueError, KeyError):
        free.append(_fields("/proc/meminfo")["MemAvailable:"] * 1024)
    for folder, limit, used in _CONTAINERS:
        with contextlib.suppress(OSError, ValueError):
            left = int(Path(folder, limit).read_text()) - int(Path(folder, used).read_text())
            # Cached files count as used there, and give way when memory is needed.
            stat = _fields(f"{folder}/memory.stat")
            free.append(max(left + stat.get("inactive_file", 0) + stat.get("active_file", 0), 0))
    return min(free)


def _fields(path: str) -> dict[str, int]:
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
