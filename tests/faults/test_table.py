"""The table of faults: rows in order, missing rows with a reason, broken promises visible. No fault is made here."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from faults import run as faults
from faults.rows import Counting, FaultRow, Tally
from faults.run import Results


def row(number, counts, good=("fine",), dcp=None, fault="a fault", note=""):
    return FaultRow(number, fault, "by hand", Tally(counts), frozenset(good), dcp, note)


GOOD = row(2, {"fine": 3}, dcp=Tally({"lost": 2, "fine": 1}))
BAD = row(13, {"fine": 3, "lost": 1}, note="a | b <c>")
EMPTY = row(5, {})
ALL = Results((GOOD, EMPTY, BAD), {7: "faults.power: faults.power is not there"}, {})


def module(monkeypatch, tmp_path, name, text):
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)


GIVES_TWO = """
from faults.rows import FaultRow, Tally
def rows(full, folder):
    (folder / "left behind").write_text("x")
    for number in (902, 901):
        tally = Tally({"fine": 2 if full else 1})
        yield FaultRow(number, "a fault", "by hand", tally, frozenset({"fine"}), None, str(folder))
"""


def test_a_counting_becomes_a_tally_with_the_most_frequent_first():
    counting = Counting()
    for ending in ("rare", "fine", "fine"):
        counting.add(ending)
    assert counting.tally.trials == 3
    assert counting.tally.text == "2 fine; 1 rare"


def test_a_row_is_ok_only_if_every_trial_kept_the_promise():
    assert [r.ok for r in (GOOD, BAD, EMPTY)] == [True, False, None]
    assert [faults.verdict(r) for r in (GOOD, BAD, EMPTY)] == ["yes", "NO", "not run"]


def test_one_failure_in_a_million_is_not_rounded_to_100_percent():
    assert faults.kept_percent(row(1, {"fine": 999_999, "lost": 1})) < 100
    assert faults.kept_percent(GOOD) == 100
    assert faults.kept_percent(EMPTY) is None


def test_the_cells_stand_in_order_of_numbers_with_what_was_not_run():
    lines = faults.cells(ALL)
    assert [line[0] for line in lines] == ["2", "5", "7", "13"]
    assert lines[0] == ["2", "a fault", "3 fine", "2 lost; 1 fine", "yes"]
    assert lines[1][-1] == lines[2][-1] == "not run"
    assert lines[3] == ["13", "a fault", "3 fine; 1 lost", "", "NO"]


def test_the_table_of_text_wraps_long_cells_and_keeps_all_words():
    long = "word " * 60
    text = faults.text_table(Results((row(1, {"fine": 1}, fault=long),), {}, {}))
    assert text.count("word") == 60
    assert all(len(line) <= sum(faults.WIDTHS) + 8 for line in text.splitlines())


def test_the_json_has_one_object_for_each_row():
    found = json.loads(json.dumps(faults.json_rows(ALL)))
    assert all(set(item) == {"name", "value", "unit", "bar", "ok"} for item in found)
    assert [(item["value"], item["ok"]) for item in found] == [(100, True), (None, None), (75, False), (None, None)]
    assert {item["bar"] for item in found} == {">= 100"}


def test_page_shows_counts_machine_table_and_escaped_notes():
    text = faults.markdown(ALL, "one machine\nwith a disk", full=True)
    assert text.startswith("# Faults\n")
    counts = "7 trials of Milepost and 3 of DCP; 1 of 3 rows kept the promise, 1 were not run."
    assert counts in " ".join(text.split())
    assert "    one machine\n    with a disk\n" in text
    assert "| 13 | a fault | 3 fine; 1 lost |  | NO |" in text
    assert "* **13** By hand. A \\| b &lt;c>." in text


def test_prose_of_the_page_ends_at_120_columns():
    long = Results((row(1, {"fine": 1}, note="some words " * 50),), {}, {"faults.power": "RuntimeError: " + "no " * 60})
    lines = faults.markdown(long, "one machine", full=True).splitlines()
    assert all(len(line) <= 120 or line.startswith("|") for line in lines)
    assert sum(line.startswith("  ") and not line.startswith("    ") for line in lines) > 4, "items continue indented"


def test_the_page_in_the_docs_is_what_the_generator_writes():
    """Its fixed paragraphs are those of today's code, and every paragraph of it is wrapped as the code wraps."""
    page = (Path(faults.__file__).parents[1] / "docs" / "explanation" / "faults.md").read_text()
    fixed = [text for text in faults.markdown(ALL, "", full=True).split("\n\n") if text.startswith(("What", "*old*"))]
    assert len(fixed) == 2
    assert all(text in page for text in fixed)
    items = re.findall(r"^\* .*(?:\n  .*)*", page, re.MULTILINE)
    assert len(items) > 25
    words = [item.split() for item in items]
    again = tuple(FaultRow(int(w[1].strip("*")), "", " ".join(w[2:]), Tally({}), frozenset()) for w in words)
    assert "\n".join(items) in faults.markdown(Results(again, {}, {}), "", full=True)


