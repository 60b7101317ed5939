"""Files that ranks write together: created under temporary names, filled in parallel, renamed when all are whole.

1. Every rank works out the layout of all files. The coordinator compares the results and reserves the files under
   temporary names.
2. Each rank writes its share of the bytes, and syncs it.
3. The coordinator writes what depends on all ranks and renames the files; the file that completes the set is last.

A crash or an error before the last step leaves nothing that looks whole.
"""

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

import xxhash

from milepost.comm import Bytes, Call, Comm, Meeting, defer, meet
from milepost.commit.beside import METADATA
from milepost.commit.find import generations
from milepost.commit.removal import remove_all_generations
from milepost.core.limits import MIB
from milepost.core.manifest import manifest_name
from milepost.core.wire import Wire
from milepost.data.new_files import committed
from milepost.data.transfer import Meter, Transfer
from milepost.errors import InvalidRequest, RanksDisagree, StorageError
from milepost.events.operation import moved
from milepost.formats.write.content import Content, PieceSum, write_range
from milepost.formats.write.zip import endings
from milepost.store import LocalStore
from milepost.store.local import LocalWriter

_UNIT = MIB
"""Ranks share files at multiples of this, so each writes whole pages, and can bypass the page cache."""
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp")
Sums = dict[int, list[PieceSum]]
"""By the number of a file, the sums that a rank could not put into their place."""
_PLANNING = Meeting("planning", Bytes(), Wire(str))
_WRITING = Meeting("writing", Wire(Sums), Wire(NoneType), deciding="committing")


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """All files to write into a folder. `last` are small files that are renamed last, in this order.

    `owns` tells which names in the folder belong to a target of this kind. Such files count as "already there", and
    are removed when the target is replaced. `markers` are files without which no reader accepts the rest as whole.
    """

    files: Sequence[Content]
    last: Sequence[tuple[str, bytes]]
    owns: Callable[[str], bool]
    markers: Sequence[str] = ()

    @property
    def size_bytes(self) -> int:
        """The size of all files but the last."""
        return sum(file.size_bytes for file in self.files)

    def digest(self) -> bytes:
        """Equal on two ranks if they would write the same files in the same way."""
        hasher = xxhash.xxh3_128()
        for file in self.files:
            hasher.update(os.fsencode(f"{file.name}:{file.size_bytes}\n"))
            for start, size, data in file.pieces:
                hasher.update(b"%d %d" % (start, size))
                hasher.update(data if isinstance(data, bytes) else b"")
        return hasher.digest()


class NewFiles:
    """The files of a plan in their folder, while they are made."""

    def __init__(self, folder: Path, token: str, transfer: Transfer) -> None:
        self.folder, self._token, self._transfer = folder, token, transfer
        self._store = LocalStore(folder)

    def temporary(self, name: str) -> str:
        """The name of a file until all files are whole."""
        return f".{name}.{self._token}.tmp"

    def reserve(self, name: str, size_bytes: int) -> None:
        """On the coordinator: make a file of this size. Raises StorageError if there is no room."""
        self._store.writer(self.temporary(name), size_bytes, direct=False).commit()

    @contextlib.contextmanager
    def writer(self, name: str, size_bytes: int, *, direct: bool | None = None) -> Iterator[LocalWriter]:
        """On any rank: write into a reserved file. It is synced at the end."""
        path = self.folder / self.temporary(name)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise StorageError(
                f"cannot open {path}: {error.strerror}. All ranks must see one folder; is it on a shared file system?",
                errno=error.errno,
            ) from error
        writer = LocalWriter(path, handle, self.folder, size_bytes, self._transfer.direct if direct is None else direct)
        with committed(writer):
            yield writer

    def small(self, name: str, data: bytes) -> None:
        """On the coordinator: write a whole small file under its temporary name."""
        writer = self._store.writer(self.temporary(name), len(data))
        writer.write(0, [data])
        writer.commit()

    def publish(self, names: Sequence[str], last: Sequence[str], markers: Sequence[str], old: set[str]) -> None:
        """On the coordinator: give the files their names, in place of the old ones."""
        try:
            if len(names) + len(last) > 1 or old - set(names):
                for name in markers:
                    # An old index with new files would look whole, and be a mixture.
                    (self.folder / name).unlink(missing_ok=True)
                self._sync()
            for name in names:
                os.rename(self.folder / self.temporary(name), self.folder / name)
            for name in old - set(names) - set(last):
                (self.folder / name).unlink(missing_ok=True)
            self._sync()
            for name in last:
                os.rename(self.folder / self.temporary(name), self.folder / name)
                self._sync()
        except OSError as error:
            raise StorageError(f"cannot put the files of {self.folder} in place: {error}", errno=error.errno) from error

    def _sync(self) -> None:
        # The folder too: without this, a power cut can undo the renames.
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def discard(self, names: Sequence[str]) -> None:
        """Remove what was not published. Never raises."""
        for name in names:
            with contextlib.suppress(OSError):
                (self.folder / self.temporary(name)).unlink()


def owned(folder: Path, owns: Callable[[str], bool]) -> tuple[set[str], set[str]]:
    """The files in a folder that belong to a target of this kind, and the leftovers of unfinished attempts."""
    names = {entry.name for entry in os.scandir(folder)} if os.path.isdir(folder) else set()
    left = {name for name in names if (match := _TEMPORARY.fullmatch(name)) and owns(match[1])}
    return {name for name in names if owns(name)} - left, left


