"""A store on a disk that loses what was not synced, and all the states in which a power cut could leave it.

The disk is a journal of the system calls that `LocalStore` makes, in their order: `mkdir`, `create`, `fallocate`,
`write`, `link` (or a claim and a `rename`), `unlink`, `rmdir`, `fsync` of a file or of a folder. A test compares the
two journals.

Assumptions, the least that POSIX and `LocalStore` rely on:

* An `fsync` of a file covers the bytes and the size of that file at the time of the call. It does not cover its name.
* An `fsync` of a folder covers the names in that folder. It covers neither what they lead to nor the folder's own name.
* Any other call may reach the disk or not, independently and in any order. A change of names is atomic, `rename`
  included. Of a write, any of its blocks may arrive. What never arrived reads as zeros, or lies behind the end.
* The power fails between two calls. That covers a failure within a call: its effect is one of those not yet synced.

This is harsher than any journaling file system, where calls become durable in an order. It does not model a disk that
lies about `fsync`, or a process that reads what another wrote before a cut.
"""

import itertools
import random
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from milepost.errors import AlreadyExists, UnsafeCheckpoint
from milepost.store import Store
from milepost.store.base import CLAIM, FILES, Buffer, Traits, check_name, top_names
from milepost.store.memory import MemoryReader, MemoryStore
from milepost.store.prefixed import innermost
from milepost.testing.stores import Crash

_ABOVE = 0
"""The inode of the folder that holds the store's folder."""
_ROOT = "checkpoint"
_KEPT = (0.0, 0.1, 0.5, 0.9, 1.0)
"""The probabilities that an unsynced part survives; each sampled state draws one of these."""


