"""Runs the command line: in this process, in a process of its own, or in one on a terminal."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path

from milepost.cli.app import main

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
ESCAPE = "\x1b"


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it wrote."""

    status: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def lines(self):
        return self.out.splitlines()


def milepost(*arguments, stdin=None):
    """Run a command in this process: its output is that of a pipe."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    before, sys.stdin = sys.stdin, stdin or io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main([os.fspath(one) for one in arguments])
    finally:
        sys.stdin = before
    return Done(status, *(stream.buffer.getvalue().decode() for stream in (out, err)))


def fine(*arguments):
    """The same, for a command that ends well and has nothing to remark."""
    done = milepost(*arguments)
    assert (done.status, done.err) == (0, ""), done
    return done


def refused(status, *arguments):
    """The one line that a command complains with; its exit status is this one, and it prints nothing else."""
    done = milepost(*arguments)
    assert (done.status, done.out) == (status, ""), done
    assert done.err.startswith("milepost: ")
    assert done.err.count("\n") == 1
    assert done.err.endswith("\n")
    return done.err.removeprefix("milepost: ").strip()


def rows(out):
    """The rows of a table by its first column, each as a dict by title."""
    titles = [(found[0], found.start()) for found in re.finditer(r"[A-Z]+(?: [A-Z]+)*", out.splitlines()[0])]
    ends = {title: place + len(title) for title, place in titles}
    found = {}
    for line in out.splitlines()[1:]:
        words = re.split(r"  +", line.strip())
        if words[0].isdigit():
            found[int(words[0])] = words[1:]
    return list(ends), found


def environment(**further):
    """That of a process: with the library of this checkout."""
    ours = {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1", "TERM": "xterm-256color"}
    return {**os.environ, **ours, **{name: str(value) for name, value in further.items()}}


def command(*arguments, code=""):
    how = (
        ["-c", f"import sys\n{code}\nfrom milepost.cli.app import main; sys.exit(main())"]
        if code
        else ["-m", "milepost"]
    )
    return [sys.executable, *how, *map(os.fspath, arguments)]


def process(*arguments, code="", **further):
    """Run a command in a process of its own; `code` is what runs before it. `further`: variables of its environment."""
    done = subprocess.run(
        command(*arguments, code=code),
        capture_output=True,
        env=environment(**further),
        timeout=LIMIT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return Done(done.returncode, done.stdout.decode("utf-8", "surrogateescape"), done.stderr.decode())


def on_terminal(*arguments, columns=80, typed="", code="", **further):
    """Run a command on a terminal of so many columns; gives what it showed there, as one text, and its exit status."""
    main_end, its_end = pty.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    names = {name: value for name, value in environment(**further).items() if name not in ("COLUMNS", "LINES")}
    running = subprocess.Popen(command(*arguments, code=code), stdin=its_end, stdout=its_end, stderr=its_end, env=names)
    os.close(its_end)
    os.write(main_end, typed.encode())
    try:
        shown = b"".join(_read_to_end(main_end))
        return Done(running.wait(LIMIT_S), shown.decode().replace("\r\n", "\n"), "")
    finally:
        running.kill()
        running.wait()
        os.close(main_end)


def _read_to_end(main_end):
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        if select.select([main_end], [], [], 0.5)[0]:
            try:
                data = os.read(main_end, 65536)
            except OSError:  # the other end is closed
                return
            if not data:
                return
            yield data
