"""The page in a real browser: its parts, the search, clicks and keys, and every kind of place."""

import json
import re

import pytest
import torch

import milepost
from milepost.view import ViewOptions
from tests.browser import place_of, soon
from tests.view import jobs

TIMES, DASH, OPENER = "\u00d7", "\u2013", "\u203a"


def rows(page, host):
    """The texts of the rows that are drawn of a list, from the top: a list of cells for each."""
    found = page.evaluate(
        """host => [...document.querySelectorAll(`#${host} .list-row`)]
            .sort((a, b) => a.dataset.row - b.dataset.row)
            .map(row => [...row.children].map(cell => cell.textContent))""",
        host,
    )
    return [[cell.lstrip(OPENER) for cell in row] for row in found]


def keys(page):
    """The first column of the tree, as far as it is drawn."""
    return [row[0] for row in rows(page, "tree")]


def test_timeline_lists_each_step_with_its_state(show, run):
    page = show(run)
    assert soon(lambda: [row[:2] for row in rows(page, "steps-table")]) == [
        ["600", "unfinished"],
        ["500", "whole"],
        ["400", "damaged"],
        ["300", "unhealthy"],
        ["200", "whole"],
        ["100", "whole"],
    ]
    heads = page.locator("#steps-table [role=columnheader]").all_inner_texts()
    assert heads == ["step", "state", "size", "new", "save", "loss", "kept because", "verified", "age"]
    table = rows(page, "steps-table")
    newest = dict(zip(heads, table[1], strict=True))
    assert (newest["loss"], newest["kept because"]) == ("2", "last 10, best 1 by loss")
    assert [row[7] == DASH for row in table] == [True, True, True, True, False, False]
    assert "500" in soon(page.inner_text, "#tiles")
    assert "1 unhealthy, 1 damaged, 1 unfinished" in soon(page.inner_text, "#tiles")


def test_a_step_tells_why_it_is_not_whole(show, run):
    page = show(run)
    page.select_option("#step-select", label="300 (unhealthy)")
    assert jobs.NAN_KEY in soon(page.inner_text, "#step-details")
    page.select_option("#step-select", label="400 (damaged)")
    assert "was saved with" in soon(page.inner_text, "#step-details .notice.bad")
    page.select_option("#step-select", label="600 (unfinished)")
    assert "never finished" in soon(page.inner_text, "#step-details")
    page.click("#step-previous")
    assert "4f1c2aa" in soon(page.inner_text, "#step-details")
    assert "writing" in soon(page.inner_text, "#step-details")


def test_keys_and_clicks_in_the_timeline_pick_steps(show, run):
    page = show(run)
    chart = page.locator("#timeline-chart")
    assert soon(chart.get_attribute, "aria-valuetext").startswith("Step 500, whole")
    chart.press("ArrowLeft")
    assert soon(chart.get_attribute, "aria-valuetext").startswith("Step 400, damaged")
    chart.press("Home")
    assert soon(page.inner_text, "#step-heading") == "Step 100"
    box = place_of(page, "#timeline-chart")
    page.mouse.click(box["x"] + box["width"] - 24, box["y"] + 60)
    assert soon(page.inner_text, "#step-heading") == "Step 600"
    page.locator("#steps-table .list-row", has_text="300").click()
    assert soon(page.inner_text, "#step-heading") == "Step 300"
    assert soon(page.inner_text, "#status").startswith("Step 300, unhealthy")


def test_the_table_of_steps_can_be_sorted(show, run):
    page = show(run)
    loss = page.locator("#steps-table .sort", has_text="loss")
    loss.press("Enter")
    assert soon(lambda: [row[0] for row in rows(page, "steps-table")][:3]) == ["100", "200", "300"]
    assert soon(page.locator("#steps-table [aria-sort=descending]").inner_text).startswith("loss")
    assert soon(page.inner_text, "#step-heading") == "Step 500", "the head of a column is no row"


