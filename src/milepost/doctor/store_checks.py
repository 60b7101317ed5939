"""What any store must do: create a name once, list it at once, delete it, and be fast enough. Through the port only."""

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator

from milepost.core.limits import MIB
from milepost.data.new_files import committed
from milepost.data.transfer import new_pages, run_all
from milepost.doctor.records import PlaceCheck
from milepost.errors import AlreadyExists, CheckpointError
from milepost.store import LocalStore, Store

_CREATORS, _ROUNDS = 8, 5
_SMALL, _SMALL_BYTES = 10, 4096
_SLOW_SMALL_S, _SLOW_BYTES_PER_S = 0.25, 100e6
_LISTED_WITHIN_S, _PAUSE_S = 10.0, 0.05
_MOVED_FOR_S = 3.0
_LEAST_S = 0.5
"""A shorter measurement proves nothing."""
_BLOCK_BYTES, _THREADS = 4 * MIB, 4
_OBJECT_BYTES = 16 * MIB


def check_exclusive(store: Store) -> PlaceCheck:
    """Whether of several that create one name at the same time exactly one succeeds."""
    for number in range(_ROUNDS):
        winners = _race(store, f"race/{number}")
        if len(winners) != 1:
            return PlaceCheck(
                name="atomic create",
                state="fail",
                found=f"of {_CREATORS} that created one name at once, {len(winners)} were told that they did",
                advice="Do not save here: two jobs would destroy each other's checkpoints. Use another place",
            )
    return PlaceCheck(
        name="atomic create",
        state="ok",
        found=f"of {_CREATORS} that create one name at once, exactly one succeeds ({_ROUNDS} times)",
    )


