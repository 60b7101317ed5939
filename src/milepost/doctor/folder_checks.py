"""What a folder of a file system must do, and what it is like."""

import errno
import mmap
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from milepost.core.limits import GIB, PAGE_BYTES
from milepost.data.transfer import new_pages
from milepost.doctor.mounts import MountedFileSystem, Nature, file_system_of
from milepost.doctor.records import PlaceCheck
from milepost.store import linux
from milepost.store.advice import explain
from milepost.store.claims import NO_LINKS

_FEW_BYTES, _FEW_INODES, _FEW_HANDLES = 10 * GIB, 10_000, 1024
_SYNCS, _SLOW_SYNC_S = 10, 0.25
_FAST_CLOCK_S = 2.0
_ADVICE: dict[Nature, str] = {
    "disk": "",
    "network": "",
    "memory": "It is memory: a reboot loses it. Save to a disk or an object store",
    "container": "It is the container's own layer, and is lost with it. Mount a volume, and save there",
    "objects": "An object store behind a file system keeps no promise of a disk. Save to its URL: s3://, gs://, az://",
}


def check_file_system(folder: Path) -> PlaceCheck:
    """Which file system it is, and whether that lasts."""
    found = file_system_of(folder)
    if found is None:
        return PlaceCheck(name="file system", state="ok", found="not known: this system does not tell")
    advice = _ADVICE[found.nature] or _of_options(found)
    return PlaceCheck(name="file system", state="warn" if advice else "ok", found=found.text, advice=advice)


def _of_options(found: MountedFileSystem) -> str:
    if found.kind.startswith("nfs") and "soft" in found.options:
        return "Mounted `soft`: a server that is slow for a while looks like a broken disk. Mount it `hard`"
    if found.kind == "nfs" and found.options & {"vers=2", "nfsvers=2"}:
        return "NFS 2 creates no file exclusively. Mount it as version 3 or 4"
    return ""


def check_links(folder: Path) -> PlaceCheck:
    """Whether a finished file can be given its name by a hard link, and a rename replaces."""
    one, other = folder / "linked", folder / "linked too"
    one.write_bytes(b"1")
    try:
        os.link(one, other)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        found = "no hard links: commits claim a name and rename"
    else:
        found = "hard links"
        if not os.path.samefile(one, other):
            return PlaceCheck(name="links", state="fail", found="a hard link leads to another file", advice=_BROKEN)
    (folder / "renamed").write_bytes(b"2")
    os.replace(folder / "renamed", other)
    if other.read_bytes() != b"2" or (folder / "renamed").exists():
        return PlaceCheck(name="links", state="fail", found="a rename does not replace a file", advice=_BROKEN)
    return PlaceCheck(name="links", state="ok", found=f"{found}, and renames replace")


_BROKEN = "This file system is broken, or misses what programs rely on. Use another place"


