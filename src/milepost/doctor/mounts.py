"""Which file system a folder is on, and what that means for checkpoints."""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MOUNTS = Path("/proc/self/mountinfo")
Nature = Literal["disk", "memory", "container", "network", "objects"]
_ESCAPE = re.compile(r"\\([0-7]{3})")
_NATURES: dict[str, Nature] = {
    **dict.fromkeys(("tmpfs", "ramfs", "devtmpfs"), "memory"),
    **dict.fromkeys(("overlay", "aufs"), "container"),
    **dict.fromkeys(
        ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "virtiofs", "glusterfs"), "network"
    ),
    **dict.fromkeys(("orangefs", "panfs", "wekafs", "afs", "fuse.sshfs", "fuse.juicefs", "fuse.glusterfs"), "network"),
    **dict.fromkeys(
        ("fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.blobfuse2", "fuse.mount-s3", "fuse.rclone"), "objects"
    ),
}


@dataclass(frozen=True, slots=True)
class MountedFileSystem:
    """A file system: its type, what is mounted, where, and with which options."""

    kind: str
    source: str
    mounted_at: str
    options: frozenset[str]

    @property
    def nature(self) -> Nature:
        """What it is like. One that is not known counts as a disk, or as a network where it is served by a process."""
        return _NATURES.get(self.kind, "network" if self.kind.startswith("fuse.") else "disk")

    @property
    def text(self) -> str:
        """`ext4 on /dev/vda, mounted at /`."""
        return f"{self.kind} on {self.source}, mounted at {self.mounted_at}"


def file_system_of(folder: Path, mounts: Path = MOUNTS) -> MountedFileSystem | None:
    """The file system that a folder is on; None where the system does not tell."""
    found: MountedFileSystem | None = None
    path = Path(os.path.realpath(folder))
    with contextlib.suppress(OSError):
        for line in mounts.read_text(errors="surrogateescape").splitlines():
            one = _parsed(line)
            # Of several at one place, the last is on top.
            if one is not None and path.is_relative_to(one.mounted_at):
                found = one if found is None or len(one.mounted_at) >= len(found.mounted_at) else found
    return found


def _parsed(line: str) -> MountedFileSystem | None:
    before, dash, after = line.partition(" - ")
    fields, further = before.split(), after.split()
    if not dash or len(fields) < 6 or len(further) < 2:
        return None
    options = frozenset(fields[5].split(",")) | frozenset((further[2:3] or [""])[0].split(","))
    return MountedFileSystem(further[0], _plain(further[1]), _plain(fields[4]), options)


def _plain(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), text)