def _race(store: Store, name: str) -> list[int]:
    """The creators of a name, of several that start together, who were told so. Raises what another error told them."""
    start, answers = threading.Barrier(_CREATORS), dict[int, BaseException | None]()

    def create(number: int) -> None:
        start.wait()
        try:
            store.create(name, _content(number))
            answers[number] = None
        except (CheckpointError, OSError) as error:
            answers[number] = error

    threads = [threading.Thread(target=create, args=(number,)) for number in range(_CREATORS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in answers.values():
        if error is not None and not isinstance(error, AlreadyExists):
            raise error
    there = content_of(store, name)
    # Who was told that the name is taken, and finds its own content there, has lost only the reply.
    return [number for number, error in answers.items() if error is None or there == _content(number)]


def _content(number: int) -> bytes:
    return b"%d" % number * 100


def content_of(store: Store, name: str) -> bytes:
    """All of a small object."""
    reader = store.reader(name)
    try:
        data = bytearray(reader.size_bytes)
        reader.read(0, [memoryview(data)])
        return bytes(data)
    finally:
        reader.close()


def check_listing(store: Store) -> PlaceCheck:
    """Whether a listing shows what was created, and no longer what was deleted, at once."""
    store.create("listed/one", b"1")
    shown = _until(lambda: "listed/one" in store.list("listed/"))
    store.delete("listed/one")
    gone = _until(lambda: "listed/one" not in store.list("listed/"))
    late = max((one for one in (shown, gone) if one is not None), default=0.0)
    numbers = {"late_s": round(late, 6)}
    if shown == gone == 0.0:
        found = "current: shows what was created, and not what was deleted"
        return PlaceCheck(name="listing", state="ok", found=found, numbers=numbers)
    bad = store.traits.is_current or None in (shown, gone)
    return PlaceCheck(
        name="listing",
        state="fail" if bad else "warn",
        found=f"old for {late:.1f} s" if None not in (shown, gone) else f"old for more than {_LISTED_WITHIN_S:g} s",
        advice="Readers would miss the newest checkpoint. Use a place whose listings are current"
        if bad
        else "Milepost waits for it; other tools may not see a new checkpoint for a while",
        numbers=numbers,
    )


def _until(holds: Callable[[], bool]) -> float | None:
    """How long it took until this held: 0 if at once; None if it never did."""
    if holds():
        return 0.0
    began = time.monotonic()
    while time.monotonic() - began < _LISTED_WITHIN_S:
        time.sleep(_PAUSE_S)
        if holds():
            return time.monotonic() - began
    return None


def check_small_writes(store: Store) -> PlaceCheck:
    """How long one small durable write takes: a commit is one of them."""
    data, times = bytes(_SMALL_BYTES), []
    for number in range(_SMALL):
        began = time.perf_counter()
        store.create(f"small/{number}", data)
        times.append(time.perf_counter() - began)
    median, slowest = statistics.median(times), max(times)
    slow = median > _SLOW_SMALL_S
    return PlaceCheck(
        name="small writes",
        state="warn" if slow else "ok",
        found=f"{_ms(median)} for one that is durable (slowest {_ms(slowest)}, of {_SMALL})",
        advice="Each commit and each file of a save costs that. Is the place busy, or far away?" if slow else "",
        numbers={"median_s": round(median, 6), "slowest_s": round(slowest, 6)},
    )


def check_speed(store: Store, size_bytes: int) -> list[PlaceCheck]:
    """How fast one process writes this much durably, and reads it again; each for some seconds at most."""
    objects = bool(store.traits.part_bytes)
    step = min(_OBJECT_BYTES, size_bytes) if objects else _BLOCK_BYTES
    size_bytes = max(size_bytes // step, 1) * step
    threads = store.traits.requests or _THREADS
    (written, write_s), (read, read_s) = (_objects if objects else _file)(store, range(0, size_bytes, step), threads)
    return [_rate("large writes", written, write_s, "durable, from one process"), _rate("reads", read, read_s, "")]


def _rate(name: str, size_bytes: int, seconds: float, note: str) -> PlaceCheck:
    rate = size_bytes / max(seconds, 1e-9)
    slow = rate < _SLOW_BYTES_PER_S and seconds > _LEAST_S
    words = ", ".join(filter(None, [f"{rate / 1e6:,.0f} MB/s", note, f"{size_bytes / 1e6:,.0f} MB moved"]))
    return PlaceCheck(
        name=name,
        state="warn" if slow else "ok",
        found=words,
        advice=f"100 GB take {100e9 / rate / 60:,.0f} minutes from one machine. Is the place busy?" if slow else "",
        numbers={"bytes_per_s": round(rate), "bytes": size_bytes},
    )


_Moved = tuple[int, float]
"""How many bytes were moved, and in how many seconds."""


def _file(store: Store, starts: range, threads: int) -> tuple[_Moved, _Moved]:
    """Write one file in place, and read it past the cache."""
    began = time.perf_counter()
    with committed(store.writer("large", len(starts) * starts.step)) as writer:
        written = _move(starts, threads, lambda start, block: writer.write(start, [block]))
    write_s = time.perf_counter() - began
    with contextlib.closing(store.reader("large")) as reader:
        drop_from_cache(store, "large")

        def read(start: int, block: memoryview) -> None:
            if reader.is_cold(start, len(block)):
                reader.read_cold(start, block)
            else:
                reader.read(start, [block])

        began = time.perf_counter()
        back = _move(starts[: written // starts.step], threads, read)
        return (written, write_s), (back, time.perf_counter() - began)


def _objects(store: Store, starts: range, threads: int) -> tuple[_Moved, _Moved]:
    """Create objects, several at once, and read them."""
    began = time.perf_counter()
    written = _move(starts, threads, lambda start, block: store.create(f"large/{start}", block))
    write_s = time.perf_counter() - began

    def read(start: int, block: memoryview) -> None:
        with contextlib.closing(store.reader(f"large/{start}", size_bytes=len(block))) as reader:
            reader.read(0, [block])

    began = time.perf_counter()
    back = _move(starts[: written // starts.step], threads, read)
    return (written, write_s), (back, time.perf_counter() - began)


def _move(starts: range, threads: int, move: Callable[[int, memoryview], None]) -> int:
    """Move blocks by several threads until all are moved, or time is up. Gives the number of bytes."""
    deadline, count = time.monotonic() + _MOVED_FOR_S, 0

    def jobs() -> Iterator[int]:
        nonlocal count
        for start in starts:
            if time.monotonic() > deadline:
                return
            count += 1
            yield start

    def make_worker() -> Callable[[int], None]:
        block = memoryview(new_pages(starts.step))
        block[:] = os.urandom(starts.step)  # what compresses well would look fast
        return lambda start: move(start, block)

    run_all(jobs(), make_worker, min(threads, len(starts)), apart=True)
    return count * starts.step


def drop_from_cache(store: Store, name: str) -> None:
    """Drop a file from the page cache of this machine, where it has one."""
    if isinstance(store, LocalStore):
        handle = os.open(store.root / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def check_delete(store: Store) -> PlaceCheck:
    """Whether objects can be deleted."""
    store.create("deleted", b"1")
    try:
        store.delete("deleted")
    except (CheckpointError, OSError) as error:
        return PlaceCheck(
            name="delete",
            state="warn",
            found=str(error),
            advice="Saves work without it. Old generations and old steps stay, and take space",
        )
    return PlaceCheck(name="delete", state="ok", found="works")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"
