"""Runs the code blocks of a Markdown page, in order, in one process, and gives what each of them printed.

A `python` block runs. If its first line is `# name.py`, it is written to that file instead. A `text` block shows what
the blocks before it printed, back to the last `text` block; `...` stands for any part of a line. In a `console` block,
lines with `$ ` are commands for a shell, and the lines below a command are found in its output, in this order. There,
what differs from run to run matches any of its kind: times, ages, sizes, ids of saves, numbers with three decimals or
more, and the spaces of a table.

A page whose first line is `<!-- server: s3 -->` (or `gcs`, `azure`) runs beside such a server, which has the bucket
that its URLs name: `SERVERS`.

    python -m tests.pages docs/reference/errors.md      # rewrites the blocks that are not what is printed today
"""

import atexit
import contextlib
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from dataclasses import dataclass
from pathlib import Path

from faults import servers

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SERVER = re.compile(r"\A<!-- server: (\w+) -->\n")
VARYING = [
    (r"\.\.\.", r".*?"),
    (r"\d{4}-\d\d-\d\dT[\d:]+(?:\+00:00)?", r"\d{4}-\d\d-\d\dT[\d:]+(?:\+00:00)?"),
    (r"\d{8}-[0-9a-f]{16}", r"\d{8}-[0-9a-f]{16}"),
    (r"\d[\d.,]* (?:s|min|h|d|B|KiB|MiB|GiB|TiB)\b", r"\d[\d.,]* (?:s|min|h|d|B|KiB|MiB|GiB|TiB)\b"),
    (r"-?\d+\.\d{3,}(?:e-\d+)?", r"-?\d[\d.]*(?:e-\d+)?"),
    (r" {2,}", r" +"),
]
"""In the output that a `console` block shows: what to look for in its stead."""
FILE = re.compile(r"\A# (\w+\.py)\n")
MARK = "\x1eblock"
LIMIT_S = 150.0
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "milepost.api",
    "milepost.dcp",
    "milepost.testing",
]
"""One server imports these, and each page is a fork of it: importing torch takes longer than most pages."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: its language, its text, and where the text stands in the page."""

    kind: str
    text: str
    start: int
    end: int


def blocks(page):
    """All fenced blocks of a page."""
    return [Block(found[1], found[2], found.start(2), found.end(2)) for found in BLOCK.finditer(page.read_text())]


def server_of(page):
    """The kind of server that a page needs, or None."""
    found = SERVER.match(page.read_text())
    return found and found[1]


def execute(sources, folder, environment, on_warning):
    """Run the blocks as one program, with a mark before the output of each. The target of the forked process."""
    os.chdir(folder)
    os.environ.update(environment)
    output = os.open(folder / ".output", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    warnings.simplefilter(on_warning)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    for number, source in enumerate(sources):
        print(MARK, flush=True)
        try:
            exec(compile(source, f"block {number}", "exec"), vars(main))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        sys.stdout.flush()
    atexit._run_exitfuncs()


def run_python(sources, folder, on_warning="error", further=None):
    """What each of the blocks printed. Raises AssertionError, with the output, if one of them fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=execute, args=(sources, folder, group | (further or {}), on_warning))
    process.start()
    process.join(LIMIT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    printed = (folder / ".output").read_text().replace(f"{folder}/", "")
    assert process.exitcode == 0, f"exit code {process.exitcode}:\n{printed.replace(MARK, '-----')}"
    return printed.split(f"{MARK}\n")[1:]


def run_commands(text, folder, further):
    """Run the commands of a `console` block. Gives the block with all that is printed today, and what it misses."""
    root = Path(__file__).parent.parent
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(root / "src"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",  # the width of help
        **further,
    }
    blocks_now, missing = [], []
    for command, shown in re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, text=True, timeout=LIMIT_S, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        printed = rest = done.stdout.replace(f"{folder}/", "")
        blocks_now.append(f"$ {command}\n{printed}")
        for line in shown.splitlines():
            found = re.search(pattern_of(line), rest)
            if found is None:
                missing.append(f"$ {command}\ndoes not print {line!r} (or not in this order) but\n{printed}")
                break
            rest = rest[found.end() :]
    return "".join(blocks_now), missing


def pattern_of(line):
    """The regular expression for a line of a `console` block."""
    parts = re.split("|".join(f"({kind})" for kind, _ in VARYING), line)
    pieces, step = [], len(VARYING) + 1
    for at, part in enumerate(parts):
        if at % step == 0:
            pieces.append(re.escape(part))
        elif part is not None:
            pieces.append(VARYING[at % step - 1][1])
    return "".join(pieces)


def shows(text, printed):
    """Whether the text of a block is part of what was printed."""
    return re.search(re.escape(text.strip()).replace(r"\.\.\.", ".*?"), printed) is not None


@dataclass(frozen=True, slots=True)
class PageServer:
    """A server for pages: its class, the fixture that shares one among tests, and the variable for its endpoint."""

    kind: type
    fixture: str
    variable: str

    def environment(self, server, host=None):
        """The environment that leads to it, or to a proxy before it at another host."""
        return {**server.environment, self.variable: server.endpoint_at(host) if host else server.endpoint}


SERVERS = {
    "s3": PageServer(servers.SeaweedFS, "seaweed", "AWS_ENDPOINT_URL"),
    "gcs": PageServer(servers.SmallGcs, "small_gcs", "STORAGE_EMULATOR_HOST"),
    "azure": PageServer(servers.Azurite, "azurite", "AZURE_STORAGE_ENDPOINT"),
}


def check(page, folder, stale=None, environment=None):
    """Run a page in an empty folder and compare. With `stale`, put (block, what it should be) there, do not fail."""
    everything = blocks(page)
    programs = [b.text for b in everything if b.kind == "python" and not FILE.match(b.text)]
    on_warning = "ignore" if page.parent.name == "frameworks" else "error"  # those of a framework are its own affair
    outputs = iter(run_python(programs, folder, on_warning, environment or {}) if programs else [])
    printed = ""
    for block in everything:
        name = FILE.match(block.text)
        if block.kind == "python" and name:
            (folder / name[1]).write_text(block.text)
        elif block.kind == "python":
            printed += next(outputs)
        elif block.kind == "console":
            now, missing = run_commands(block.text, folder, environment or {})
            assert not missing or stale is not None, "\n".join(missing)
            if missing:
                stale.append((block, now))
        elif block.kind == "text":
            if not block.text.strip() or not shows(block.text, printed):
                assert stale is not None, f"{page} shows\n{block.text}\nbut this was printed:\n{printed}"
                stale.append((block, printed))
            printed = ""


def update(page):
    """Rewrite the `text` and `console` blocks of a page that are not what is printed."""
    stale = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = SERVERS.get(server_of(page))
        environment = server.environment(stack.enter_context(server.kind())) if server else {}
        check(page, folder, stale, environment)
    text = page.read_text()
    for block, printed in reversed(stale):
        text = text[: block.start] + printed.rstrip() + "\n" + text[block.end :]
    page.write_text(text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        update(Path(name))
