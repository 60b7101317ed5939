"""What happens when things break: every fault of docs/explanation/faults.md, made many times, for Milepost and for DCP.

    python faults/run.py --quick                              # under a minute: a few trials of each fault
    python faults/run.py --full --markdown docs/explanation/faults.md     # all trials: the table
    python faults/run.py --rows 1,2,13 --json rows.json

Every fault is a real one: processes are killed, calls fail, bits are flipped, file systems are shut down, hostile
checkpoints are opened. (One row cuts the power in a model of a disk.) A trial ends in one of a few named ways, and each
row says which of them keep the promise. The modules in this folder make the faults. They run one after the other, each
in its own folder, which is removed afterwards. Nothing is timed. The exit status is 1 if a trial broke the promise or a
module failed; a fault that cannot be made here is "not run".
"""

import argparse
import importlib
import json
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # a script finds its neighbours as `ranks`; the package is one folder up
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from faults.published import published_rows
from faults.rows import FaultRow, Faults, Tally

MODULES: dict[str, tuple[int, ...]] = {
    "faults.kills": (1, 2, 3, 24),
    "faults.ranks": (21, 22, 25),
    "faults.shim": (4, 5, 8, 11, 12),
    "faults.power": (6, 7, 9, 10),
    "faults.damage": (13, 14, 15, 16),
    "faults.targets": (18, 23),
    "faults.hostile": (17, 19, 20),
    "faults.rejoin": (27, 32),
    "faults.file_server": (34, 35),
    "faults.network": (28, 30),
    "faults.beside": (33,),
    "faults.jobs": (26, 29, 31),
    "faults.objects": (36, 37, 38, 39, 40, 41, 42, 43, 46),
    "faults.object_jobs": (44, 45),
}
"""The rows of each module."""
NUMBERS = sorted({number for numbers in MODULES.values() for number in numbers})
HEADS = ["#", "fault", "Milepost", "DCP", "ok"]
WIDTHS = (3, 40, 44, 44, 8)
MOST_NOTE_LETTERS = 600
MOST_COLUMNS = 120


