"""How bytes move: the number of workers, the memory of each, and their progress."""

import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, TypeVar

from milepost.core.limits import BLOCK_BYTES, KIB, MIB
from milepost.core.option_values import check_values
from milepost.data.threads import Crew, Latch
from milepost.errors import InvalidRequest, SaveCancelled
from milepost.events.operation import carried
from milepost.store import Traits
from milepost.store.stopping import stopping_when

J = TypeVar("J")
Action = Literal["save", "load", "verify", "diff", "copy", "stats"]
HOST_MEMORY_BYTES = 512 * MIB
"""What a save or load may use beyond the state itself, unless the caller says otherwise."""
MAX_THREADS = 256
_PIECE_BYTES = 32 * KIB
_THREADS = 4
_BLOCK_BYTES = 4 * MIB
_SMALL_PART_BYTES = 8 * MIB
_TO_DEVICE_BYTES = 8 * MIB
_FROM_THE_CACHE = 16
"""How many threads read from the page cache at most, where there are as many CPUs."""
_THROUGH_THE_CACHE = 2
"""How many threads write to the page cache at once: a file has one lock there, and more threads only spin on it."""
_REPORT_EVERY_S = 0.1
_log = logging.getLogger("milepost")


@dataclass(frozen=True, slots=True)
class Transfer:
    """How a rank moves bytes between memory and store. The defaults were measured; most jobs need no others.

    `threads`: how many blocks are in flight at once; each thread copies, checks and writes (or reads) one. Fewer are
    used through the page cache, where its locks and Python's are the limit.
    `block_bytes`: how much one request moves. The memory in use is the product of both. On an object store, the
    defaults mean what suits it: more requests at once, and larger ones, within `host_memory_bytes`.
    `direct`: bypass the operating system's page cache where the store can do that and it is faster. Without it, the
    data is in the cache for the next reader. Raises InvalidRequest for numbers out of range.

    >>> few = milepost.Transfer(threads=1, block_bytes=1 << 20)
    >>> milepost.save({"w": torch.ones(3)}, "memory://few", transfer=few).data_bytes
    12
    """

    threads: int = _THREADS
    block_bytes: int = _BLOCK_BYTES
    direct: bool = True
    _limit_bytes: int = field(default=HOST_MEMORY_BYTES, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        check_values({"threads": self.threads, "block_bytes": self.block_bytes, "direct": self.direct})
        if not 1 <= self.threads <= MAX_THREADS:
            raise InvalidRequest(f"a transfer has 1 to {MAX_THREADS} threads, not {self.threads}")
        if self.block_bytes < BLOCK_BYTES or self.block_bytes % BLOCK_BYTES:
            raise InvalidRequest(f"block_bytes is a multiple of {BLOCK_BYTES}, not {self.block_bytes}")

    @property
    def memory_bytes(self) -> int:
        """The memory that all blocks take together."""
        return self.threads * self.block_bytes

    @property
    def limit_bytes(self) -> int:
        """The most memory that the call may use beyond the state: its `host_memory_bytes`."""
        return self._limit_bytes

    def threads_for(self, total_bytes: int, pieces: int, block_bytes: int) -> int:
        """How many threads to use for this many bytes and pieces, with blocks of this size.

        Fewer where blocks are larger than `self.block_bytes`, to keep within the memory. Fewer also where pieces are
        small: then the time goes into Python, which runs one thread at a time.
        """
        by_memory = self.threads * self.block_bytes // block_bytes
        by_pieces = total_bytes // (_PIECE_BYTES * max(pieces, 1))
        return max(1, min(self.threads, by_memory, by_pieces, -(-total_bytes // block_bytes)))

    def threads_to_write(self, total_bytes: int, pieces: int, *, cached: bool) -> int:
        """How many threads to use to write one file, through the page cache or past it."""
        threads = self.threads_for(total_bytes, pieces, self.block_bytes)
        return min(threads, _THROUGH_THE_CACHE) if cached else threads

    def while_looked_at(self) -> "Transfer":
        """The same, with twice as many blocks: so that some are being written while others are looked at."""
        most = self._limit_bytes // self.block_bytes
        return replace(self, threads=max(1, min(2 * self.threads, most))) if self.threads == _THREADS else self

    def within(self, host_memory_bytes: int) -> "Transfer":
        """The same, with fewer threads or smaller blocks if it would use more memory than this."""
        check_values({"host_memory_bytes": host_memory_bytes})
        if host_memory_bytes < BLOCK_BYTES:
            raise InvalidRequest(
                f"host_memory_bytes is {host_memory_bytes}, and a transfer needs at least {BLOCK_BYTES // KIB} KiB"
            )
        block = min(self.block_bytes, host_memory_bytes // BLOCK_BYTES * BLOCK_BYTES)
        threads = min(self.threads, host_memory_bytes // block)
        return Transfer(threads, block, self.direct, _limit_bytes=host_memory_bytes)

    def in_units_of(self, size_bytes: int) -> "Transfer":
        """The same, with blocks that are multiples of this size: smaller ones, if there is room for one unit."""
        return replace(self, block_bytes=max(self.block_bytes // size_bytes, 1) * size_bytes)

    def to_write(self, traits: Traits, data_bytes: int) -> "Transfer":
        """The same, for this much data and a store with these traits: its parts as blocks, and requests to fill it.

        What is too little for all requests goes out in smaller parts: two more than there would be, to save time and
        still cost little.
        """
        suited = self._suited(traits.requests, traits.part_bytes, copies=1)
        count = -(-data_bytes // suited.block_bytes)
        if suited.block_bytes != traits.part_bytes or count >= suited.threads or data_bytes < 2 * _SMALL_PART_BYTES:
            return suited
        most = min(suited.threads, count + 2, data_bytes // _SMALL_PART_BYTES)
        smaller = -(-data_bytes // most // BLOCK_BYTES) * BLOCK_BYTES
        return replace(suited, block_bytes=max(smaller, BLOCK_BYTES)) if most > count else suited

    def to_read(self, traits: Traits, *, to_device: bool = False) -> "Transfer":
        """The same, for a store with these traits: its ranges as blocks, and as many requests as it takes.

        `to_device`: larger blocks from a disk, since each costs Python some copies to the device to start.
        """
        copies = 4 if to_device else 3  # a reply as it comes in, joined, and where it is put: two blocks for a device
        suited = self._suited(traits.requests, traits.range_bytes, copies)
        if not to_device or traits.requests:
            return suited
        large = _TO_DEVICE_BYTES if self.block_bytes == _BLOCK_BYTES else self.block_bytes
        block = max(min(large, self._limit_bytes // 2) // BLOCK_BYTES, 1) * BLOCK_BYTES
        # Each thread has two blocks.
        return replace(suited, threads=max(1, min(suited.threads, self._limit_bytes // (2 * block))), block_bytes=block)

    def from_cache(self, copies: int = 1) -> "Transfer":
        """The same, where the bytes are in memory: then as many threads as there are CPUs for this process.

        `copies`: how many blocks each thread has.
        """
        threads = _FROM_THE_CACHE if self.threads == _THREADS else self.threads
        most = self._limit_bytes // (copies * self.block_bytes)
        return replace(self, threads=max(1, min(threads, cpus_for_this_process(), most)))

    def _suited(self, requests: int, request_bytes: int, copies: int) -> "Transfer":
        if not requests or not request_bytes:
            return self
        limit = max(self._limit_bytes // copies, BLOCK_BYTES)
        block = self.block_bytes if self.block_bytes != _BLOCK_BYTES else request_bytes
        block = max(min(block, limit) // BLOCK_BYTES, 1) * BLOCK_BYTES
        threads = self.threads if self.threads != _THREADS else requests
        return replace(self, threads=max(1, min(threads, limit // block)), block_bytes=block)


def limited_transfer(transfer: Transfer | None, host_memory_bytes: int = HOST_MEMORY_BYTES) -> Transfer:
    """How a call moves bytes, by its options of these names. Raises InvalidRequest for values that they cannot have."""
    if transfer is not None and not isinstance(transfer, Transfer):
        raise InvalidRequest(f"transfer is a milepost.Transfer, or None, not {transfer!r}")
    return (transfer or Transfer()).within(host_memory_bytes)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a save, load, verification, comparison or copy is, on the coordinator and for its own part of the bytes.

    >>> reports = []
    >>> _ = milepost.save({"w": torch.ones(3)}, "memory://watched", progress=reports.append)
    >>> reports[-1].action, reports[-1].done_bytes, reports[-1].total_bytes
    ('save', 12, 12)
    """

    action: Action
    url: str
    done_bytes: int
    total_bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """The rate so far; 0 before anything was moved."""
        return self.done_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """How long the rest takes at this rate; None while there is no rate."""
        rate = self.bytes_per_second
        return (self.total_bytes - self.done_bytes) / rate if rate else None

    @property
    def finished(self) -> bool:
        """Whether all bytes were moved. The last report has this, unless something failed."""
        return self.done_bytes >= self.total_bytes


Watcher = Callable[[Progress], None]


class Meter:
    """Counts bytes from several threads, and reports to a watcher in the thread that called save or load."""

    def __init__(
        self,
        action: Action,
        url: str,
        watcher: Watcher | None = None,
        cancelled: Latch | None = None,
    ) -> None:
        self._action, self._url, self._watcher = action, url, watcher
        self._cancelled = cancelled
        self._lock = threading.Lock()
        self._done = self._total = self._later = 0
        self._start = self._reported = time.monotonic()

    def expect(self, total_bytes: int) -> None:
        """Set the total before the work starts, or starts again."""
        self._done, self._total, self._start = 0, total_bytes + self._later, time.monotonic()

    def expect_later(self, size_bytes: int) -> None:
        """Add this to the total that is set next: bytes of work that comes after it."""
        self._later = size_bytes

    def add(self, count: int) -> None:
        """Count bytes that were moved. Raises SaveCancelled if the save was cancelled."""
        with self._lock:
            self._done += count
        self.check()

    def check(self) -> None:
        """Raises SaveCancelled if the save was cancelled."""
        check_cancelled(self._cancelled)

    def report(self) -> None:
        """Report to the watcher, if the last report is old enough."""
        if self._watcher is not None and self._total and time.monotonic() - self._reported >= _REPORT_EVERY_S:
            self._report(min(self._done, self._total - 1))

    def finish(self) -> None:
        """Report the end to the watcher: all ranks are done, and the result is committed."""
        if self._watcher is not None:
            self._report(self._total)

    def _report(self, done: int) -> None:
        self._reported = time.monotonic()
        progress = Progress(self._action, self._url, done, self._total, self._reported - self._start)
        try:
            assert self._watcher is not None
            self._watcher(progress)
        except Exception:  # noqa: BLE001
            # A progress display must not be able to stop the work.
            _log.warning("the progress callback failed and is not called again", exc_info=True)
            self._watcher = None


def cpus_for_this_process() -> int:
    """How many CPUs it may use: its share, where a launcher says how many processes of the job run on this machine."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    beside = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, cpus // max(int(beside), 1)) if beside.isdecimal() else cpus


def check_cancelled(cancelled: Latch | None) -> None:
    """Raises SaveCancelled if this is set."""
    if cancelled is not None and cancelled.is_set():
        raise SaveCancelled("the save was cancelled; nothing of it remains")


def new_pages(size_bytes: int) -> mmap.mmap:
    """New memory in huge pages, if the system has them: direct I/O pins each page that it touches.

    Raises MemoryError where the system has too little.
    """
    try:
        # Private: shared memory would be pages of a file in memory, which are never huge.
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # as an OSError it would look like an error of the disk
        raise MemoryError(
            f"cannot allocate {size_bytes:,} bytes of host memory to move data through ({error.strerror}); "
            "pass a smaller `host_memory_bytes`"
        ) from error
    with contextlib.suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def run_all(
    jobs: Iterator[J],
    make_worker: Callable[[], Callable[[J], None]],
    threads: int,
    meter: Meter | None = None,
    *,
    apart: bool = False,
    end: Callable[[Callable[[J], None]], None] | None = None,
) -> None:
    """Do all jobs with `threads` workers; this thread is one of them. Each worker is made in its own thread.

    The first error of any worker stops all of them and is raised here. The iterator is advanced by one at a time.
    `apart`: this thread only waits, where a job may take long and cannot be interrupted: then Ctrl-C stops the others
    at once. `end`: called with each worker when it has no more work, also after an error, in its thread.
    """
    queue = _JobQueue(jobs)

    def work(watch: Callable[[], None]) -> None:
        try:
            worker = make_worker()
            try:
                with stopping_when(lambda: queue.stopped):
                    while (job := queue.take()) is not None:
                        worker(job[0])
                        watch()
            finally:
                if end is not None:
                    end(worker)
        except BaseException as error:  # noqa: BLE001  # raised where the caller waits
            queue.stop(error)

    # Where the system gives no more threads (a limit, or the interpreter is ending), fewer do all the work.
    others = Crew(carried(lambda: work(_no_watch)), "milepost", threads if apart else threads - 1, daemon=True)
    try:
        if not others.start() or not apart:
            work(meter.report if meter is not None else _no_watch)
        while not others.join(None if meter is None else _REPORT_EVERY_S):
            if meter is not None:
                meter.report()
                meter.check()  # the others may be asking a store again and again
    finally:
        queue.stop(None)  # interrupted: the others have not ended
        _join(others)
    if queue.error is not None:
        raise queue.error


def _join(others: Crew) -> None:
    """Wait for the others, even if interrupted: their file is closed next, and a new file may get its number."""
    interrupted: BaseException | None = None
    while True:
        try:
            others.join()
            break
        except BaseException as error:  # noqa: BLE001  # raised when they have ended
            interrupted = error
    if interrupted is not None:
        raise interrupted


def _no_watch() -> None:
    pass


class _JobQueue(Generic[J]):
    """Hands out jobs one at a time, until all are done or one failed.

    `stopped`: what is under way is in vain. Not so when only no job is left: the last ones are still being done.
    """

    def __init__(self, jobs: Iterator[J]) -> None:
        self._jobs = jobs
        self._lock = threading.Lock()
        self._empty = False
        self.stopped = False
        self.error: BaseException | None = None

    def take(self) -> "tuple[J] | None":
        with self._lock:
            if self.stopped or self._empty:
                return None
            for job in self._jobs:
                return (job,)
            self._empty = True
            return None

    def stop(self, error: BaseException | None) -> None:
        self.error = self.error or error  # before the others stop, with errors of their own
        self.stopped = True
