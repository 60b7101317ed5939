"""Giving a finished file its name where there are no hard links (some FUSE file systems): by a claim, and a rename.

The process that creates the claim may rename. If it dies in between, the claim stays and the name is never used;
`commit.attempt.take_aim` skips it.
"""

import contextlib
import errno
import os
from pathlib import Path

from milepost.store import linux
from milepost.store.base import CLAIM
from milepost.store.folders import is_gone

NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""What a file system without links, hard or symbolic, answers."""


def publish_by_rename(temporary: Path, path: Path, data: bytes) -> None:
    """Give a file of this content its name. Raises FileExistsError if the name is taken, or claimed by another."""
    claim = path.with_name(path.name + CLAIM)
    _create_claim(claim, temporary.name)
    try:
        # A rename replaces, and a file system may remember for a while that a name was free. So it is looked for in
        # a new listing, too, and afterwards it must lead to what was renamed.
        if os.path.lexists(path) or path.name in os.listdir(path.parent):
            raise _taken(path)
        _rename(temporary, path, data)
    finally:
        with contextlib.suppress(OSError):  # it does no harm, and is swept
            os.unlink(claim)


def _create_claim(claim: Path, owner: str) -> None:
    """Create a claim. Raises FileExistsError if it is another's.

    A symbolic link is there in one step with its text, which says whose it is: if the reply to its creation is lost,
    its owner still knows it. An empty file says nothing. It is the claim only where there are no such links.
    """
    try:
        os.symlink(owner, claim)
    except FileExistsError:
        if not _says(claim, owner):
            raise
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))


def _says(claim: Path, owner: str) -> bool:
    try:
        return os.readlink(claim) == owner
    except OSError:
        return False


def _rename(temporary: Path, path: Path, data: bytes) -> None:
    """Rename, and look: the reply to a rename can be lost as well, and a rename can have replaced what was there."""
    handle = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            linux.rename_to_free_name(str(temporary), str(path))
        except OSError:
            if not _is_listed(handle, path) and not _holds(path, data):
                raise
            return
    finally:
        os.close(handle)
    if not _holds(path, data):
        raise _taken(path)


def _is_listed(handle: int, path: Path) -> bool:
    """Whether the folder lists this open file under this name.

    A client of a network file system may go on believing that the name is free, after a rename of its own of which it
    has not heard. Then the file cannot be opened by its name for a while, but it is listed.
    """
    try:
        number = os.fstat(handle).st_ino
        with os.scandir(path.parent) as entries:
            return any(entry.name == path.name and entry.inode() == number for entry in entries)
    except OSError:
        return False


def _holds(path: Path, data: bytes) -> bool:
    """Whether there is a file of this content. Raises OSError where that cannot be told."""
    try:
        return path.stat().st_size == len(data) and path.read_bytes() == data
    except OSError as error:
        if is_gone(error):
            return False
        raise


def _taken(path: Path) -> FileExistsError:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
