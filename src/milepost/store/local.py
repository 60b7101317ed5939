"""A store in a folder of a local or network file system.

Assumptions: `link` or `O_EXCL` creates a name at most once; `rename` is atomic; after `fsync` of a file and of its
folder, both survive power loss. Inside the folder no symbolic link is followed and only regular files are opened.
"""

import contextlib
import errno
import os
import secrets
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from milepost.core.limits import MIB, PAGE_BYTES
from milepost.errors import AlreadyExists, NotDurable, StorageError, UnsafeCheckpoint
from milepost.store import linux
from milepost.store.advice import explain
from milepost.store.base import CLAIM, Buffer, check_name

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_DIRECT = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
_DIRECT_FROM_BYTES = 4 * MIB
"""Smaller files go through the page cache: they gain nothing, and their readers find them there."""
_WRITE_OUT_BYTES = MIB // 2
_AT_ONCE_BYTES = MIB
_VECTORS = 1024  # IOV_MAX
_TRIES = 20


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

    def create(self, name: str, data: bytes) -> None:
        """Write a small object, whole and durable or not at all. Raises AlreadyExists if the name is taken."""
        path = self._path(name)
        temporary = f"{name}.{secrets.token_hex(4)}.tmp"
        writer = self.writer(temporary, len(data))
        try:
            writer.write(0, [data])
            writer.commit()
            with _explained("publish", path):
                self._publish(self._path(temporary), path)
            try:
                with _explained("sync", path):
                    _sync_folders(path.parent, self.root)
            except StorageError as error:
                # A caller that sees a failure must not find the object there.
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise NotDurable(f"{error}; it was taken back", errno=error.errno) from error
            self._made.clear()
        finally:
            writer.abort()

    def _publish(self, temporary: Path, path: Path) -> None:
        """Give the finished file its name, unless that is taken."""
        try:
            os.link(temporary, path)
        except FileExistsError:
            # NFS repeats a request whose reply was lost: then the name leads to this very file, and it is done.
            if not _are_one_file(temporary, path):
                raise AlreadyExists(f"{path} exists already", errno=errno.EEXIST) from None
        except FileNotFoundError:
            # The process that committed this name first may have removed our temporary file.
            if path.exists():
                raise AlreadyExists(f"{path} exists already", errno=errno.EEXIST) from None
            raise
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # No hard links here (some FUSE file systems): the process that creates the claim may rename. If it dies in
            # between, the claim stays and this name is never used; `commit.attempt.take_aim` skips it.
            claim = path.with_name(path.name + CLAIM)
            try:
                os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            except FileExistsError:
                raise AlreadyExists(f"{path} exists already", errno=errno.EEXIST) from None
            try:
                if path.exists():
                    raise AlreadyExists(f"{path} exists already", errno=errno.EEXIST)
                os.rename(temporary, path)
            finally:
                os.unlink(claim)

    def writer(self, name: str, size_bytes: int, *, direct: bool = True) -> "LocalWriter":
        """Start a new object of this size. Raises AlreadyExists for a taken name, StorageError if there is no room."""
        path = self._path(name)
        with _explained("create", path):
            try:
                handle = _create_file(self.root, check_name(name), self._made)
            except FileExistsError:
                raise AlreadyExists(f"{path} exists already", errno=errno.EEXIST) from None
            except BaseException:
                _remove_empty(path.parent, self.root, self._made)
                raise
        return LocalWriter(path, handle, self.root, size_bytes, direct, self._made)

    def reader(self, name: str) -> "LocalReader":
        """Open an object. Raises FileNotFoundError if there is none, UnsafeCheckpoint for links and special files."""
        path = self._path(name)
        with _explained("open", path):
            handle = _open_inside(self.root, check_name(name), os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise UnsafeCheckpoint(f"{path} is not a regular file; a checkpoint holds nothing else")
        except BaseException:
            os.close(handle)
            raise
        return LocalReader(path, handle, status.st_size)

    def list(self, prefix: str) -> Iterator[str]:
        """The names that start with `prefix`; folders that cannot match are not opened, links are not followed."""
        pending = [""]
        while pending:
            here = pending.pop()
            try:
                entries = list(os.scandir(self.root / here))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise StorageError(f"cannot list {self.root / here}: {explain(error)}", errno=error.errno) from error
            for entry in entries:
                name = f"{here}/{entry.name}" if here else entry.name
                if entry.is_dir(follow_symlinks=False):
                    if name.startswith(prefix) or prefix.startswith(f"{name}/"):
                        pending.append(name)
                elif name.startswith(prefix):
                    yield name

    def delete(self, name: str, *, durable: bool = False) -> None:
        """Remove an object if it is there, and the folders that it leaves empty.

        `durable`: its folder is synced, whether the object was still there or not.
        """
        path = self._path(name)
        with _explained("delete", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folder = _folder_inside(self.root, check_name(name))
            try:
                os.unlink(path.name, dir_fd=folder)
            finally:
                os.close(folder)
        if durable:
            with _explained("sync", path):
                _sync_nearest(path.parent)
        _remove_empty(path.parent, self.root, self._made)

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
            with _explained("make room for", path):
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
        with _explained("write", self._path), _no_end(self._path):
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
        with _explained("sync", self._path):
            os.fsync(self._handle)
            self._close()
            _sync_folders(self._path.parent, self._root)

    def abort(self) -> None:
        """Remove the file, whether finished or not."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        _remove_empty(self._path.parent, self._root, self._made)

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

    def __init__(self, path: Path, handle: int, size_bytes: int) -> None:
        self._path, self._handle, self._size = path, handle, size_bytes
        self._lock = threading.Lock()
        self._direct: int | None = None
        self._residency: linux.Residency | None = None

    @property
    def size_bytes(self) -> int:
        """The size of the file when it was opened."""
        return self._size

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill all of `views`, one after the other, from `offset`."""
        with _explained("read", self._path):
            try:
                _move_all(os.preadv, self._handle, offset, views)
            except EOFError:
                end = offset + sum(map(len, views))
                raise StorageError(f"{self._path} ends before byte {end}") from None

    def is_cold(self, offset: int, length: int) -> bool:
        """Whether a range is not in the page cache, and can be read past it."""
        with self._lock:
            if self._residency is None:
                self._residency = linux.Residency(self._handle, self._size)
                self._direct = linux.direct_handle(self._handle, os.O_RDONLY)
            return self._direct is not None and not self._residency.is_cached(offset, length)

    def read_cold(self, offset: int, block: memoryview) -> None:
        """Fill page-aligned memory from a page-aligned offset, past the page cache."""
        done, length = 0, len(block) // PAGE_BYTES * PAGE_BYTES
        with _explained("read", self._path), contextlib.suppress(_Refused):
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
        for one in (handle, direct):
            if one is not None and one >= 0:
                with contextlib.suppress(OSError):  # the mount is gone; the handle is closed nevertheless
                    os.close(one)

    def __del__(self) -> None:
        self.close()


class _Refused(Exception):
    """The file system does no direct I/O here after all."""


def _read_direct(handle: int, view: memoryview, offset: int) -> int:
    try:
        return os.preadv(handle, [view], offset)
    except OSError as error:
        if error.errno in _NOT_DIRECT:
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


def _open_inside(root: Path, parts: tuple[str, ...], flags: int, make: bool = False) -> int:
    """Open a file below `root` without following a link anywhere on the way. FIFOs do not block, given O_NONBLOCK."""
    folder = _folder_inside(root, parts, make)
    try:
        return os.open(parts[-1], flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)
    except OSError as error:
        raise _unsafe(error, root, parts) from None
    finally:
        os.close(folder)


def _folder_inside(root: Path, parts: tuple[str, ...], make: bool = False) -> int:
    """Open the folder that a name lies in, step by step from `root`; `make`: create missing folders."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            if make:
                _make_folder(part, folder)
            inner = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
    except OSError as error:
        os.close(folder)
        raise _unsafe(error, root, parts) from None
    return folder


def _unsafe(error: OSError, root: Path, parts: tuple[str, ...]) -> Exception:
    """An UnsafeCheckpoint where a link or special file was met, else the given error."""
    # ELOOP for a link in the last place; ENOTDIR for one (or a file) in a folder's place; ENXIO for a socket.
    if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
        return error
    where = root.joinpath(*parts)
    return UnsafeCheckpoint(f"{where} is or goes through a link or special file; a checkpoint holds none")


def _create_file(root: Path, parts: tuple[str, ...], made: set[Path]) -> int:
    """Open a new file for writing, and make the folders it needs; `made` gets those that are not below `root`."""
    for _ in range(_TRIES):
        # Another save that cleans up may remove a folder between the two calls, while it is still empty.
        with contextlib.suppress(FileNotFoundError):
            _make_folders(root, made)
            return _open_inside(root, parts, os.O_CREAT | os.O_EXCL | os.O_WRONLY, make=True)
    dangling = next(
        (f"{one} is a link to nothing" for one in (root, *root.parents) if one.is_symlink() and not one.exists()), ""
    )
    why = dangling or "another process keeps removing its folder, or it cannot be made"
    raise StorageError(f"cannot create {root.joinpath(*parts)}: {why}")


def _make_folders(folder: Path, made: set[Path]) -> None:
    """Make a folder and its parents. Each new one is synced into its parent: without that, a power cut can undo it."""
    if folder.is_dir():
        return
    _make_folders(folder.parent, made)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
        made.add(folder)
    _sync_folder(folder.parent)


def _make_folder(name: str, parent: int) -> None:
    """Make one folder inside an open one, if it is missing, and sync the open one."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
        os.fsync(parent)


def _remove_empty(folder: Path, root: Path, made: set[Path]) -> None:
    """Remove a folder below `root` and its parents while they are empty; `root` and above only if in `made`.

    A process that is about to create a file in one of them makes it again: see `_create_file`.
    """
    with contextlib.suppress(OSError):  # not empty
        while folder != root:
            _remove_folder(folder)
            folder = folder.parent
        for folder in sorted(made, reverse=True):  # the innermost first
            _remove_folder(folder)
            made.discard(folder)


def _remove_folder(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # never made, or another rank was faster
        os.rmdir(folder)


def _are_one_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _sync_folders(folder: Path, root: Path) -> None:
    """Sync the entries of everything from `folder` up to `root`, and of `root` in its parent.

    Not only of folders that this process made: the process that made them may have died before its sync.
    """
    while True:
        _sync_folder(folder)
        if folder in (root.parent, folder.parent):
            return
        folder = folder.parent


def _sync_nearest(folder: Path) -> None:
    """Sync a folder or, where it is gone, the one that it is gone from."""
    while True:
        try:
            return _sync_folder(folder)
        except FileNotFoundError:
            folder = folder.parent


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _no_end(path: Path) -> Iterator[None]:
    try:
        yield
    except EOFError:
        raise StorageError(f"cannot write {path}: the file system accepts no more bytes and gives no reason") from None


@contextlib.contextmanager
def _explained(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError into one that says what was tried, where, and what to do."""
    try:
        yield
    except (StorageError, FileNotFoundError):
        raise
    except OSError as error:
        raise StorageError(f"cannot {action} {path}: {explain(error)}", errno=error.errno) from error