def test_a_long_note_is_cut():
    text = faults.markdown(Results((row(1, {"fine": 1}, note="x" * 5000),), {}, {}), "", full=False)
    assert len(text) < 3000


def test_modules_run_in_folders_that_are_removed_and_their_rows_are_sorted(monkeypatch, tmp_path):
    module(monkeypatch, tmp_path, "faults_made_up", GIVES_TWO)
    monkeypatch.setattr(faults, "MODULES", {"faults_made_up": (901, 902)})
    results = faults.run([901, 902], True, tmp_path)
    assert [r.number for r in results.rows] == [901, 902]
    assert results.rows[0].milepost.trials == 2
    assert not Path(results.rows[0].note).exists()
    assert results.ok
    assert faults.run([902], False, tmp_path).rows[0].milepost.trials == 1


def test_a_module_that_is_not_there_is_not_run_and_breaks_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(faults, "MODULES", {"faults_of_nobody": (7,)})
    results = faults.run([7], False, tmp_path)
    assert results.rows == ()
    assert "faults_of_nobody is not there" in results.missing[7]
    assert results.ok


@pytest.mark.parametrize(
    "text", ["def rows(full, folder):\n    yield 1 / 0\n", "import no_such_library\n", "no_rows = 1\n"]
)
def test_a_module_that_fails_is_reported_and_is_not_ok(monkeypatch, tmp_path, text):
    module(monkeypatch, tmp_path, "faults_broken", text)
    module(monkeypatch, tmp_path, "faults_made_up", GIVES_TWO)
    monkeypatch.setattr(faults, "MODULES", {"faults_broken": (900,), "faults_made_up": (901, 902)})
    results = faults.run([900, 901], False, tmp_path)
    assert "faults_broken" in results.failed
    assert [r.number for r in results.rows] == [901]
    assert 900 in results.missing
    assert not results.ok


def test_every_number_of_the_table_belongs_to_a_module():
    assert list(range(1, 47)) == faults.NUMBERS


def test_a_row_that_nobody_knows_is_an_error_of_the_call():
    command = [sys.executable, str(Path(faults.__file__)), "--rows", "99"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no row 99" in done.stderr


def test_a_run_of_some_rows_keeps_the_others_of_the_page():
    first = Results(
        (GOOD, row(6, {"new": 1}, ("new",), fault="ext4"), row(6, {"old": 2}, ("new",), fault="xfs"), BAD), {}, {}
    )
    page = faults.markdown(first, "a machine", full=True)
    again, earlier = faults.with_published(Results((row(13, {"fine": 9}),), {20: "why"}, {}), page)
    assert earlier == [2, 6]
    assert [(r.number, r.fault, r.ok) for r in again.rows] == [
        (2, "a fault", True), (6, "ext4", True), (6, "xfs", False), (13, "a fault", True),
    ]  # fmt: skip
    assert again.rows[0].dcp == GOOD.dcp
    text = faults.markdown(again, "a machine", full=True, earlier=earlier)
    assert "Rows 2, 6 are from an earlier run." in text
    assert faults.cells(again)[0] == faults.cells(first)[0]
