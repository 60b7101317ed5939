"""A store in a folder of a local or network file system.

Assumptions: `link` or `O_EXCL` creates a name at most once; `rename` is atomic; after `fsync` of a file and of its
folder, both survive power loss. Inside the folder no symbolic link is followed and only regular files are opened.
"""

import contextlib
import errno
import logging
import os
import secrets
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from milepost.core.limits import MIB, PAGE_BYTES
from milepost.errors import AlreadyExists, NotDurable, StorageError, UnsafeCheckpoint
from milepost.store import linux
from milepost.store.advice import explain
from milepost.store.base import FILES, Buffer, Store, Traits, check_name
from milepost.store.claims import NO_LINKS, publish_by_rename
from milepost.store.folders import (
    again,
    create_file,
    explained,
    folder_inside,
    is_gone,
    link_file,
    open_inside,
    remove_empty,
    sync_folders,
    sync_nearest,
)
from milepost.store.prefixed import innermost

_log = logging.getLogger("milepost")
_NOT_DIRECT = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
_DIRECT_FROM_BYTES = 4 * MIB
"""Smaller files go through the page cache: they gain nothing, and their readers find them there."""
_WRITE_OUT_BYTES = MIB // 2
_AT_ONCE_BYTES = MIB
_VECTORS = 1024  # IOV_MAX


