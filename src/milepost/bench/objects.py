"""The contenders in an object store: requests alone, many at once, and saves and loads."""

import contextlib
import itertools
from collections.abc import Callable, Iterator

import torch

from milepost.api import load, save
from milepost.bench.rounds import SMALL_BYTES, SMALL_TIMES, Contender
from milepost.comm.base import Solo
from milepost.core.limits import MIB
from milepost.data.memory import view_of
from milepost.store import Store, Within
from milepost.store.stopping import side_by_side

_ALONE = Solo()
_LEAST_BYTES = 8 * MIB


class ObjectContenders:
    """Objects and checkpoints in one place. What is written gets new names in each run."""

    def __init__(self, store: Store, size_bytes: int) -> None:
        self._store, self._size = store, size_bytes
        self._requests = max(store.traits.requests, 1)
        data = torch.randint(256, (size_bytes,), dtype=torch.uint8, device="cpu")
        self._state = {"data": data, "step": 1}
        target = torch.zeros_like(data)
        self._target = {"data": target, "step": 0}
        self._bytes, self._into = view_of(data), view_of(target)
        each = min(max(-(-size_bytes // self._requests), _LEAST_BYTES), store.traits.part_bytes)
        self._starts = range(0, size_bytes, each)
        self._numbers = itertools.count()
        self._put("read/raw")
        save(self._state, Within(store, "read/checkpoint"), process_group=_ALONE)
        save({"step": 1}, Within(store, "read/small"), process_group=_ALONE)
        store.create("read/file", bytes(SMALL_BYTES))

    def all(self) -> Iterator[Contender]:
        """The contenders of each case, the raw ones first."""

        def fresh() -> str:
            return f"write/{next(self._numbers)}"

        def save_it() -> None:
            save(self._state, Within(self._store, fresh()), process_group=_ALONE)

        def load_it() -> None:
            load(self._target, Within(self._store, "read/checkpoint"), process_group=_ALONE)

        def create_small() -> None:
            self._store.create(fresh(), bytes(SMALL_BYTES))

        def save_small() -> None:
            save({"step": 1}, Within(self._store, fresh()), process_group=_ALONE)

        def load_small() -> None:
            load({"step": 0}, Within(self._store, "read/small"), process_group=_ALONE)

        empty, size, times = self._empty, self._size, SMALL_TIMES
        yield Contender("durable write", "requests alone", True, empty, lambda: self._put(fresh()), size)
        yield Contender("durable write", "milepost.save", False, empty, save_it, size)
        yield Contender("read", "requests alone", True, empty, self._get, size)
        yield Contender("read", "milepost.load", False, empty, load_it, size)
        yield Contender("small write", "one request", True, empty, _repeated(create_small), times=times)
        yield Contender("small write", "milepost.save", False, empty, _repeated(save_small), times=times)
        yield Contender("small read", "one request", True, empty, _repeated(self._get_small), times=times)
        yield Contender("small read", "milepost.load", False, empty, _repeated(load_small), times=times)

    def _put(self, name: str) -> None:
        """Create objects that hold all the data, many at once."""
        step = self._starts.step
        side_by_side(
            lambda start: self._store.create(f"{name}/{start}", self._bytes[start : start + step]),
            self._starts,
            self._requests,
        )

    def _get(self) -> None:
        """Read them into the memory of the target."""
        size = self._store.traits.range_bytes or self._starts.step

        def get(at: tuple[int, int]) -> None:
            start, offset = at
            view = self._into[start : start + self._starts.step]
            with contextlib.closing(self._store.reader(f"read/raw/{start}", size_bytes=len(view))) as reader:
                reader.read(offset, [view[offset : offset + size]])

        ranges = [(start, offset) for start in self._starts for offset in range(0, self._length(start), size)]
        side_by_side(get, ranges, self._requests)

    def _length(self, start: int) -> int:
        return min(self._starts.step, self._size - start)

    def _get_small(self) -> None:
        with contextlib.closing(self._store.reader("read/file", size_bytes=SMALL_BYTES)) as reader:
            reader.read(0, [memoryview(bytearray(SMALL_BYTES))])

    def _empty(self) -> None:
        """Remove what the run before wrote."""
        self._store.delete(*self._store.list("write/"))


def _repeated(action: Callable[[], object]) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(SMALL_TIMES):
            action()

    return repeat
