"""The folders of a `LocalStore`: opened without following links, made, synced and removed; and what their errors mean.

A network file system answers ESTALE for what another machine has removed. Opening the path again tells whether it is
really gone, so every call that gets it runs once more; what is stale then is gone.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from milepost.errors import StorageError, UnsafeCheckpoint
from milepost.store import linux
from milepost.store.advice import explain

T = TypeVar("T")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
_NO_SYNC_OF_FOLDERS = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_TRIES = 20


# --- what errors mean


def is_gone(error: OSError) -> bool:
    """Whether an error says that the name, or a folder on the way to it, is not there any more."""
    return error.errno in _GONE


def again(action: Callable[[], T]) -> T:
    """Run an action that starts from a path. It runs once more if a handle on its way has become stale."""
    try:
        return action()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return action()


@contextlib.contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError into one that says what was tried, where, and what to do. What is stale is not found."""
    try:
        yield
    except (StorageError, FileNotFoundError):
        raise
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise FileNotFoundError(
                errno.ENOENT, "Removed by another machine (stale file handle)", str(path)
            ) from error
        raise StorageError(f"cannot {action} {path}: {explain(error)}", errno=error.errno) from error


# --- opening


def open_inside(root: Path, parts: tuple[str, ...], flags: int, make: bool = False) -> int:
    """Open a file below `root` without following a link anywhere on the way. FIFOs do not block, given O_NONBLOCK."""
    folder = folder_inside(root, parts, make)
    try:
        return os.open(parts[-1], flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)
    except OSError as error:
        raise _unsafe(error, root, parts) from None
    finally:
        os.close(folder)


def folder_inside(root: Path, parts: tuple[str, ...], make: bool = False) -> int:
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


# --- making


def create_file(root: Path, parts: tuple[str, ...], made: set[Path]) -> int:
    """Open a new file for writing, and make the folders it needs; `made` gets those that are not below `root`."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    return _in_new_folders(root, parts, made, lambda: open_inside(root, parts, flags, make=True))


def link_file(original: Path, root: Path, parts: tuple[str, ...], made: set[Path]) -> None:
    """Give a regular file a second name, and make the folders it needs. Raises OSError where that cannot be."""
    if not stat.S_ISREG(os.lstat(original).st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(original))

    def make() -> None:
        folder = folder_inside(root, parts, make=True)
        try:
            os.link(original, parts[-1], dst_dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            if not os.path.lexists(original):
                raise OSError(errno.ECANCELED, "Removed meanwhile", str(original)) from None
            raise
        finally:
            os.close(folder)

    _in_new_folders(root, parts, made, make)


def _in_new_folders(root: Path, parts: tuple[str, ...], made: set[Path], action: Callable[[], T]) -> T:
    """Run an action that makes folders below `root`, when `root` is there."""
    for _ in range(_TRIES):
        # Another save that cleans up may remove a folder between the two calls, while it is still empty.
        try:
            _make_folders(root, made)
            return action()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
    dangling = next(
        (f"{one} is a link to nothing" for one in (root, *root.parents) if one.is_symlink() and not one.exists()), ""
    )
    why = dangling or "another process keeps removing its folder, or it cannot be made"
    raise StorageError(f"cannot create {root.joinpath(*parts)}: {why}")


def _make_folders(folder: Path, made: set[Path]) -> None:
    """Make a folder and its parents. Each new one is synced into its parent: without that, a power cut can undo it.

    A folder that is there already needs nothing of the one above.
    """
    if folder.is_dir():
        return
    _make_folders(folder.parent, made)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
        made.add(folder)
    _sync_name(folder)


def _make_folder(name: str, parent: int) -> None:
    """Make one folder inside an open one, if it is missing, and sync the open one."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
        _sync_handle(parent)


# --- removing


def remove_empty(folder: Path, root: Path, made: set[Path]) -> None:
    """Remove a folder below `root` and its parents while they are empty; `root` and above only if in `made`.

    A process that is about to create a file in one of them makes it again: see `create_file`.
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


# --- syncing


def sync_folders(folder: Path, root: Path) -> None:
    """Sync the entries of everything from `folder` up to `root`, and the name of `root` in the folder above.

    Not only of folders that this process made: the process that made them may have died before its sync.
    """
    while folder not in (root, folder.parent):
        _sync_folder(folder)
        folder = folder.parent
    _sync_folder(folder)
    _sync_name(folder)


def sync_nearest(folder: Path) -> None:
    """Sync a folder or, where it is gone, the one that it is gone from."""
    while True:
        try:
            return _sync_folder(folder)
        except OSError as error:
            if not is_gone(error) or folder == folder.parent:
                raise
            folder = folder.parent


def _sync_name(folder: Path) -> None:
    """Make the name of a folder durable. Where it is the root of a file system, the folder above does not hold it."""
    real = Path(os.path.realpath(folder))  # behind a link: the folder above the link does not hold it either
    if not os.path.ismount(real):
        _sync_folder(real.parent, real)


def _sync_folder(folder: Path, inside: Path | None = None) -> None:
    """Sync the names in a folder; `inside` is another folder of the same file system.

    A folder may be closed to this user (mode 0711), or its file system may have no sync of folders. Then the whole
    file system is synced. That is slower, and never less.
    """

    def sync() -> None:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    try:
        again(sync)
    except OSError as error:
        if error.errno not in _NO_SYNC_OF_FOLDERS:
            raise
        handle = os.open(inside or folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            linux.sync_file_system(handle)
        finally:
            os.close(handle)


def _sync_handle(folder: int) -> None:
    """Sync the names in an open folder."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _NO_SYNC_OF_FOLDERS:
            raise
        linux.sync_file_system(folder)