class LocalStore:
    """Bytes by name in a folder. The first write makes the folder; if that write fails, the folder is removed.

    >>> milepost.store.LocalStore("/data/runs/a").url
    '/data/runs/a'
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))
        # The root, and folders above it, that this store made. Cleared when an object was created: then they stay.
        self._made: set[Path] = set()

    @property
    def url(self) -> str:
        """Where this is, for messages."""
        return str(self.root)

    @property
    def traits(self) -> Traits:
        """Those of a file system."""
        return FILES

    def create(self, name: str, *data: Buffer) -> None:
        """Write an object, whole and durable or not at all. Raises AlreadyExists if the name is taken."""
        path, content = self._path(name), b"".join(data)
        temporary, writer = self._temporary(name, len(content))
        try:
            writer.write(0, [content])
            writer.commit()
            with explained("publish", path):
                self._publish(temporary, path, content)
            try:
                with explained("sync", path):
                    sync_folders(path.parent, self.root)
            except StorageError as error:
                # A caller that sees a failure must not find the object there.
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise NotDurable(f"{error}; it was taken back", errno=error.errno) from error
            self._made.clear()
        finally:
            writer.abort()

    def _temporary(self, name: str, size_bytes: int) -> "tuple[Path, LocalWriter]":
        """A file beside the name. No other process takes the same one, so a taken one is ours: its reply was lost."""
        temporary = f"{name}.{secrets.token_hex(8)}.tmp"
        try:
            writer = self.writer(temporary, size_bytes)
        except AlreadyExists:
            self.delete(temporary)
            writer = self.writer(temporary, size_bytes)
        return self._path(temporary), writer

    def _publish(self, temporary: Path, path: Path, data: bytes) -> None:
        """Give the finished file its name, unless that is taken."""
        try:
            os.link(temporary, path)
        except OSError as error:
            # NFS repeats a request whose reply was lost. If the name leads to this very file, it is done, whatever the
            # repetition said.
            if _are_one_file(temporary, path):
                return
            # Not found: the process that committed this name first may have removed our temporary file.
            if isinstance(error, FileExistsError) or (is_gone(error) and path.exists()):
                raise _taken(path) from None
            if error.errno not in NO_LINKS:
                raise
            try:
                publish_by_rename(temporary, path, data)
            except FileExistsError:
                raise _taken(path) from None

    def writer(self, name: str, size_bytes: int, *, direct: bool = True) -> "LocalWriter":
        """Start a new object of this size. Raises AlreadyExists for a taken name, StorageError if there is no room."""
        path = self._path(name)
        with explained("create", path):
            try:
                handle = create_file(self.root, check_name(name), self._made)
            except FileExistsError:
                raise _taken(path) from None
            except BaseException:
                remove_empty(path.parent, self.root, self._made)
                raise
        return LocalWriter(path, handle, self.root, size_bytes, direct, self._made)

    def reader(self, name: str, *, size_bytes: int | None = None) -> "LocalReader":
        """Open an object. Raises FileNotFoundError if there is none, UnsafeCheckpoint for links and special files."""
        del size_bytes
        path = self._path(name)
        with explained("open", path):
            return LocalReader(path, lambda: again(partial(_open_to_read, self.root, check_name(name))))

    def list(self, prefix: str, *, shallow: bool = False) -> Iterator[str]:
        """The names that start with `prefix`; folders that cannot match are not opened, links are not followed.

        `shallow`: folders that match are named, with a `/` behind, and not opened.
        """
        pending = [""]
        while pending:
            here = pending.pop()
            try:
                entries = again(partial(_entries, self.root / here))
            except OSError as error:
                # A folder inside that is stale was removed. If the store's own is, nothing can be said about it.
                if is_gone(error) and (here or error.errno != errno.ESTALE):
                    continue
                raise StorageError(f"cannot list {self.root / here}: {explain(error)}", errno=error.errno) from error
            for entry, is_folder in entries:
                name = f"{here}/{entry}" if here else entry
                if is_folder:
                    if shallow and name.startswith(prefix):
                        yield f"{name}/"
                    elif name.startswith(prefix) or prefix.startswith(f"{name}/"):
                        pending.append(name)
                elif name.startswith(prefix):
                    yield name

    def delete(self, *names: str, durable: bool = False) -> None:
        """Remove these objects, if they are there, and the folders that they leave empty.

        `durable`: their folders are synced, whether the objects were still there or not.
        """
        errors = []
        for name in names:
            try:
                self._delete(name, durable)
            except (StorageError, UnsafeCheckpoint) as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _delete(self, name: str, durable: bool) -> None:
        path = self._path(name)
        gone = contextlib.suppress(FileNotFoundError)
        with gone, explained("delete", path), contextlib.suppress(NotADirectoryError):
            again(partial(_unlink_inside, self.root, check_name(name)))
        if durable:
            with explained("sync", path):
                sync_nearest(path.parent)
        remove_empty(path.parent, self.root, self._made)

    def link(self, name: str, source: Store, source_name: str) -> bool:
        """Give a file of another folder a second name here, by a hard link; False where that cannot be.

        The name is durable when a file beside it is committed.
        """
        held, held_as = innermost(source, source_name)
        if not isinstance(held, LocalStore):
            return False
        path, original = self._path(name), held.root.joinpath(*check_name(held_as))
        try:
            link_file(original, self.root, check_name(name), self._made)
        except OSError as error:  # removed meanwhile, another file system, no such links, too many, not permitted
            # On a network file system, the reply to a link that was made can be lost.
            if _are_one_file(original, path):
                return True
            _log.debug("cannot link %s to %s, so its data is written again: %s", path, original, error)
            return False
        return True

    def _path(self, name: str) -> Path:
        return self.root.joinpath(*check_name(name))


class LocalWriter:
    """A new file: straight to the device where its file system can do that, else through the page cache.

    `commit` syncs it and the folders that lead to it.
    """

    def __init__(
        self, path: Path, handle: int, root: Path, size_bytes: int, direct: bool, made: set[Path] | None = None
    ) -> None:
        self._path, self._handle, self._root = path, handle, root
        self._made = set() if made is None else made
        self._direct: int | None = None
        try:
            with explained("make room for", path):
                linux.preallocate(handle, size_bytes)
            if direct and size_bytes >= _DIRECT_FROM_BYTES:
                self._direct = linux.direct_handle(handle, os.O_WRONLY)
        except BaseException:
            self.abort()
            raise
        self.aligned = self._direct is not None

    def write(self, offset: int, views: Sequence[Buffer]) -> None:
        """Write all of `views`, one after the other, at `offset`."""
        parts = [memoryview(view).cast("B") for view in views if len(view)]
        with explained("write", self._path), _no_end(self._path):
            if self.aligned and len(parts) == 1 and _is_aligned(offset, parts[0]):
                done = self._write_direct(offset, parts[0])
                offset, parts = offset + done, [parts[0][done:]]
            _move_all(os.pwritev, self._handle, offset, parts, self._started)

    def _write_direct(self, offset: int, view: memoryview) -> int:
        """Write whole pages past the page cache. Gives the number of bytes: 0 where the file system refuses."""
        assert self._direct is not None
        length, done = len(view) // PAGE_BYTES * PAGE_BYTES, 0
        try:
            while done < length:
                count = os.pwrite(self._direct, view[done:length], offset + done)
                if count == 0:
                    raise EOFError
                done += count
                if count % PAGE_BYTES:  # an interrupted write; the rest goes the other way
                    break
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            self.aligned = False
        return done

    def _started(self, offset: int, length: int) -> None:
        if length >= _WRITE_OUT_BYTES:
            linux.start_writeback(self._handle, offset, length)

    def commit(self) -> None:
        """Return once the file and the folders that lead to it survive power loss."""
        with explained("sync", self._path):
            os.fsync(self._handle)
            self._close()
            sync_folders(self._path.parent, self._root)

    def abort(self) -> None:
        """Remove the file, whether finished or not."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        remove_empty(self._path.parent, self._root, self._made)

    def _close(self) -> None:
        handle, direct, self._handle, self._direct = self._handle, self._direct, -1, None
        try:
            if direct is not None:
                os.close(direct)
        finally:  # a close can fail (NFS, a lost mount) and then the other handle must not stay open
            if handle >= 0:
                os.close(handle)


