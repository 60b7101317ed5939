"""Keyboards and screen readers: what axe-core finds wrong is nothing, and each part can be reached and seen."""

from pathlib import Path

import pytest

from tests.browser import soon

AXE = Path(__file__).parents[2] / ".venv" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
TABS = ("timeline", "tensors", "layout", "statistics", "changes")
FOCUSED = """() => {
    const at = document.activeElement;
    if (at === document.body) return null;
    const labels = [...(at.labels ?? [])].map(label => label.textContent).join(" ");
    const named = document.getElementById(at.getAttribute("aria-labelledby") ?? "")?.textContent;
    const name = at.getAttribute("aria-label") || named || labels || at.textContent || at.title;
    const style = getComputedStyle(at.type === "radio" ? at.nextElementSibling : at);
    const box = at.getBoundingClientRect();
    return {id: at.id || at.className || at.tagName, name: name.trim(), ring: style.outlineStyle, seen: box.width > 0};
}"""


@pytest.mark.slow
@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: scripts/setup does it where there is npm")
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 400)])
def test_axe_finds_nothing_wrong(new_tab, show, run, scheme, width):
    page = new_tab(color_scheme=scheme, viewport={"width": width, "height": 900}).open(show(run).url)
    page.evaluate(AXE.read_text())
    for tab in TABS:
        page.click(f"#tab-{tab}")
        assert soon(page.is_visible, f"#panel-{tab}")
        page.locator(".list-row:visible").nth(1).click()
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']}).then(all => all.violations)")
        assert [(one["id"], one["nodes"][0]["html"]) for one in found] == [], tab


@pytest.mark.parametrize("tab_", TABS)
def test_each_stop_of_the_tab_key_has_a_name_and_a_ring(show, tab, run, tab_):
    page = show(run)
    place = page.url.partition("#")[0]
    page.goto("about:blank")
    page.goto(f"{place}#part={tab_}")
    tab.until("document.documentElement.dataset.ready === 'true'")
    stops = []
    for _ in range(60):
        page.evaluate("() => { window.before = document.activeElement; }")
        page.keyboard.press("Tab")
        assert soon(page.evaluate, "window.before !== document.activeElement")
        stop = page.evaluate(FOCUSED)
        if stop is None or (stops and stop == stops[0]):
            break
        stops.append(stop)
    assert 6 < len(stops) < 40
    for stop in stops:
        assert stop["name"], stop
        assert stop["seen"], stop
        assert stop["ring"] != "none", stop
    assert stops[0]["id"] == "skip"
    assert sum(stop["id"] == "list-row" for stop in stops) <= 2, "a list is one stop"


def test_lists_and_charts_have_roles_and_names(show, run):
    page = show(run)
    for tab in TABS:
        page.click(f"#tab-{tab}")
        assert soon(page.is_visible, f"#panel-{tab}")
    wrong = page.evaluate(
        """[...document.querySelectorAll('.chart, [role=grid], [role=treegrid]')]
        .filter(one => !one.getAttribute('role') || !one.getAttribute('aria-label')).map(one => one.id)"""
    )
    assert wrong == []
    assert soon(page.locator("#tree").get_attribute, "role") == "treegrid"
    page.click("#tab-tensors")
    row = page.locator("#tree .list-row").nth(2)
    assert soon(row.get_attribute, "aria-level") == "2"
    assert soon(row.get_attribute, "aria-expanded") == "true"
    assert soon(lambda: int(page.get_attribute("#tree", "aria-rowcount")) > 5)


def test_what_is_picked_is_said(show, run):
    page = show(run)
    page.select_option("#step-select", label="300 (unhealthy)")
    assert soon(page.inner_text, "#status") == "Step 300, unhealthy, 1.10 MB selected"
    page.click("#tab-tensors")
    page.locator("#tree .list-row", has_text="embedding").click()
    assert soon(page.inner_text, "#status") == "Tensor model.embedding selected"


@pytest.mark.parametrize("width", [400, 360])
def test_nothing_is_cut_off_on_a_narrow_screen(new_tab, show, run, width):
    page = new_tab(viewport={"width": width, "height": 800}).open(show(run).url)
    for tab in TABS:
        page.click(f"#tab-{tab}")
        assert soon(page.is_visible, f"#panel-{tab}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, tab
        wide = page.evaluate(
            """[...document.querySelectorAll('.card *')].filter(one => one.offsetParent
            && !one.closest('.list, .scroll')
            && one.getBoundingClientRect().right > innerWidth).map(one => one.id || one.className)"""
        )
        assert wide == [], tab
