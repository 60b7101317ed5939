"""What happens when things break: every fault of docs/explanation/faults.md, made many times, for Milepost and for DCP beside it.

    python faults/run.py --quick                              # under a minute: a few trials of each fault
    python faults/run.py --full --markdown docs/explanation/faults.md     # all trials: the table
    python faults/run.py --rows 1,2,13 --json rows.json

Each fault is really made: processes are killed, calls fail, bytes are flipped, power is cut (in a model of a disk), hostile
checkpoints are opened. A trial ends in one of a few named ways, and each row says which of them keep the promise. The
modules beside it make the faults; they run one after the other, each in a folder of its own that is removed afterwards.
Nothing is timed here. Ends with 1 if a trial broke the promise or a module failed; what could not be run is "not run".
"""

import argparse
import importlib
import json
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # a script finds what stands beside it, as `ranks`; the package is one folder up
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from faults.rows import FaultRow, Faults, Tally

MODULES: dict[str, tuple[int, ...]] = {
    "faults.kills": (1, 2, 3, 24),
    "faults.ranks": (21, 22, 25),
    "faults.shim": (4, 5, 8, 11, 12),
    "faults.power": (6, 7, 9, 10),
    "faults.damage": (13, 14, 15, 16),
    "faults.targets": (18, 23),
    "faults.hostile": (17, 19, 20),
}
"""Which module gives which rows."""
NUMBERS = sorted({number for numbers in MODULES.values() for number in numbers})
HEADS = ["#", "fault", "Milepost", "DCP", "ok"]
WIDTHS = (3, 40, 44, 44, 8)
MOST_NOTE_LETTERS = 600