@dataclass(frozen=True, slots=True)
class Results:
    """The rows in the order of their numbers, and why others are missing: by number, and by module that failed."""

    rows: tuple[FaultRow, ...]
    missing: dict[int, str]
    failed: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether every row that was run kept the promise, and no module failed."""
        return not self.failed and all(row.ok is not False for row in self.rows)


def run(wanted: Iterable[int], full: bool, parent: Path | None) -> Results:
    """Run the modules that have the wanted rows. A module that is missing or fails loses only its own rows."""
    wanted = set(wanted)
    rows: list[FaultRow] = []
    why: dict[int, list[str]] = {number: [] for number in wanted}
    failed: dict[str, str] = {}
    for name, numbers in MODULES.items():
        if wanted.isdisjoint(numbers):
            continue
        try:
            for row in rows_of(name, full, parent):  # rows before a failure count
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
    """The rows of one module, run in a new folder. Raises what the module raises."""
    faults: Faults = importlib.import_module(name).rows
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=parent, ignore_cleanup_errors=True) as folder:
        start = time.monotonic()
        with closing(faults(full, Path(folder))) as found:
            for row in found:
                took = time.monotonic() - start
                print(f"{name}: row {row.number} {verdict(row)}, after {took:.0f} s", file=sys.stderr, flush=True)
                yield row


# Output


def verdict(row: FaultRow) -> str:
    """Whether every trial kept the promise, as a word."""
    return {True: "yes", False: "NO", None: "not run"}[row.ok]


def kept_percent(row: FaultRow) -> float | None:
    """The share of trials that kept the promise; None without trials."""
    return 100 * row.milepost.of(*row.good) / row.milepost.trials if row.milepost.trials else None


def cells(results: Results) -> list[list[str]]:
    """A line for each row, missing ones included, in order."""
    lines = [[str(r.number), r.fault, _tally(r.milepost), _tally(r.dcp), verdict(r)] for r in results.rows]
    lines += [[str(number), "", why, "", "not run"] for number, why in results.missing.items()]
    return sorted(lines, key=lambda line: int(line[0]))


def _tally(tally: Tally | None) -> str:
    return "" if tally is None else tally.text


def text_table(results: Results) -> str:
    """The table for a terminal. Long cells take several lines."""
    lines = [HEADS, ["-" * width for width in WIDTHS], *cells(results)]
    return "\n".join(line for cells_of_line in lines for line in _wrapped(cells_of_line))


def _wrapped(line: list[str]) -> Iterator[str]:
    columns = [textwrap.wrap(cell, width) or [""] for cell, width in zip(line, WIDTHS, strict=True)]
    for i in range(max(map(len, columns))):
        parts = [(column[i] if i < len(column) else "").ljust(w) for column, w in zip(columns, WIDTHS, strict=True)]
        yield "  ".join(parts).rstrip()


def json_rows(results: Results) -> list[dict[str, object]]:
    """One object for each row: the percentage of trials that kept the promise. A row that was not run has no value."""
    there = [
        {"name": f"{r.number} {r.fault}", "value": kept_percent(r), "unit": "%", "bar": ">= 100", "ok": r.ok}
        for r in results.rows
    ]
    return there + [
        {"name": f"{number} not run", "value": None, "unit": "%", "bar": ">= 100", "ok": None}
        for number in results.missing
    ]


def with_published(results: Results, page: str) -> tuple[Results, list[int]]:
    """The results, and the rows of an earlier page that were not asked for now; and the numbers of those."""
    asked = {row.number for row in results.rows} | results.missing.keys()
    earlier = published_rows(page, asked)
    rows = sorted([*results.rows, *earlier], key=lambda row: row.number)  # stable: a row may have several lines
    return Results(tuple(rows), results.missing, results.failed), sorted({row.number for row in earlier})


def markdown(results: Results, machine: str, full: bool, earlier: Sequence[int] = ()) -> str:
    """The page: what it is, how to run it, the counts and the machine; the table; how each fault was made.

    `earlier`: the rows that an earlier run made.
    """
    kept_rows = f" Rows {_spans(earlier)} are from an earlier run." if earlier else ""
    mine = sum(row.milepost.trials for row in results.rows)
    other = sum(row.dcp.trials for row in results.rows if row.dcp)
    how = "--full" if full else "--quick"
    kept = sum(row.ok is True for row in results.rows)
    return "\n".join([
        "# Faults",
        "",
        *_paragraph(
            "What happens when things break. Each fault is made many times, and each trial ends in one of a few ways. "
            "`ok` says whether every trial kept the promise. DCP gets the same fault where it has something to compare."
        ),
        "",
        *_paragraph(
            f"Made by `python faults/run.py {how} --markdown docs/explanation/faults.md`; do not edit. "
            f"{mine:,} trials of Milepost and {other:,} of DCP; "
            f"{kept} of {len(results.rows)} rows kept the promise, {len(results.missing)} were not run.{kept_rows}"
        ),
        "",
        *(f"    {line}" for line in machine.splitlines()),
        "",
        "| " + " | ".join(HEADS) + " |",
        "|---|---|---|---|---|",
        *("| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in cells(results)),
        "",
        *_paragraph(
            "*old*, *new*: the whole checkpoint from before or after the save; every element was compared. *none*: "
            "nothing was there before. *mixed*: parts of both, loaded without an error. *lost*: older than a save that "
            "had returned. *unloadable*: neither loads. *silent*: other data than was saved, loaded without an error. "
            "*harmless*: no load uses the damaged part."
        ),
        "",
        "## How each fault was made",
        "",
        *(line for row in results.rows for line in _item(f"**{row.number}** {_note(row)}")),
        *(line for name, why in results.failed.items() for line in _item(f"`{name}` failed: {_escaped(why)}")),
        "",
    ])  # fmt: skip


def _spans(numbers: Sequence[int]) -> str:
    """Numbers in order, with runs joined: 1-5, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _paragraph(text: str, first: str = "", rest: str = "") -> list[str]:
    """The lines of a paragraph. Long words stay whole: breaking a path or a name would change it."""
    return textwrap.wrap(
        text, MOST_COLUMNS, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _item(text: str) -> list[str]:
    return _paragraph(text, "* ", "  ")


def _note(row: FaultRow) -> str:
    note = row.note if len(row.note) <= MOST_NOTE_LETTERS else row.note[:MOST_NOTE_LETTERS] + " ..."
    return " ".join(_sentence(text) for text in (row.how, note) if text)


def _sentence(text: str) -> str:
    """The text as a sentence. A name at its start is not capitalised."""
    text = _escaped(text)
    first = text[:1].upper() if text.split()[0].isalpha() else text[:1]
    return first + text[1:] + ("" if text.endswith(".") else ".")


def _escaped(text: str) -> str:
    """The text in one line, without markup."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


# Arguments


def numbers(text: str) -> list[int]:
    """Row numbers from `1,2,13`, for argparse."""
    found = [int(part) for part in text.split(",")]
    if unknown := sorted(set(found) - set(NUMBERS)):
        raise argparse.ArgumentTypeError(f"there is no row {unknown[0]}; the rows are {NUMBERS}")
    return found


def main() -> int:
    """Run the wanted rows and show them. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--quick", action="store_true", help="a few trials of each fault (the default)")
    much.add_argument("--full", action="store_true", help="all trials")
    parser.add_argument("--rows", type=numbers, default=NUMBERS, metavar="1,2,13", help="only these rows")
    parser.add_argument("--folder", type=Path, help="where the modules work; by default the temporary folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the page; it keeps rows that are not run now"
    )
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
        results, earlier = with_published(results, asked.markdown.read_text() if asked.markdown.exists() else "")
        asked.markdown.write_text(markdown(results, machine(place), asked.full, earlier))
    return 0 if results.ok else 1


if __name__ == "__main__":
    sys.exit(main())