def test_the_tree_opens_and_closes_by_keys(show, run):
    page = show(run)
    page.locator("#tab-timeline").press("ArrowRight")
    assert soon(page.locator("#tab-tensors").evaluate, "tab => tab === document.activeElement")
    assert soon(lambda: keys(page)[:4]) == ["model", "embedding", "layers", "0"]
    everything = keys(page)
    first = page.locator("#tree .list-row").first
    first.focus()
    page.keyboard.press("ArrowLeft")
    assert soon(lambda: "model" in (known := keys(page)) and "embedding" not in known)
    assert soon(first.get_attribute, "aria-expanded") == "false"
    page.keyboard.press("ArrowRight")
    assert soon(keys, page) == everything
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert soon(page.inner_text, "#tensor-details .key-line") == "model.embedding"
    assert f"4096 {TIMES} 64" in soon(page.inner_text, "#tensor-details")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    assert soon(page.inner_text, "#tensor-details .value") == "1"


SEARCHES = {
    "embedding": ["model.embedding"],
    "LAYERS w": [f"model.layers.{i}.w" for i in range(3)],
    "layers -w": [f"model.layers.{i}.b" for i in range(3)],
    "size:>1MB": ["model.embedding"],
    "shape:64x?": [f"model.layers.{i}.w" for i in range(3)],
    "dims:1": [f"model.layers.{i}.b" for i in range(3)],
    "dtype:f32 layers.2": ["model.layers.2.w", "model.layers.2.b"],
    "kind:value": ["step", "config.dim", "config.names", "fixed"],
    "layout:whole is:tied": [],
    "rank:1": [],
    "constructor:x": [],
}


def test_search_finds(show, tab, run):
    page = show(run)
    page.keyboard.press("/")
    tab.until("milepost.found().length")
    for query, found in SEARCHES.items():
        page.fill("#search", query)
        page.press("#search", "Enter")
        assert soon(page.evaluate, "milepost.found().map(leaf => leaf.key)") == found, query
        assert soon(page.inner_text, "#tree-count").startswith(f"{len(found)} of ")
        assert soon(page.is_visible, "#tree .list-empty") == (not found)
    page.locator("#search").press("Escape")
    tab.until("milepost.found().length === 11")


def test_search_finds_what_is_not_finite(show, run):
    page = show(run)
    page.select_option("#step-select", label="300 (unhealthy)")
    page.keyboard.press("/")
    page.keyboard.type("is:nan")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert soon(page.inner_text, "#tensor-details .key-line") == jobs.NAN_KEY
    page.keyboard.press("/")
    page.keyboard.type("size:huge")
    page.keyboard.press("Enter")
    assert "not understood" in soon(page.inner_text, "#tree-count")


def test_the_treemap_goes_down_and_up(show, run):
    page = show(run)
    page.click("#tab-tensors")
    box = place_of(page, "#treemap")
    page.mouse.click(box["x"] + 30, box["y"] + 8)  # the head of what all bytes are in
    page.locator("#treemap-path .crumb").wait_for()
    assert soon(page.locator("#treemap-path").inner_text).startswith("all")
    place_of(page, "#treemap")  # the reader looks at it: all that moves has come to rest
    page.locator("#treemap-path .crumb").first.press("Enter")
    assert soon(page.locator("#treemap-path .crumb").count) == 0
    box = place_of(page, "#treemap")
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert soon(page.inner_text, "#tensor-details .key-line") == "model.embedding"
    page.select_option("#treemap-colour", "dtype")
    assert soon(page.inner_text, "#treemap-legend") == "float32"


def test_the_place_is_in_the_address(show, tab, run):
    page = show(run)
    page.select_option("#step-select", label="200")
    page.click("#tab-tensors")
    page.locator("#tree .list-row", has_text="embedding").click()
    assert "tensor=model.embedding" in soon(page.evaluate, "location.hash")
    address = page.evaluate("location.href")
    page.goto("about:blank")
    page.goto(address)
    tab.until("document.documentElement.dataset.ready === 'true'")
    assert soon(page.inner_text, "#tensor-details .key-line") == "model.embedding"
    assert soon(page.input_value, "#step-select") == "1"


def test_dark_and_light_follow_the_system_and_the_button(new_tab, show, run):
    page = show(run)
    dark = new_tab(color_scheme="dark").open(page.url)
    assert soon(dark.evaluate, "document.documentElement.dataset.theme") == "dark"
    colours = [
        p.evaluate("getComputedStyle(document.body).color + getComputedStyle(document.documentElement).backgroundColor")
        for p in (page, dark)
    ]
    assert colours[0] != colours[1]
    dark.click("#theme-toggle")
    assert soon(dark.evaluate, "document.documentElement.dataset.theme") == "light"
    dark.reload()
    assert soon(dark.get_attribute, "#theme-toggle", "aria-label") == "Theme: light"