@dataclass(frozen=True, slots=True)
class Results:
    """The rows in order of their numbers, and why others are not there: by number, or by module where one failed."""

    rows: tuple[FaultRow, ...]
    missing: dict[int, str]
    failed: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether all that was run kept the promise, and nothing failed that should have run."""
        return not self.failed and all(row.ok is not False for row in self.rows)


def run(wanted: Iterable[int], full: bool, parent: Path | None) -> Results:
    """Run the modules that give the wanted rows. One that is not there, or fails, takes only its own rows along."""
    wanted = set(wanted)
    rows: list[FaultRow] = []
    why: dict[int, list[str]] = {number: [] for number in wanted}
    failed: dict[str, str] = {}
    for name, numbers in MODULES.items():
        if wanted.isdisjoint(numbers):
            continue
        try:
            for row in rows_of(name, full, parent):  # those before a failure count
                if row.number in wanted:
                    rows.append(row)
            continue
        except ModuleNotFoundError as error:
            if error.name != name:
                failed[name] = str(error)
            reason = f"{error.name} is not there"
        except Exception as error:
            traceback.print_exc()
            reason = failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
        for number in wanted.intersection(numbers):
            why[number].append(f"{name}: {reason}")
    there = {row.number for row in rows}
    missing = {n: "; ".join(why[n]) or "no module gave it" for n in sorted(wanted - there)}
    return Results(tuple(sorted(rows, key=lambda row: row.number)), missing, failed)


def rows_of(name: str, full: bool, parent: Path | None) -> Iterator[FaultRow]:
    """The rows of one module, run in a new folder. Raises whatever the module does."""
    faults: Faults = importlib.import_module(name).rows
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=parent, ignore_cleanup_errors=True) as folder:
        start = time.monotonic()
        with closing(faults(full, Path(folder))) as found:
            for row in found:
                took = time.monotonic() - start
                print(f"{name}: row {row.number} {verdict(row)}, after {took:.0f} s", file=sys.stderr, flush=True)
                yield row


# What it looks like


def verdict(row: FaultRow) -> str:
    """In a word: whether every trial kept the promise."""
    return {True: "yes", False: "NO", None: "not run"}[row.ok]


def kept_percent(row: FaultRow) -> float | None:
    """How many of the trials kept the promise; None without trials."""
    return 100 * row.milepost.of(*row.good) / row.milepost.trials if row.milepost.trials else None


def cells(results: Results) -> list[list[str]]:
    """A line for each row and for each that is missing, in order."""
    lines = [[str(r.number), r.fault, _tally(r.milepost), _tally(r.dcp), verdict(r)] for r in results.rows]
    lines += [[str(number), "", why, "", "not run"] for number, why in results.missing.items()]
    return sorted(lines, key=lambda line: int(line[0]))


def _tally(tally: Tally | None) -> str:
    return "" if tally is None else tally.text


def text_table(results: Results) -> str:
    """The table for a terminal, with long cells in several lines."""
    lines = [HEADS, ["-" * width for width in WIDTHS], *cells(results)]
    return "\n".join(line for cells_of_line in lines for line in _wrapped(cells_of_line))


def _wrapped(line: list[str]) -> Iterator[str]:
    columns = [textwrap.wrap(cell, width) or [""] for cell, width in zip(line, WIDTHS, strict=True)]
    for i in range(max(map(len, columns))):
        parts = [(column[i] if i < len(column) else "").ljust(w) for column, w in zip(columns, WIDTHS, strict=True)]
        yield "  ".join(parts).rstrip()


def json_rows(results: Results) -> list[dict[str, object]]:
    """One for each row: the trials that kept the promise, in percent. What was not run has no value."""
    there = [
        {"name": f"{r.number} {r.fault}", "value": kept_percent(r), "unit": "%", "bar": ">= 100", "ok": r.ok}
        for r in results.rows
    ]
    return there + [
        {"name": f"{number} not run", "value": None, "unit": "%", "bar": ">= 100", "ok": None}
        for number in results.missing
    ]


def markdown(results: Results, machine: str, full: bool) -> str:
    """The page: what it is, how to run it, the machine and the counts; the table; how each was made, and notes."""
    mine = sum(row.milepost.trials for row in results.rows)
    other = sum(row.dcp.trials for row in results.rows if row.dcp)
    how = "--full" if full else "--quick"
    kept = sum(row.ok is True for row in results.rows)
    return "\n".join([
        "# Faults",
        "",
        "What happens when things break. Each fault is really made, many times, and each trial ends in one of a few ways;",
        "`ok` says whether every one of them kept the promise. DCP met the same fault where it has something to compare.",
        "",
        f"Made by `python faults/run.py {how} --markdown docs/explanation/faults.md`; do not edit. {mine:,} trials of Milepost and",
        f"{other:,} of DCP; {kept} of {len(results.rows)} rows kept the promise, {len(results.missing)} were not run.",
        "",
        *(f"    {line}" for line in machine.splitlines()),
        "",
        "| " + " | ".join(HEADS) + " |",
        "|---|---|---|---|---|",
        *("| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in cells(results)),
        "",
        "*old*, *new*: what was there before or after the save, whole: every element was compared. *none*: nothing was",
        "there before. *mixed*: parts of both, loaded without an error. *lost*: older than a save that had returned.",
        "*unloadable*: neither. *silent*: other data than was saved, without an error. *harmless*: no load uses what was hit.",
        "",
        "## How each fault was made",
        "",
        *(f"* **{row.number}** {_note(row)}" for row in results.rows),
        *(f"* `{name}` failed: {_escaped(why)}" for name, why in results.failed.items()),
        "",
    ])  # fmt: skip


def _note(row: FaultRow) -> str:
    note = row.note if len(row.note) <= MOST_NOTE_LETTERS else row.note[:MOST_NOTE_LETTERS] + " ..."
    return " ".join(_sentence(text) for text in (row.how, note) if text)


def _sentence(text: str) -> str:
    """The text as a sentence; a name at its start stays as it is."""
    text = _escaped(text)
    first = text[:1].upper() if text.split()[0].isalpha() else text[:1]
    return first + text[1:] + ("" if text.endswith(".") else ".")


def _escaped(text: str) -> str:
    """Text that is no markup, in one line."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


# What people ask for


def numbers(text: str) -> list[int]:
    """Row numbers from `1,2,13`, for argparse."""
    found = [int(part) for part in text.split(",")]
    if unknown := sorted(set(found) - set(NUMBERS)):
        raise argparse.ArgumentTypeError(f"there is no row {unknown[0]}; the rows are {NUMBERS}")
    return found


def main() -> int:
    """Run what was asked for, show it, and say whether it was good."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--quick", action="store_true", help="a few trials of each fault (the default)")
    much.add_argument("--full", action="store_true", help="all trials")
    parser.add_argument("--rows", type=numbers, default=NUMBERS, metavar="1,2,13", help="only these")
    parser.add_argument("--folder", type=Path, help="where the modules work; by default the temporary folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page")
    asked = parser.parse_args()
    results = run(asked.rows, asked.full, asked.folder)
    print((__doc__ or "").splitlines()[0])
    print(text_table(results))
    for name, why in results.failed.items():
        print(f"{name} failed: {why}")
    if asked.json:
        asked.json.write_text(json.dumps(json_rows(results), indent=1))
    if asked.markdown:
        from benchmarks.machine import machine

        place = asked.folder or Path(tempfile.gettempdir())
        asked.markdown.write_text(markdown(results, machine(place), asked.full))
    return 0 if results.ok else 1


if __name__ == "__main__":
    sys.exit(main())
