"""A network file system for tests: one folder on a server, and mounts of it as clients of NFS see it.

    with NetworkFiles(folder, clients=2) as network:
        first, second = network.clients          # two folders: the same files, seen from two machines
        network.believe(attributes_s=2, names_s=2, absence_s=2, listings_s=2)
        network.lose_reply("link", name="manifest")
        milepost.save(state, first / "step")

`netfs.c` is the file system. The kernel mounts it by FUSE, so that programs use it as they use any other. What it does:

* **Caches.** A client believes for some seconds what it has seen: attributes, where a name leads, that a name does not
  exist, what a folder lists. Its own changes it sees at once. `open(2)` asks for the attributes again, and an exclusive
  create for the name, as on NFS.
* **Close-to-open.** What a client writes reaches the server when the file is synced or closed; another client sees it
  when it opens the file after that. An error of a write is told by `fsync` or `close`.
* **Lost replies.** A call is made, and said to have failed, as when a client repeats a request whose reply was lost:
  EEXIST for a link, symlink, create or mkdir, ENOENT for an unlink, rename or rmdir.
* **Stale handles.** ESTALE for an open file, or a folder, that another client deleted.
* **Silly names.** A file that is deleted by the client that has it open becomes `.nfs...`, until it is closed. That
  client cannot delete it again (EBUSY), and nobody its folder.
* **What is missing.** Hard links and direct I/O can be. `renameat2` with flags and `fallocate` are, unless asked for.
  `O_TMPFILE` always is.
* **Crashes.** `crash` empties all files that no client has synced, and takes away new names whose folder no client has
  synced. `cut` ends one client, with what it has not sent.

Needs Linux, root, `/dev/fuse` and a C compiler; `why_not` says which is missing. No library is needed.
"""

import atexit
import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

_DEVICE = Path("/dev/fuse")
_LIMIT_S = 20


@cache
def why_not() -> str | None:
    """Why there is no network file system here, or None if there is."""
    if sys.platform != "linux":
        return "needs Linux"
    if os.geteuid() != 0:
        return "needs root, to mount"
    if not _DEVICE.exists():
        return "needs /dev/fuse"
    if _compiler() is None:
        return "needs a C compiler"
    with tempfile.TemporaryDirectory() as folder:
        try:
            NetworkFiles(Path(folder)).close()
        except RuntimeError as error:
            return str(error)
    return None


class NetworkFiles:
    """A server in `folder`, and mounts of it: `clients`, the first of which is `client`. `close` unmounts them."""

    def __init__(self, folder: Path, clients: int = 1) -> None:
        self.server = folder / "server"
        self.clients = [folder / f"client{number}" for number in range(clients)]
        for one in (self.server, *self.clients):
            one.mkdir(parents=True)
        self._process = subprocess.Popen(
            [_program(), self.server, *self.clients],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._answer()

    @property
    def client(self) -> Path:
        """The folder of the first client."""
        return self.clients[0]

    def believe(
        self, *, attributes_s: float = 0, names_s: float = 0, absence_s: float = 0, listings_s: float = 0
    ) -> None:
        """For how many seconds clients believe what they have seen."""
        for name, value in {
            "attr_s": attributes_s,
            "entry_s": names_s,
            "negative_s": absence_s,
            "list_s": listings_s,
        }.items():
            self._say(f"set {name} {value}")

    def without_links(self, error: int = errno.EPERM) -> None:
        """Hard links are refused with this error."""
        self._say(f"set link_errno {error}")

    def without_direct(self) -> None:
        """Direct I/O is refused."""
        self._say("set direct 0")

    def with_rename_flags(self) -> None:
        """`renameat2` takes flags such as RENAME_NOREPLACE."""
        self._say("set rename_flags 1")

    def with_fallocate(self) -> None:
        """Files can be given their size before they are written."""
        self._say("set fallocate 1")

    def lose_reply(self, call: str, *, name: str = "", skip: int = 0, times: int = 1, percent: int = 100) -> None:
        """Make a call, and answer it as its repetition is answered.

        Calls: link, symlink, create, mkdir, rename, unlink, rmdir.
        `create` is an exclusive one. Of the calls whose name contains `name`, `skip` pass first and then `times` (0:
        all) are broken. Of a rename or link the new name counts.
        """
        self._fault(call, 0, after=True, name=name, skip=skip, times=times, percent=percent)

    def fail(self, call: str, error: int, *, client: int = -1, name: str = "", skip: int = 0, times: int = 1) -> None:
        """Answer a call with an error, without making it.

        Beside the calls of `lose_reply`: make (a create that is not exclusive), open, read, opendir, readdir, flush (a
        close), fsync, fsyncdir, and `store`: sending what was written to the server, which loses it.
        """
        self._fault(call, error, after=False, name=name, skip=skip, times=times, percent=100, client=client)

    def heal(self) -> None:
        """Forget all faults that have not happened yet."""
        self._say("clear")

    def count(self, call: str) -> int:
        """How many calls of this name the clients have made."""
        return self._say(f"count {call}")

    @property
    def hits(self) -> int:
        """How many calls were answered with a fault."""
        return self._say("hits")

    def crash(self) -> None:
        """The server loses its power: bytes and new names that no client has synced are gone."""
        self._say("crash")

    def cut(self, client: int) -> None:
        """A client loses its power. Its calls end with an error, and what it has not sent is lost."""
        self._say(f"cut {client}")

    def close(self) -> None:
        """Unmount everything."""
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, or was closed before
            # Said, not only shown by the end of the pipe: a fork of this process may have that open, too.
            self._process.communicate("quit\n", timeout=_LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _fault(
        self, call: str, error: int, *, after: bool, name: str, skip: int, times: int, percent: int, client: int = -1
    ) -> None:
        self._say(f"fault {client} {call} {error} {after:d} {skip} {times} {percent} {name or '-'}")

    def _say(self, line: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        result = self._answer()
        if result < 0:
            raise ValueError(f"the file system does not understand {line!r}")
        return result

    def _answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            _, errors = self._process.communicate(timeout=_LIMIT_S)
            raise RuntimeError(f"the network file system ended: {errors.strip()}")
        return int(line)


def _compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")


@cache
def _program() -> Path:
    """The file system, compiled once a process."""
    folder = Path(tempfile.mkdtemp(prefix="netfs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    compiler = _compiler()
    assert compiler is not None, "why_not says so"
    program, source = folder / "netfs", Path(__file__).with_name("netfs.c")
    made = subprocess.run(
        [compiler, "-O2", "-pthread", "-o", program, source], capture_output=True, text=True, check=False
    )
    if made.returncode:
        raise RuntimeError(f"netfs.c cannot be compiled here: {made.stderr.strip()[:500]}")
    return program