def check_sync(folder: Path) -> PlaceCheck:
    """Whether files and folders can be synced, and how long that takes."""
    path, data = folder / "synced", os.urandom(PAGE_BYTES)
    of_file, of_folder = list[float](), list[float]()
    words = ""
    for number in range(_SYNCS):
        handle = os.open(f"{path}-{number}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            os.write(handle, data)
            of_file.append(_timed(lambda handle=handle: os.fsync(handle)))  # type: ignore[misc]
        finally:
            os.close(handle)
        above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            of_folder.append(_timed(lambda above=above: os.fsync(above)))  # type: ignore[misc]
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            of_folder.append(_timed(lambda above=above: linux.sync_file_system(above)))  # type: ignore[misc]
            words = "; folders cannot be synced, so the whole file system is"
        finally:
            os.close(above)
    file_s, folder_s = statistics.median(of_file), statistics.median(of_folder)
    slow = max(file_s, folder_s) > _SLOW_SYNC_S
    return PlaceCheck(
        name="sync",
        state="warn" if slow else "ok",
        found=f"a file {file_s * 1000:.2f} ms, a folder {folder_s * 1000:.2f} ms (median of {_SYNCS}){words}",
        advice="Each file of a save waits for that. Is the disk busy?" if slow else "",
        numbers={"file_s": round(file_s, 6), "folder_s": round(folder_s, 6)},
    )


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def check_space(folder: Path, size_bytes: int) -> PlaceCheck:
    """How much is free, and whether this user may take some of it: quotas show only there."""
    free = os.statvfs(folder)
    free_bytes, inodes = free.f_bavail * free.f_frsize, free.f_favail if free.f_files else None
    numbers = {"free_bytes": float(free_bytes)} | ({} if inodes is None else {"free_inodes": float(inodes)})
    found = f"{free_bytes / 1e9:,.1f} GB free" + ("" if inodes is None else f", and room for {inodes:,} files")
    few = free_bytes < _FEW_BYTES or (inodes is not None and inodes < _FEW_INODES)
    handle = os.open(folder / "room", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        linux.preallocate(handle, size_bytes)
    except OSError as error:
        return PlaceCheck(
            name="space",
            state="fail",
            found=f"{found}, but no room for {size_bytes / 1e6:,.0f} MB: {explain(error)}",
            advice="Free some space or raise the quota, or save elsewhere",
            numbers=numbers,
        )
    finally:
        os.close(handle)
        os.unlink(folder / "room")
    advice = "A save needs room for the new checkpoint beside the old one" if few else ""
    return PlaceCheck(name="space", state="warn" if few else "ok", found=found, advice=advice, numbers=numbers)


def clock_of(path: Path) -> float:
    """How far the clock of a file system is ahead of this machine's, in seconds. Writes a file there."""
    before = time.time()
    path.write_bytes(b"1")
    after = time.time()
    written = path.stat().st_mtime
    return written - after if written > after else written - before if written < before else 0.0


def check_clock(folder: Path) -> PlaceCheck:
    """Whether the file system's clock is that of this machine."""
    return told_clock(clock_of(folder / "clock"), "file system")


def told_clock(ahead_s: float, of: str) -> PlaceCheck:
    """What a difference between two clocks means."""
    numbers = {"ahead_s": round(ahead_s, 3)}
    if abs(ahead_s) <= _FAST_CLOCK_S:
        return PlaceCheck(
            name="clock", state="ok", found=f"that of the {of} agrees with this machine's", numbers=numbers
        )
    word = "ahead of" if ahead_s > 0 else "behind"
    return PlaceCheck(
        name="clock",
        state="warn",
        found=f"that of the {of} is {abs(ahead_s):,.1f} s {word} this machine's",
        advice="Ages of checkpoints will be wrong, and no promise depends on them. Run NTP on both",
        numbers=numbers,
    )


def check_names(folder: Path) -> PlaceCheck:
    """Whether names that differ in upper and lower case are two."""
    (folder / "Case").write_bytes(b"1")
    if not os.path.lexists(folder / "cASE"):
        return PlaceCheck(name="names", state="ok", found="upper and lower case differ")
    advice = "Two places whose names differ only in that are one. Milepost's own names do not"
    return PlaceCheck(name="names", state="warn", found="upper and lower case are the same", advice=advice)


def check_direct(folder: Path) -> PlaceCheck:
    """Whether files can be read and written past the page cache."""
    path = folder / "direct"
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        direct = linux.direct_handle(handle, os.O_RDWR)
        works = direct is not None
        if direct is not None:
            try:
                works = os.pwrite(direct, new_pages(PAGE_BYTES), 0) == PAGE_BYTES
            except OSError:
                works = False
            finally:
                os.close(direct)
    finally:
        os.close(handle)
    found = "works" if works else "not here: bytes go through the page cache, which is slower and pushes other data out"
    return PlaceCheck(name="direct I/O", state="ok", found=found, numbers={"works": float(works)})


def check_map(folder: Path) -> PlaceCheck:
    """Whether a file can be mapped into memory: other programs read safetensors files so."""
    path, data = folder / "mapped", os.urandom(PAGE_BYTES)
    path.write_bytes(data)
    page = {"page_bytes": float(mmap.PAGESIZE)}
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
            same = pages[:] == data
    except OSError as error:
        advice = "Milepost does without. Programs that map safetensors files will fail here"
        return PlaceCheck(name="memory map", state="warn", found=explain(error), advice=advice, numbers=page)
    found = "works" if same else "a file that is mapped shows other bytes"
    return PlaceCheck(
        name="memory map",
        state="ok" if same else "fail",
        found=f"{found} (pages of {mmap.PAGESIZE:,} bytes)",
        advice="" if same else _BROKEN,
        numbers=page,
    )


def check_limits() -> PlaceCheck:
    """The limits of this process: how long a file may be, and how many may be open."""
    length, handles = resource.getrlimit(resource.RLIMIT_FSIZE)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    wrong = []
    if length != resource.RLIM_INFINITY:
        wrong.append(f"files of at most {length / 1e9:,.1f} GB (ulimit -f)")
    if handles != resource.RLIM_INFINITY and handles < _FEW_HANDLES:
        wrong.append(f"at most {handles} open files (ulimit -n)")
    if not wrong:
        return PlaceCheck(name="limits", state="ok", found="none that matter for this process")
    return PlaceCheck(name="limits", state="warn", found=", ".join(wrong), advice="Raise them where the job is started")