COLOUR = """() => {
    const map = document.querySelector("#changes-map canvas");
    const pen = document.createElement("canvas").getContext("2d");
    if (map) pen.drawImage(map, -100, -100);
    return pen.getImageData(0, 0, 1, 1).data.join();
}"""


def test_charts_of_hidden_parts_are_drawn_when_these_are_shown(show, run):
    """Also where the reader left the part before it was drawn, and where the colours changed meanwhile."""
    page = show(run)
    page.evaluate("() => ['changes', 'layout'].forEach(tab => document.getElementById(`tab-${tab}`).click())")
    page.click("#tab-changes")
    assert soon(lambda: page.evaluate(COLOUR).endswith(",255")), "not empty"
    before = page.evaluate(COLOUR)
    page.click("#tab-layout")
    for _ in ("light", "dark"):
        page.click("#theme-toggle")
    page.click("#tab-changes")
    assert soon(lambda: page.evaluate(COLOUR) != before and page.evaluate(COLOUR).endswith(",255"))
    after = page.evaluate(COLOUR)
    page.reload()
    assert soon(page.get_attribute, "#tab-changes", "aria-selected") == "true"
    assert soon(page.evaluate, COLOUR) == after


def test_tables_stay_where_they_are_when_a_row_is_picked(show, tmp_path):
    with milepost.Checkpointer(tmp_path / "run", statistics=True) as keeper:
        for step in (1, 2):
            keeper.save({f"t{i:03}": torch.full((4,), float(step + i)) for i in range(300)}, step)
    page = show(tmp_path / "run")
    for tab, host in (("tensors", "tree"), ("statistics", "statistics-table"), ("changes", "changes-table")):
        page.click(f"#tab-{tab}")
        page.locator(f"#{host} .list-row").first.wait_for()
        page.locator(f"#{host} .list-body").evaluate("body => { body.scrollTop = 3000; }")
        row = page.locator(f"#{host} .list-row[data-row='105']")
        row.click()
        assert soon(row.get_attribute, "aria-selected") == "true", tab
        assert soon(page.evaluate, "milepost.view.key") == "t105"
        assert soon(page.locator(f"#{host} .list-body").evaluate, "body => body.scrollTop") == 3000


def test_the_map_names_the_files_of_the_step_that_is_shown(show, run):
    page = show(run)
    page.click("#tab-layout")
    for step in (500, 200):
        page.select_option("#step-select", label=str(step))
        with milepost.open(jobs.folder(run, step)) as checkpoint:
            saved = checkpoint.manifest.save_id
        titles = page.locator("#layout-boxes .list-row >> [title]")
        assert soon(titles.get_attribute, "title") == f"data/{saved}/00000.safetensors"