class LocalReader:
    """An open file."""

    def __init__(self, path: Path, opening: "Callable[[], tuple[int, int]]") -> None:
        self._path, self._opening = path, opening
        self._handle, self._size = opening()
        self._stale: list[int] = []
        self._lock = threading.Lock()
        self._direct: int | None = None
        self._residency: linux.Residency | None = None

    @property
    def size_bytes(self) -> int:
        """The size of the file when it was opened."""
        return self._size

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill all of `views`, one after the other, from `offset`. Raises FileNotFoundError for a removed file."""
        with explained("read", self._path):
            handle = self._handle
            try:
                self._read(handle, offset, views)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                self._read(self._open_again(handle), offset, views)

    def _read(self, handle: int, offset: int, views: Sequence[memoryview]) -> None:
        try:
            _move_all(os.preadv, handle, offset, views)
        except EOFError:
            end = offset + sum(map(len, views))
            raise StorageError(f"{self._path} ends before byte {end}") from None

    def _open_again(self, stale: int) -> int:
        """A new handle on the file, where a network file system has given up the old one. Once for all threads."""
        with self._lock:
            if self._handle == stale:
                handle, size = self._opening()
                if size != self._size:
                    os.close(handle)
                    raise FileNotFoundError(errno.ENOENT, "Replaced by another file", str(self._path))
                self._stale.append(stale)  # other threads may still use it
                self._handle = handle
            return self._handle

    def is_cold(self, offset: int, length: int) -> bool:
        """Whether a range is not in the page cache, and can be read past it."""
        if self._residency is None:
            with self._lock:
                if self._residency is None:
                    self._direct = linux.direct_handle(self._handle, os.O_RDONLY)
                    self._residency = linux.Residency(self._handle, self._size)
        return self._direct is not None and not self._residency.is_cached(offset, length)

    def read_cold(self, offset: int, block: memoryview) -> None:
        """Fill page-aligned memory from a page-aligned offset, past the page cache."""
        done, length = 0, len(block) // PAGE_BYTES * PAGE_BYTES
        with explained("read", self._path), contextlib.suppress(_Refused):
            while self._direct is not None and done < length:
                count = _read_direct(self._direct, block[done:length], offset + done)
                done += count
                if count == 0 or count % PAGE_BYTES:
                    break
        self.read(offset + done, [block[done:]])

    def close(self) -> None:
        """Close the file. Never raises: nothing that was read depends on it."""
        handle, direct, self._handle, self._direct = self._handle, self._direct, -1, None
        if self._residency is not None:
            self._residency.close()
        for number in (*self._stale, handle, -1 if direct is None else direct):
            if number >= 0:
                with contextlib.suppress(OSError):  # the mount is gone; the handle is closed nevertheless
                    os.close(number)
        self._stale.clear()

    def __del__(self) -> None:
        if hasattr(self, "_residency"):  # it was opened
            self.close()


class _Refused(Exception):
    """The file system does no direct I/O here after all, or not any more."""


def _read_direct(handle: int, view: memoryview, offset: int) -> int:
    try:
        return os.preadv(handle, [view], offset)
    except OSError as error:
        if error.errno in _NOT_DIRECT or error.errno == errno.ESTALE:
            raise _Refused from None
        raise


def _is_aligned(offset: int, view: memoryview) -> bool:
    at = linux.address_of(view)
    return at != 0 and (at | offset) % PAGE_BYTES == 0


def _move_all(
    move: Callable[[int, Sequence[memoryview], int], int],
    handle: int,
    offset: int,
    views: Sequence[memoryview],
    moved: Callable[[int, int], None] | None = None,
) -> None:
    """Read into or write from all of the views. Raises EOFError where a read finds the end of the file."""
    pending = deque(view for view in views if len(view))
    while pending:
        batch = _batch(pending)
        count = move(handle, batch, offset)
        if count == 0:
            raise EOFError
        if moved is not None:
            moved(offset, count)
        offset += count
        for i, view in enumerate(batch):  # usually the whole batch was moved; else the rest is sent again
            if count < len(view):
                pending.extendleft(reversed([view[count:], *batch[i + 1 :]]))
                break
            count -= len(view)


def _batch(pending: deque[memoryview]) -> list[memoryview]:
    """The next views, for one call: about a MiB, because larger calls cost more a byte on some kernels."""
    batch: list[memoryview] = []
    room = _AT_ONCE_BYTES
    while pending and room and len(batch) < _VECTORS:
        view = pending.popleft()
        if len(view) > room:
            pending.appendleft(view[room:])
            view = view[:room]
        batch.append(view)
        room -= len(view)
    return batch


def _taken(path: Path) -> AlreadyExists:
    return AlreadyExists(f"{path} exists already", errno=errno.EEXIST)


def _are_one_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _open_to_read(root: Path, parts: tuple[str, ...]) -> tuple[int, int]:
    """A handle on a regular file, and its size."""
    try:
        handle = open_inside(root, parts, os.O_RDONLY | os.O_NONBLOCK)
    except NotADirectoryError:  # the store's folder is a file: there is nothing in it
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(root.joinpath(*parts))) from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafeCheckpoint(f"{root.joinpath(*parts)} is not a regular file; a checkpoint holds nothing else")
    except BaseException:
        os.close(handle)
        raise
    return handle, status.st_size


def _entries(folder: Path) -> list[tuple[str, bool]]:
    """The names in a folder, and whether each is a folder; links are not followed."""
    with os.scandir(folder) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def _unlink_inside(root: Path, parts: tuple[str, ...]) -> None:
    folder = folder_inside(root, parts)
    try:
        os.unlink(parts[-1], dir_fd=folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _no_end(path: Path) -> Iterator[None]:
    try:
        yield
    except EOFError:
        raise StorageError(f"cannot write {path}: the file system accepts no more bytes and gives no reason") from None
