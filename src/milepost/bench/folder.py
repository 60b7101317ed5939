"""The contenders in a folder: files written and read by the system's own calls, and saves and loads."""

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from milepost.api import load, save
from milepost.bench import raw
from milepost.bench.rounds import SMALL_BYTES, SMALL_TIMES, Contender
from milepost.comm.base import Solo
from milepost.data.memory import view_of
from milepost.data.transfer import new_pages
from milepost.doctor.mounts import file_system_of

_ALONE = Solo()


class FolderContenders:
    """Files and checkpoints in one folder. What is written is written anew in each run."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self._writes, self._reads = folder / "write", folder / "read"
        self._size = size_bytes
        data = torch.randint(256, (size_bytes,), dtype=torch.uint8, device="cpu")
        self._state = {"data": data, "step": 1}
        self._target = {"data": torch.zeros_like(data), "step": 0}
        self._pages = memoryview(new_pages(size_bytes))
        self._pages[:] = view_of(data)
        found = file_system_of(folder)
        self._nature = found.nature if found is not None else "disk"
        self._direct = raw.does_direct(folder, self._pages)
        self._numbers = itertools.count()
        self._reads.mkdir()
        raw.write_cached(self._reads / "raw", self._pages)
        save(self._state, self._reads / "checkpoint", process_group=_ALONE)
        save({"step": 1}, self._reads / "small", process_group=_ALONE)
        (self._reads / "file").write_bytes(bytes(SMALL_BYTES))

    def all(self) -> Iterator[Contender]:
        """The contenders of each case, the raw ones first."""
        yield from self._writing()
        yield from self._reading()
        yield from self._small()

    def _writing(self) -> Iterator[Contender]:
        def writes(name: str, action: Callable[[Path], object], *, is_raw: bool = True) -> Contender:
            return Contender(
                "durable write", name, is_raw, self._start_writing, lambda: action(self._writes / "it"), self._size
            )

        yield writes("raw, cached", lambda path: raw.write_cached(path, self._pages))
        if self._direct:
            yield writes("raw, direct", lambda path: raw.write_direct(path, self._pages))
        yield writes("milepost.save", lambda path: save(self._state, path, process_group=_ALONE), is_raw=False)

    def _reading(self) -> Iterator[Contender]:
        file, size = self._reads / "raw", self._size

        def load_it() -> None:
            load(self._target, self._reads / "checkpoint", process_group=_ALONE)

        def read_it() -> None:
            raw.read_cached(file, self._pages)

        yield Contender("read, cached", "raw", True, read_it, read_it, size)
        yield Contender("read, cached", "milepost.load", False, load_it, load_it, size)
        if self._nature == "memory":
            return

        def drop() -> None:
            raw.drop(self._reads)

        yield Contender("read, not cached", "raw, cached", True, drop, read_it, size)
        if self._direct:
            yield Contender(
                "read, not cached", "raw, direct", True, drop, lambda: raw.read_direct(file, self._pages), size
            )
        yield Contender("read, not cached", "milepost.load", False, drop, load_it, size)

    def _small(self) -> Iterator[Contender]:
        data = bytes(SMALL_BYTES)

        def write_files() -> None:
            for _ in range(SMALL_TIMES):
                raw.write_small(self._writes, str(next(self._numbers)), data)

        def save_states() -> None:
            for _ in range(SMALL_TIMES):
                save({"step": 1}, self._writes / str(next(self._numbers)), process_group=_ALONE)

        def read_files() -> None:
            for _ in range(SMALL_TIMES):
                (self._reads / "file").read_bytes()

        def load_states() -> None:
            for _ in range(SMALL_TIMES):
                load({"step": 0}, self._reads / "small", process_group=_ALONE)

        empty, times = self._empty, SMALL_TIMES
        yield Contender("small write", "raw", True, empty, write_files, times=times)
        yield Contender("small write", "milepost.save", False, empty, save_states, times=times)
        yield Contender("small read", "raw", True, read_files, read_files, times=times)
        yield Contender("small read", "milepost.load", False, load_states, load_states, times=times)

    def _empty(self) -> None:
        """Remove what the run before wrote, durably, so that no run pays for another one's."""
        shutil.rmtree(self._writes, ignore_errors=True)
        self._writes.mkdir()
        raw.sync_folder(self._writes.parent)

    def _start_writing(self) -> None:
        self._empty()
        if self._nature in ("disk", "container"):
            # Pages that were in use a moment ago: in a virtual machine, others would be slow at their first use.
            filler = self._writes / "filler"
            with filler.open("wb", buffering=0) as file:
                file.write(self._pages)
            filler.unlink()  # before the kernel has begun to write it back
