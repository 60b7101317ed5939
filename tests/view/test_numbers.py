"""Statistics and changes in the page are those that Milepost recorded, and finds, itself."""

import math

import numpy as np
import pytest

import milepost
from milepost.inspection.diff import diff
from milepost.view import Budget, ViewOptions, collect
from tests.browser import soon
from tests.view import jobs

STEPS = (100, 200, 300, 500)
NAMES = ("min", "max", "mean", "rms")


@pytest.fixture(scope="module")
def opened(show_once, run):
    """The page of the run, for all tests of this file."""
    return show_once(run)


@pytest.fixture
def page(opened):
    yield opened.page
    opened.check()


def at(page, step):
    """The place of a step in the page's list."""
    return page.evaluate("step => milepost.data.steps.findIndex(one => one.step === step)", step)


def recorded(run, step):
    with milepost.open(jobs.folder(run, step)) as checkpoint:
        return checkpoint.statistics


@pytest.mark.parametrize("step", STEPS)
def test_statistics_are_those_of_the_manifest(page, run, step):
    told = page.evaluate(
        """async step => { const data = milepost.data; const found = await data.statistics(step);
        const { keys } = data.shape(step).record.tensors;
        return keys.map((key, i) => [key, found.row(i), found.histograms[i] ?? []]); }""",
        at(page, step),
    )
    wanted = recorded(run, step)
    assert [key for key, _, _ in told] == list(wanted)
    newest = step == STEPS[-1]
    for key, row, histogram in told:
        for name in NAMES:
            value = np.float32(getattr(wanted[key], name))
            assert row[name] == pytest.approx(float(value), rel=0 if newest else 2**-12)
        assert (row["nan"], row["inf"]) == (wanted[key].nan, wanted[key].inf)
        assert list(map(tuple, histogram)) == (list(wanted[key].histogram) if newest else [])


def test_tensors_that_are_not_finite_come_first(page, run):
    page.reload()  # another test may have sorted them
    page.click("#tab-statistics")
    page.select_option("#step-select", label="300 (unhealthy)")
    page.locator("#statistics-count", has_text="1 not finite").wait_for()
    first = page.locator("#statistics-table .list-row[data-row='0']")
    assert soon(lambda: first.inner_text().split("\n")[:2]) == [jobs.NAN_KEY, "5"]
    first.click()
    table = page.locator("#history-table tbody tr")
    page.locator("#history-table-details summary").click()

    def cells():
        return [row.split("\t") for row in table.all_inner_texts()]

    assert soon(lambda: [(row[0], row[5]) for row in cells()]) == [
        ("500", "0"),
        ("400", "0"),
        ("300", "5"),
        ("200", "0"),
        ("100", "0"),
    ]
    for row in cells():
        wanted = recorded(run, int(row[0]))[jobs.NAN_KEY]
        assert float(row[4]) == pytest.approx(wanted.rms, rel=1e-3)
    assert "NaN and Inf" in soon(page.inner_text, "#history-legend")


def test_statistics_are_sorted_and_searched(page):
    page.click("#tab-statistics")
    page.select_option("#step-select", label="500")
    page.locator("#statistics-table .sort", has_text="rms").click()
    page.locator("#statistics-table [aria-sort=descending]", has_text="rms").wait_for()
    numbers = """[...document.querySelectorAll('#statistics-table .list-row')]
        .sort((a, b) => a.dataset.row - b.dataset.row).map(row => parseFloat(row.lastChild.textContent))"""
    assert soon(lambda: len(found := page.evaluate(numbers)) == 7 and found == sorted(found, reverse=True))
    page.fill("#statistics-search", "layers.2")
    assert soon(page.get_attribute, "#statistics-table", "aria-rowcount") == "3"
    page.press("#statistics-search", "Escape")
    assert soon(page.get_attribute, "#statistics-table", "aria-rowcount") == "8"
    assert soon(page.is_visible, "#histogram-part")