@dataclass(frozen=True, slots=True)
class Naming:
    """A change of names in one folder: a creation, a link, a removal or a rename. None stands for no inode."""

    call: str
    inode: int
    names: tuple[tuple[str, int | None], ...]


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes of one file; no bytes where only the size was set."""

    call: str
    inode: int
    offset: int
    data: bytes
    size: int

    def blocks(self, block_bytes: int) -> list[tuple[int, int]]:
        """The ranges of the file that reach the disk independently."""
        end = self.offset + len(self.data)
        cuts = [self.offset, *range((self.offset // block_bytes + 1) * block_bytes, end, block_bytes), end]
        return list(itertools.pairwise(cuts))


@dataclass(frozen=True, slots=True)
class Sync:
    """A sync of one inode: what was done to it before is durable."""

    call: str
    inode: int


Operation = Naming | Write | Sync
_Trail = list[tuple[str, int]]


class _View:
    """Folders and files after some of the operations."""

    def __init__(self) -> None:
        self.folders: defaultdict[int, dict[str, int]] = defaultdict(dict)
        self.files: defaultdict[int, bytearray] = defaultdict(bytearray)

    def rename(self, operation: Naming) -> None:
        folder = self.folders[operation.inode]
        for name, inode in operation.names:
            folder.pop(name, None)
            if inode is not None:
                folder[name] = inode

    def write(self, operation: Write, start: int, end: int) -> None:
        content = self.files[operation.inode]
        content.extend(bytes(max(0, max(end, operation.size) - len(content))))
        content[start:end] = operation.data[start - operation.offset : end - operation.offset]


class UnsyncedStore:
    """A store in the memory of this process that knows every state in which a power cut could leave it.

    `hard_links=False` publishes as `LocalStore` does on file systems without hard links. `block_bytes`: the size of the
    blocks in which writes reach the disk. When `journal` has `dies_at` operations, the process counts as dead: each
    further operation raises `Crash`. Set `dies_at` to None to go on as another process that finds what the first left.

    >>> store = milepost.testing.UnsyncedStore()
    >>> _ = milepost.save({"step": 7}, store)
    >>> found = store.after_power_cut(lambda call: False)  # nothing survives that was not synced
    >>> milepost.open(found)["step"]
    7
    """

    def __init__(self, url: str = "unsynced://", *, hard_links: bool = True, block_bytes: int = 512) -> None:
        self._url, self._hard_links, self._block_bytes = url, hard_links, block_bytes
        self._lock = threading.RLock()
        self._live = _View()
        self._inodes = itertools.count(1)
        self._folders = {_ABOVE}
        self._made_root = False
        self.journal: list[Operation] = []
        self.dies_at: int | None = None

    # What a power cut leaves.

    def after_power_cut(self, choose: Callable[[str], bool], at: int | None = None) -> MemoryStore:
        """The store after a power cut behind operation `at` of the journal; by default, behind the last one.

        What was synced is there. For each call that was not, `choose` decides whether it reached the disk, once for
        each block of a write. It gets the call as text, such as `"unlink manifest-00000001.json"`.
        """
        at = len(self.journal) if at is None else at
        unsynced = self._unsynced(at)
        view = _View()
        for number, operation in enumerate(self.journal[:at]):
            kept = choose if number in unsynced else _always
            if isinstance(operation, Naming) and kept(operation.call):
                view.rename(operation)
            elif isinstance(operation, Write):
                for start, end in operation.blocks(self._block_bytes):
                    if kept(operation.call):
                        view.write(operation, start, end)
        found = MemoryStore(self._url)
        found.objects.update(self._objects(view))
        return found

    def possible_states(self, count: int, seed: int = 0, first: int = 0) -> Iterator[tuple[int, MemoryStore]]:
        """States after a power cut, each with the number of operations before the cut, from `first` to all.

        Yields all possible states if there are at most `count`; else `count` of them, drawn at random by `seed`.
        """
        moments = range(first, len(self.journal) + 1)
        parts = {at: sum(map(self._parts, self._unsynced(at))) for at in moments}
        if sum(2 ** min(number, 64) for number in parts.values()) <= count:
            for at in moments:
                for kept in itertools.product((False, True), repeat=parts[at]):
                    answers = iter(kept)
                    yield at, self.after_power_cut(lambda _, answers=answers: next(answers), at)  # type: ignore[misc]
            return
        dice = random.Random(seed)  # noqa: S311
        for _ in range(count):
            at, likely = dice.choice(moments), dice.choice(_KEPT)
            yield at, self.after_power_cut(lambda _, likely=likely: dice.random() < likely, at)  # type: ignore[misc]

    def _unsynced(self, at: int) -> set[int]:
        """The positions, among the first `at` operations, of those that no sync covers."""
        synced: set[int] = set()
        found = set()
        for number in reversed(range(at)):
            operation = self.journal[number]
            if isinstance(operation, Sync):
                synced.add(operation.inode)
            elif operation.inode not in synced:
                found.add(number)
        return found

    def _parts(self, number: int) -> int:
        operation = self.journal[number]
        return len(operation.blocks(self._block_bytes)) if isinstance(operation, Write) else 1

    def _objects(self, view: _View) -> dict[str, bytes]:
        objects = {}
        pending = [("", view.folders[_ABOVE].get(_ROOT))]
        while pending:
            path, here = pending.pop()
            for name, inode in view.folders[here].items() if here is not None else ():
                if inode in self._folders:
                    pending.append((f"{path}{name}/", inode))
                else:
                    objects[path + name] = bytes(view.files[inode])
        return objects

    # The storage port, by the calls that `LocalStore` makes.

    @property
    def url(self) -> str:
        """Where this is, for messages."""
        return self._url

    @property
    def traits(self) -> Traits:
        """Those of a file system."""
        return FILES

    def create(self, name: str, *data: Buffer) -> None:
        """Write an object, whole and durable or not at all. Raises AlreadyExists if the name is taken."""
        check_name(name)
        temporary = f"{name}.{secrets.token_hex(8)}.tmp"
        writer = self.writer(temporary, sum(map(len, data)))
        try:
            writer.write(0, data)
            writer.commit()
            self._publish(temporary, name)
            self.sync_folders(name)
            self._made_root = False
        finally:
            writer.abort()

    def writer(self, name: str, size_bytes: int, *, direct: bool = True) -> "UnsyncedWriter":
        """Start a new object of this size. Raises AlreadyExists if the name is taken."""
        del direct
        with self._lock:
            folder = self._make_folders(name)
            self._refuse_taken(folder, name)
            inode = self._new()
            self._name(f"create {name}", folder, check_name(name)[-1], inode)
            if size_bytes:
                self.record(Write(f"fallocate {name}", inode, 0, b"", size_bytes))
        return UnsyncedWriter(self, name, inode)

    def link(self, name: str, source: Store, source_name: str) -> bool:
        """Give an object of this store a second name, which lasts when its folder is synced."""
        held, held_as = innermost(source, source_name)
        if held is not self or not self._hard_links:
            return False
        with self._lock:
            try:
                inode = self._live.folders[self._folder(held_as)[-1][1]].get(check_name(held_as)[-1])
            except FileNotFoundError:
                return False
            if inode is None or inode in self._folders:
                return False
            folder = self._make_folders(name)
            if check_name(name)[-1] not in self._live.folders[folder]:
                self._name(f"link {name}", folder, check_name(name)[-1], inode)
        return True

    def _make_folders(self, name: str) -> int:
        """Make the folders that lead to a name, each synced into the one above. Gives the inode of the last."""
        parts = check_name(name)
        folder, path = _ABOVE, ".."
        for depth, part in enumerate((_ROOT, *parts[:-1])):
            if part not in self._live.folders[folder]:
                inner = "/".join(parts[:depth]) or "."
                self._name(f"mkdir {inner}", folder, part, self._new(is_folder=True))
                self._made_root = self._made_root or folder == _ABOVE
                self.sync(path, folder)
            folder, path = self._enter(folder, part), "/".join(parts[:depth]) or "."
        return folder

    def reader(self, name: str, *, size_bytes: int | None = None) -> MemoryReader:
        """Open an object, synced or not. Raises FileNotFoundError if there is none."""
        del size_bytes
        with self._lock:
            inode = self._live.folders[self._folder(name)[-1][1]].get(check_name(name)[-1])
            if inode is None:
                raise FileNotFoundError(f"{self._url}/{name}")
            if inode in self._folders:
                raise UnsafeCheckpoint(f"{self._url}/{name} is not a regular file")
            return MemoryReader(f"{self._url}/{name}", bytes(self._live.files[inode]))

    def list(self, prefix: str, *, shallow: bool = False) -> Iterator[str]:
        """The names that start with `prefix`, synced or not."""
        with self._lock:
            found = iter([name for name in self._objects(self._live) if name.startswith(prefix)])
        return top_names(found, prefix) if shallow else found

    def delete(self, *names: str, durable: bool = False) -> None:
        """Remove these objects, if they exist, and the folders that they leave empty. `durable` syncs their folders."""
        for name in names:
            self._delete(name, durable)

    def _delete(self, name: str, durable: bool) -> None:
        with self._lock:
            folders, leaf = self._nearest(name), check_name(name)[-1]
            found = len(folders) == len(check_name(name)) + 1
            if found and leaf in self._live.folders[folders[-1][1]]:
                self._name(f"unlink {name}", folders[-1][1], leaf, None)
            if durable:
                self.sync(*folders[-1])
            kept = 1 if self._made_root else 2
            while found and len(folders) > kept and not self._live.folders[folders[-1][1]]:
                path, _ = folders.pop()
                self._name(f"rmdir {path}", folders[-1][1], _ROOT if path == "." else path.rpartition("/")[2], None)

    # The system calls.

    def record(self, operation: Operation) -> None:
        """Carry out an operation, visible to all readers, and remember that it is not durable yet."""
        with self._lock:
            if self.dies_at is not None and len(self.journal) >= self.dies_at:
                raise Crash
            self.journal.append(operation)
            if isinstance(operation, Naming):
                self._live.rename(operation)
            elif isinstance(operation, Write):
                self._live.write(operation, operation.offset, operation.offset + len(operation.data))

    def sync(self, path: str, inode: int) -> None:
        """Make what was done to a file or a folder durable."""
        self.record(Sync(f"fsync {path}", inode))

    def sync_folders(self, name: str) -> None:
        """Sync the folders that lead to a name, including the one that holds the store's folder."""
        for path, folder in reversed(self._folder(name)):
            self.sync(path, folder)

    def _publish(self, temporary: str, name: str) -> None:
        """Give the finished file its name. Raises AlreadyExists if the name is taken."""
        leaf, source = check_name(name)[-1], check_name(temporary)[-1]
        with self._lock:
            folder = self._folder(name)[-1][1]
            inode = self._live.folders[folder].get(source)
            if self._hard_links:
                self._refuse_taken(folder, name)
                if inode is None:
                    raise FileNotFoundError(f"{self._url}/{temporary}")
                self._name(f"link {name}", folder, leaf, inode)
                return
            self._refuse_taken(folder, name + CLAIM)
            self._name(f"create {name}{CLAIM}", folder, leaf + CLAIM, self._new())
            try:
                self._refuse_taken(folder, name)
                if inode is None:
                    raise FileNotFoundError(f"{self._url}/{temporary}")
                self.record(Naming(f"rename {name}", folder, ((source, None), (leaf, inode))))
            finally:
                self._name(f"unlink {name}{CLAIM}", folder, leaf + CLAIM, None)

    def _name(self, call: str, folder: int, name: str, inode: int | None) -> None:
        self.record(Naming(call, folder, ((name, inode),)))

    def _new(self, *, is_folder: bool = False) -> int:
        inode = next(self._inodes)
        if is_folder:
            self._folders.add(inode)
        return inode

    def _refuse_taken(self, folder: int, name: str) -> None:
        if check_name(name)[-1] in self._live.folders[folder]:
            raise AlreadyExists(f"{self._url}/{name} exists already")

    def _folder(self, name: str) -> _Trail:
        """The folders that lead to a name, outermost first, as paths and inodes. Raises FileNotFoundError."""
        found, parts = self._nearest(name), check_name(name)
        if len(found) <= len(parts):
            raise FileNotFoundError(f"{self._url}: there is no folder for {name}")
        return found

    def _nearest(self, name: str) -> _Trail:
        """The folders that lead to a name, as far as they exist."""
        parts = check_name(name)
        found = [("..", _ABOVE)]
        for depth, part in enumerate((_ROOT, *parts[:-1])):
            if part not in self._live.folders[found[-1][1]]:
                break
            found.append(("/".join(parts[:depth]) or ".", self._enter(found[-1][1], part)))
        return found

    def _enter(self, folder: int, name: str) -> int:
        inode = self._live.folders[folder].get(name)
        if inode is None:
            raise FileNotFoundError(f"{self._url}: there is no folder {name}")
        if inode not in self._folders:
            raise UnsafeCheckpoint(f"{self._url}: {name} is not a folder")
        return inode


class UnsyncedWriter:
    """A new file, durable under its name when `commit` returns."""

    aligned = False

    def __init__(self, store: UnsyncedStore, name: str, inode: int) -> None:
        self._store, self._name, self._inode = store, name, inode

    def write(self, offset: int, views: Sequence[Buffer]) -> None:
        """Write all of `views`, one after the other, at `offset`."""
        data = b"".join(bytes(memoryview(view).cast("B")) for view in views if len(view))
        if data:
            self._store.record(Write(f"write {self._name}", self._inode, offset, data, 0))

    def commit(self) -> None:
        """Sync the file, then the folders that lead to it."""
        self._store.sync(self._name, self._inode)
        self._store.sync_folders(self._name)

    def abort(self) -> None:
        """Remove the file, finished or not."""
        self._store.delete(self._name)


def _always(_: str) -> bool:
    return True