def refuse_existing(where: str, old: set[str], overwrite: bool) -> None:
    """Raise InvalidRequest if something is there that would be replaced."""
    if old and not overwrite:
        shown = ", ".join(sorted(old)[:3]) + (", ..." if len(old) > 3 else "")
        raise InvalidRequest(f"there is something at {where} already ({shown}); pass overwrite=True to replace it")


class FolderAttempt:
    """One rank's part of writing a folder together: it meets the other ranks, and cleans up after an error."""

    def __init__(self, folder: Path, comm: Comm, transfer: Transfer, overwrite: bool) -> None:
        self.folder, self.comm, self.transfer, self.overwrite = folder, comm, transfer, overwrite
        self._made = not os.path.exists(folder)

    @property
    def call(self) -> Call:
        """The call that the ranks make together."""
        return Call("converting to", str(self.folder))

    def run(
        self, plan: Callable[[], FolderPlan], work: Callable[[NewFiles, FolderPlan], Sums], finish: "Finish"
    ) -> None:
        """Agree on a plan, let every rank do its work, and finish on the coordinator. All ranks raise if one fails."""
        planned = defer(self.comm, plan)

        def reserve(digests: list[bytes]) -> str:
            if len(set(digests)) > 1:
                raise RanksDisagree(
                    "the ranks would write different files: do all pass the same arguments, and see the same source? "
                    "Sets of strings have another order in each process; leave them out, or convert in one process."
                )
            return self._reserve(planned.get())

        token = meet(self.comm, self.call, _PLANNING, lambda: planned.get().digest(), reserve)
        files, agreed = NewFiles(self.folder, token, self.transfer), planned.get()
        try:
            meet(
                self.comm,
                self.call,
                _WRITING,
                lambda: work(files, agreed),
                lambda sums: self._finish(files, agreed, finish, sums),
            )
        except BaseException:
            self._discard(files, agreed)
            raise

    def _reserve(self, plan: FolderPlan) -> str:
        old, left = owned(self.folder, plan.owns)
        if METADATA in plan.markers:
            old |= {manifest_name(number) for number in generations(LocalStore(self.folder))}
        refuse_existing(str(self.folder), old, self.overwrite)
        for name in left:
            (self.folder / name).unlink(missing_ok=True)
        token = secrets.token_hex(8)
        files = NewFiles(self.folder, token, self.transfer)
        try:
            for file in plan.files:
                files.reserve(file.name, file.size_bytes)
        except BaseException:
            self._discard(files, plan)
            raise
        return token

    def _finish(self, files: NewFiles, plan: FolderPlan, finish: "Finish", sums: list[Sums]) -> None:
        finish(files, plan, sums)
        for name, data in plan.last:
            files.small(name, data)
        names, last = [file.name for file in plan.files], [name for name, _ in plan.last]
        files.publish(names, last, plan.markers, owned(self.folder, plan.owns)[0])
        if METADATA in plan.markers:
            # Milepost's own checkpoint here would be the older of two to resume from: see `commit.beside`.
            remove_all_generations(LocalStore(self.folder))

    def _discard(self, files: NewFiles, plan: FolderPlan) -> None:
        if self.comm.rank == self.comm.coordinator:
            files.discard([*(file.name for file in plan.files), *(name for name, _ in plan.last)])
            if self._made:
                with contextlib.suppress(OSError):
                    self.folder.rmdir()


Finish = Callable[[NewFiles, FolderPlan, list[Sums]], None]


def write_together(attempt: FolderAttempt, plan: Callable[[], FolderPlan], meter: Meter) -> None:
    """Write the files of a plan: each rank an equal share of all bytes."""
    comm = attempt.comm

    def work(files: NewFiles, plan: FolderPlan) -> Sums:
        sums: Sums = {}
        shares = _shares([file.size_bytes for file in plan.files], comm.rank, comm.size)
        meter.expect(sum(stop - start for _, start, stop in shares))
        for number, start, stop in shares:
            content = plan.files[number]
            with files.writer(content.name, content.size_bytes) as writer:
                sums[number] = write_range(writer, content, start, stop, attempt.transfer, meter)
        moved(sum(stop - start for _, start, stop in shares))
        return sums

    attempt.run(plan, work, write_endings)
    meter.finish()


def write_endings(files: NewFiles, plan: FolderPlan, brought: list[Sums]) -> None:
    """On the coordinator: write what depends on the checksums of all ranks."""
    sums: Sums = {}
    for one in brought:
        for number, parts in one.items():
            sums.setdefault(number, []).extend(parts)
    for number, found in sums.items():
        content = plan.files[number]
        if found:
            with files.writer(content.name, content.size_bytes, direct=False) as writer:
                for at, data in endings(content, found):
                    writer.write(at, [data])


def _shares(sizes: list[int], rank: int, world: int) -> list[tuple[int, int, int]]:
    """(file, start, stop) of what a rank writes: an equal part of all bytes, cut at multiples of a unit."""
    total, base, found = sum(sizes), 0, []
    for number, size in enumerate(sizes):
        low, high = (_cut(total * r // world - base, size) for r in (rank, rank + 1))
        if low < high:
            found.append((number, low, high))
        base += size
    return found


def _cut(position: int, size: int) -> int:
    return size if position >= size else max(position, 0) // _UNIT * _UNIT
