"""Rows of the page that was published before: a run of some rows keeps the others."""

import re
from collections import defaultdict
from collections.abc import Container

from faults.rows import FaultRow, Tally

_LINE = re.compile(r"^\| (\d+) \| (.*) \|$", re.MULTILINE)
_NOTE = re.compile(r"^\* \*\*(\d+)\*\* (.*(?:\n  .*)*)", re.MULTILINE)
_COUNT = re.compile(r"(\d+) (.*)")


def published_rows(page: str, without: Container[int]) -> list[FaultRow]:
    """The rows of a page, without those with these numbers and those that were not run."""
    notes = defaultdict(list)
    for number, text in _NOTE.findall(page):
        notes[number].append(_plain(" ".join(text.split())))
    found = []
    for number, line in _LINE.findall(page):
        fault, mine, other, ok = (_plain(cell) for cell in re.split(r"(?<!\\) \| ", line.replace("|  |", "| - |")))
        how = notes[number].pop(0) if notes[number] else ""
        if ok == "not run" or int(number) in without:
            continue
        tally = _tally(mine)
        good = frozenset(tally.counts if ok == "yes" else ())
        found.append(FaultRow(int(number), fault, how, tally, good, None if other == "-" else _tally(other)))
    return found


def _plain(text: str) -> str:
    return text.replace("\\|", "|").replace("&lt;", "<").strip()


def _tally(text: str) -> Tally:
    parts = [_COUNT.fullmatch(part.strip()) for part in text.split("; ")]
    return Tally({part[2]: int(part[1]) for part in parts if part is not None})
