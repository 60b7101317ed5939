"""The page as one HTML file: everything in it, nothing from outside, and no text of a checkpoint as HTML or as code.

What the page shows stands in it deflated and as base64, and its script shows it as text only. A Content-Security-Policy
names the two scripts and the style by their hashes, and allows nothing else.
"""

import base64
import contextlib
import hashlib
import html
import os
import zlib
from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec

from milepost.core.plain_json import plain_json
from milepost.errors import StorageError
from milepost.store import Location
from milepost.store.advice import explain
from milepost.view.collect import Tell, ViewOptions, collect
from milepost.view.record import Page

SCRIPTS = (
    "text.js",
    "boxes.js",
    "data.js",
    "query.js",
    "list.js",
    "charts.js",
    "treemap.js",
    "step.js",
    "timeline_chart.js",
    "timeline.js",
    "leaf.js",
    "tensors.js",
    "layout_map.js",
    "layout.js",
    "explain.js",
    "reads.js",
    "statistics.js",
    "changes.js",
    "live.js",
    "page.js",
)
"""The page's own script, in the order in which its files are joined."""
CHARTS = "vendor/echarts.min.js"
STYLES = ("page.css", "controls.css", "parts.css")


OWN = b'<meta name="generator" content="milepost view">'
"""Stands near the start of each page."""


def is_page(path: Path) -> bool:
    """Whether this file is a page that was written here."""
    with path.open("rb") as file:
        return OWN in file.read(4096)


def write_page(
    place: Location, path: str | os.PathLike[str], wanted: ViewOptions | None = None, tell: Tell | None = None
) -> Path:
    """Write the page of the run or checkpoint at `place` into the file `path`. An old file is replaced as a whole.

    Raises what `collect` raises, and StorageError if the file cannot be written.
    """
    return save_page(collect(place, wanted, tell), path)


def save_page(page_: Page, path: str | os.PathLike[str]) -> Path:
    """Write a page into a file. An old file is replaced as a whole. Raises StorageError if it cannot be written."""
    page, target = make_page(page_), Path(os.path.realpath(path))  # a link stays, and what it leads to is replaced
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(page)
        beside.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):
            raise StorageError(f"cannot write {os.fspath(path)}: {explain(error)}", errno=error.errno) from error
        raise
    return Path(path)


def make_page(page: Page, *, live: str = "", number: int = 0) -> bytes:
    """The HTML file. `live`: the path on the page's own server from which it fetches newer data; empty for none.

    `number`: of the data of a live page, which the server counts.
    """
    filled = {
        "policy": policy_of(live=bool(live)),
        "live": html.escape(live),
        "number": str(number),
        "style": style_of_page(),
        "charts": asset(CHARTS),
        "script": script_of_page(),
        **{f"{name}-data": text.decode() for name, text in data_of(page).items()},
    }
    made = asset("page.html")
    parts = made.split("{{")
    text = [parts[0]]
    for part in parts[1:]:
        name, _, after = part.partition("}}")
        text.append(filled[name] + after)
    return "".join(text).encode()


@cache
def policy_of(*, live: bool) -> str:
    """The content policy of a page. A live one may ask its own server for data."""
    policy = {
        "default-src": "'none'",
        "script-src": f"{_hash(asset(CHARTS))} {_hash(script_of_page())}",
        "style-src": _hash(style_of_page()),
        "img-src": "data:",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in policy.items())


def data_of(page: Page) -> dict[str, bytes]:
    """What the page shows, as base64 of deflated bytes: `page` is JSON, the other two are columns."""
    rows = msgspec.structs.replace(page, statistics_bytes=b"", changes_bytes=b"")
    contents = {
        "page": plain_json(rows),
        "statistics": page.statistics_bytes,
        "changes": page.changes_bytes,
    }
    return {name: base64.b64encode(zlib.compress(content, 6)) for name, content in contents.items()}


@cache
def asset(name: str) -> str:
    """The text of a file of this package's assets."""
    return files("milepost.view").joinpath("assets", *name.split("/")).read_text(encoding="utf-8")


@cache
def style_of_page() -> str:
    """The page's style sheets, joined."""
    return "\n".join(map(asset, STYLES))


@cache
def script_of_page() -> str:
    """The page's own script: its files joined, in one scope."""
    return "\n".join(["'use strict';", *(asset(name) for name in SCRIPTS)])


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