def formats(tmp_path):
    """Checkpoints of other libraries, with the files that the page names."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import save as save_dcp

    state = {"w": torch.ones(4, 6), "n": torch.zeros(2)}
    torch.save({**state, "epoch": 3}, tmp_path / "model.pt")
    (tmp_path / "hf").mkdir()
    save_file(state, tmp_path / "hf" / "model.safetensors")
    save_dcp(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return {"model.pt": "model.pt", "hf": "model.safetensors", "dcp": "__0_0.distcp"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_other_formats_show_their_tensors_and_files(show, tmp_path):
    for name, file in formats(tmp_path).items():
        page = show(tmp_path / name)
        assert soon(page.inner_text, "#tab-timeline") == "Overview"
        assert soon(page.is_hidden, "#step-picker")
        page.click("#tab-tensors")
        assert soon(lambda page=page: {"w", "n"} <= set(keys(page)))
        page.locator("#tree .list-row", has_text="w").first.click()
        page.click("#tab-layout")
        assert file in soon(page.inner_text, "#layout-boxes")
        page.click("#tab-statistics")
        assert "statistics=True" in soon(page.inner_text, "#statistics-note")


def test_values_are_known_on_both_sides_of_a_step_that_is_not_whole(show, tmp_path):
    with milepost.Checkpointer(tmp_path / "run") as keeper:
        for step in (1, 2, 3, 4):
            keeper.save({"w": torch.ones(3), "step": step, "fixed": "same"}, step)
    next(jobs.folder(tmp_path / "run", 2).glob("manifest-*")).unlink()
    manifest = next(jobs.folder(tmp_path / "run", 3).glob("manifest-*"))
    manifest.write_bytes(manifest.read_bytes()[:-60])
    page = show(tmp_path / "run")
    told = page.evaluate("milepost.data.steps.map((step, i) => [step.state, milepost.data.values(i)])")
    assert told == [["whole", ["1", "same"]], ["unfinished", None], ["damaged", None], ["whole", ["4", "same"]]]


def test_a_run_of_one_step_has_no_changes(show, tmp_path):
    with milepost.Checkpointer(tmp_path / "run") as keeper:
        keeper.save({"w": torch.ones(3)}, 7)
    page = show(tmp_path / "run")
    assert soon(page.inner_text, "#step-heading") == "Step 7"
    assert soon(page.is_hidden, "#tab-changes")
    assert soon(page.is_disabled, "#step-previous")
    assert soon(page.is_disabled, "#step-next")


def test_a_run_that_only_failed_shows_why(show, tmp_path):
    left = jobs.folder(tmp_path / "run", 5) / "data" / "00000001-0123456789abcdef"
    left.mkdir(parents=True)
    (left / "00000.safetensors").write_bytes(b"half")
    page = show(tmp_path / "run")
    assert "unfinished" in soon(page.inner_text, "#steps-table")
    assert "none" in soon(page.inner_text, "#tiles")
    for tab_ in ("tensors", "layout"):
        page.click(f"#tab-{tab_}")
        told = {"tensors": "not in the page", "layout": "no tensors"}
        assert told[tab_] in soon(page.inner_text, f"#panel-{tab_}")


@pytest.mark.slow
def test_a_thousand_steps_are_drawn_and_picked(show, tmp_path):
    with milepost.Checkpointer(tmp_path / "run") as keeper:
        keeper.save({"w": torch.ones(3)}, 1, metrics={"loss": 1.0})
    manifest = next(jobs.folder(tmp_path / "run", 1).glob("manifest-*"))
    for step in range(2, 1001):
        place = jobs.folder(tmp_path / "run", step)
        place.mkdir()
        (place / manifest.name).write_bytes(manifest.read_bytes())
        (place / "data").symlink_to(manifest.parent / "data")
    page = show(tmp_path / "run", ViewOptions(steps=900))
    assert soon(page.get_attribute, "#steps-table", "aria-rowcount") == "901"
    assert soon(lambda: 0 < page.locator("#steps-table .list-row").count() < 60)
    page.locator("#timeline-chart").focus()
    page.evaluate(
        """() => { const chart = document.getElementById('timeline-chart');
        for (let i = 0; i < 50; i += 1) chart.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'})); }"""
    )
    assert soon(page.inner_text, "#step-heading") == "Step 950"
    assert "newest 900" in soon(page.inner_text, "#notes")


def test_on_paper_lists_show_their_first_rows(show, run):
    page = show(run)
    page.click("#tab-statistics")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert soon(page.is_hidden, "#tab-timeline")
    assert soon(page.locator("#statistics-table .list-row").count) == 7
    assert len(page.pdf()) > 10_000
    page.evaluate("dispatchEvent(new Event('afterprint'))")


def test_data_of_another_version_says_so(chromium, tab, run, tmp_path):
    import base64
    import zlib

    from milepost.view import write_page

    file = write_page(run, tmp_path / "page.html")
    text = file.read_text()
    held = re.search(r'id="milepost-page">([^<]*)<', text)[1]
    record = json.loads(zlib.decompress(base64.b64decode(held)))
    changed = base64.b64encode(zlib.compress(json.dumps({**record, "version": 99}).encode())).decode()
    file.write_text(text.replace(held, changed))
    page = tab.open(file.as_uri())
    page.locator("#problem").wait_for()
    assert "version 99" in soon(page.inner_text, "#problem")
    with pytest.raises(AssertionError, match="version 99"):
        tab.check()
