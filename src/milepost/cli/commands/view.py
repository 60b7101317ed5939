"""`milepost view`."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from milepost.cli import words
from milepost.cli.blocks import Block, Cell, line
from milepost.cli.command import command as make_command
from milepost.cli.output import MOMENT_S, can_draw, print_record, remark
from milepost.cli.places import PLACE
from milepost.cli.session import Session
from milepost.cli.statuses import Status
from milepost.errors import InvalidRequest

if TYPE_CHECKING:
    from milepost.view import ViewOptions
    from milepost.view.record import Page

_NAME_LETTERS = 60
_TELL_EVERY_S = 0.1


class WrittenPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page that was written. `steps`: how many it shows; `notes`: what it leaves out."""

    file: str
    size_bytes: int
    source: str
    steps: int
    notes: tuple[str, ...]


class ServedPage(msgspec.Struct, frozen=True, kw_only=True):
    """A live page. `url`: where it is, until the command ends."""

    url: str
    source: str
    steps: int


@make_command(WrittenPage, ServedPage)
@click.argument("path", type=PLACE)
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(), help="The file to write; default milepost-NAME.html."
)
@click.option("--force", is_flag=True, help="Replace FILE even if it is not a page of Milepost.")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Only the newest N steps.")
@click.option("--compare", multiple=True, metavar="A:B", help="Also compare these two steps, block by block.")
@click.option("--serve", is_flag=True, help="A live page that follows the run, on this machine only.")
@click.option("--port", type=click.IntRange(0, 65535), metavar="N", help="The port for --serve; default any.")
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
def command(
    session: Session,
    path: str,
    output: str | None,
    force: bool,
    steps: int | None,
    compare: tuple[str, ...],
    serve: bool,
    port: int | None,
    opens: bool,
) -> Status:
    """Show a run or a checkpoint as one page for the browser.

    The page is one HTML file that needs no server and no network: the timeline of steps, the tensors, which rank holds
    what, statistics, and what changed between steps. It is made from manifests and tables of checksums; no tensor is
    read. --serve keeps it up to date while a job runs, until Ctrl-C.
    """
    from milepost.view import ViewOptions, collect  # noqa: PLC0415  # not for --help
    from milepost.view.page import is_page, save_page  # noqa: PLC0415

    wanted = ViewOptions(steps=steps, compare=tuple(map(_pair, compare)))
    if serve:
        if output is not None:
            raise InvalidRequest("--serve writes no file; leave out --output")
        return _serve(session, path, wanted, port or 0, opens)
    if port is not None:
        raise InvalidRequest("--port is that of a live page; add --serve")
    if output == "-":
        raise InvalidRequest("a page is written to a file, not to stdout; pass --output FILE, or ./- for one called -")
    target = Path(output) if output is not None else Path(f"milepost-{_name(path)}.html")
    if os.path.exists(target) and not os.path.isfile(target):
        raise InvalidRequest(f"{target} is not a file, and cannot be replaced by one; use another --output")
    if os.path.exists(target) and not force and not is_page(target):
        raise InvalidRequest(
            f"{target} is not a page of Milepost and would be replaced; use --force, or another --output"
        )
    page = collect(path, wanted, _tell())
    record = _record(page, save_page(page, target))
    print_record(record, session.json, lambda: _blocks(record))
    if opens:
        _open(target.resolve().as_uri())
    return Status.FINE


def _pair(text: str) -> tuple[str, str]:
    before, _, after = text.partition(":")
    if not before or not after:
        raise InvalidRequest(f"--compare takes two steps, such as 1000:2000, not {text!r}")
    return before, after


def _name(path: str) -> str:
    """The last part of a path or URL, as part of a file name."""
    last = next((part for part in reversed(path.split("?", maxsplit=1)[0].replace("\\", "/").split("/")) if part), "")
    last = last if last not in (".", "..") else Path(path).resolve().name
    return "".join(sign if sign.isalnum() or sign in "-_." else "-" for sign in last)[:_NAME_LETTERS] or "page"


def _record(page: "Page", target: Path) -> WrittenPage:
    size_bytes = target.stat().st_size
    notes = tuple(page.notes)
    return WrittenPage(file=str(target), size_bytes=size_bytes, source=page.source, steps=len(page.steps), notes=notes)


def _blocks(record: WrittenPage) -> Iterator[Block]:
    what = words.count(record.steps, "step")
    yield line("wrote ", Cell(record.file, "bold"), f": {what}, {words.size(record.size_bytes)}")
    for note in record.notes:
        yield line(Cell(note, "dim"))


def _tell() -> Callable[[int, int], None] | None:
    """Say how far it is, on a terminal that can move its cursor, where it takes a moment."""
    if not can_draw(sys.stderr):
        return None
    told, due = False, time.monotonic() + MOMENT_S

    def tell(done: int, total: int) -> None:
        nonlocal told, due
        if told if done == total else time.monotonic() > due:
            told, due = True, time.monotonic() + _TELL_EVERY_S
            sys.stderr.write("\r\x1b[K" if done == total else f"\rreading step {done:,} of {total:,}")
            sys.stderr.flush()

    return tell


def _serve(session: Session, path: str, wanted: "ViewOptions", port: int, opens: bool) -> Status:
    from milepost.view.follow import Followed, follow  # noqa: PLC0415  # a server is seldom wanted
    from milepost.view.serve import LivePage, PageServer  # noqa: PLC0415

    followed, live = Followed(path, wanted), LivePage()
    followed.look()
    if not followed.page.steps:
        remark(followed.trouble or f"there is nothing at {path} yet; the page will show what comes")
    live.set(followed)
    server = PageServer(live, port)
    server.start()
    try:
        record = ServedPage(url=server.url, source=followed.page.source, steps=len(followed.page.steps))
        print_record(record, session.json, lambda: [line(Cell(record.url, "bold"), "  Ctrl-C ends it.")])
        sys.stdout.flush()
        if opens:
            _open(server.url)
        follow(followed, live.set, _waited)
    except KeyboardInterrupt:
        return Status.FINE
    finally:
        server.close()
    return Status.FINE


def _waited(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _open(url: str) -> None:
    import webbrowser  # noqa: PLC0415  # only for those who want it

    if not webbrowser.open(url):
        remark(f"found no browser to open {url}")