@pytest.mark.parametrize(("before", "after"), [(300, 500), (100, 500), (100, 200), (200, 300)])
def test_changes_are_those_of_diff(page, run, before, after):
    found = diff(jobs.folder(run, before), jobs.folder(run, after))
    changed = {tensor.key: tensor.share for tensor in found.tensors}
    page.click("#tab-changes")
    page.select_option("#changes-from", value=str(at(page, before)))
    page.select_option("#changes-to", value=str(at(page, after)))
    page.select_option("#changes-measure", "blocks")  # another test may have picked another one
    page.locator("#changes-measure[data-shown='blocks']").wait_for()
    told = "milepost.changes().filter(row => row.what !== 'same').map(row => [row.key, row.what])"
    assert soon(lambda: dict(page.evaluate(told))) == dict.fromkeys(changed, "changed")
    rows = page.evaluate("milepost.changes()")
    for row in rows:
        assert row["share"] == pytest.approx(changed.get(row["key"], 0.0), abs=1 / 254)
    assert 0.4 < changed["model.embedding"] < 0.6
    page.locator("#changes-values", has_text=str(before)).wait_for()
    assert soon(page.evaluate, "milepost.differingValues().map(row => row.key)") == [one.key for one in found.values]


def test_changes_of_numbers_need_no_blocks(page, run):
    page.click("#tab-changes")
    page.select_option("#changes-from", value=str(at(page, 100)))
    page.select_option("#changes-to", value=str(at(page, 500)))
    page.select_option("#changes-measure", "rms")
    page.locator("#changes-measure[data-shown='rms']").wait_for()
    one, other = recorded(run, 100), recorded(run, 500)
    for row in page.evaluate("milepost.changes()"):
        a, b = one[row["key"]].rms, other[row["key"]].rms
        assert row["share"] == pytest.approx(abs(a - b) / max(a, b), abs=1e-3)


def test_new_bytes_of_a_step_are_those_that_diff_finds(page, run):
    found = diff(jobs.folder(run, 100), jobs.folder(run, 200))
    wanted = sum(tensor.share * tensor.size_bytes[1] for tensor in found.tensors)
    assert soon(page.evaluate, "step => milepost.data.newBytes(step)", at(page, 200)) == round(wanted)
    assert page.evaluate("step => milepost.data.newBytes(step)", at(page, 400)) is None
    page.click("#tab-timeline")
    page.select_option("#step-select", label="200")
    assert "since step 100" in soon(page.inner_text, "#step-details")


def test_steps_that_were_not_compared_say_how_to(show, run):
    page = show(run, ViewOptions(Budget(pairs=0), compare=(("100", "500"),)))
    page.click("#tab-changes")
    assert soon(page.input_value, "#changes-from") == "0"
    assert soon(page.input_value, "#changes-measure") == "blocks"
    page.select_option("#changes-from", value="1")
    page.locator("#changes-note code").wait_for()
    assert soon(page.inner_text, "#changes-note code") == "milepost view --compare 200:500"


def test_little_is_read_to_compare(run):
    """Where the tables do not tell, and nothing more may be read, it is not known. It is never wrong."""
    page = collect(run, ViewOptions(Budget(read_bytes=1)))
    assert page.changes == []
    assert any("not compared" in note for note in page.notes)
    headers = 2 * sum(page.files[0].header_bytes) + 2 * 8 * (sum(page.files[0].size_bytes) // 65536 + 2)
    page = collect(run, ViewOptions(Budget(read_bytes=headers, pairs=1)))
    [change] = page.changes
    told = dict(zip(page.structures[0].tensors.keys, page.changes_bytes, strict=True))
    found = diff(jobs.folder(run, 300), jobs.folder(run, 500))
    changed = {tensor.key: tensor.share for tensor in found.tensors}
    assert told["model.embedding"] == round(254 * changed["model.embedding"])
    for key, byte in told.items():
        assert byte == 255 or bool(byte) == (key in changed)
    assert 255 in told.values()
    assert change.unknown_bytes > 0
    assert not math.isnan(change.changed_bytes)


def test_a_pair_that_cannot_be_compared_is_a_note(run):
    page = collect(run, ViewOptions(Budget(pairs=0), compare=(("100", "400"), ("100", "200"))))
    assert [(page.steps[one.before].step, page.steps[one.after].step) for one in page.changes] == [(100, 200)]
    [note] = page.notes
    assert "step-0000000100 and step-0000000400 could not be compared" in note
