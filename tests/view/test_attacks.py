"""Hostile texts in every field of a checkpoint: the page shows them as text, runs none of them, and asks nobody."""

import base64
import hashlib

import pytest

import milepost
from attacks import on_page
from milepost.view import write_page
from tests.browser import place_of, soon

LOOK = """async steps => {
    const isBusy = () => document.querySelector("[aria-busy=true]");
    const settled = async () => { do await new Promise(go => setTimeout(go, 4)); while (isBusy()); };
    const lists = {tensors: ["tree"], layout: ["layout-boxes", "reads-table"], statistics: ["statistics-table"],
                   changes: ["changes-table"], timeline: []};
    const picks = document.getElementById("step-select");
    const seen = [];
    for (const step of steps) {
        picks.value = step;
        picks.dispatchEvent(new Event("change"));
        for (const [tab, hosts] of Object.entries(lists)) {
            document.getElementById(`tab-${tab}`).click();
            await settled();
            for (const host of hosts)
                for (const row of document.querySelectorAll(`#${host} .list-row:is(:nth-of-type(3), :last-of-type)`))
                    row.click();
        }
        await settled();
        const problem = document.getElementById("problem").textContent;
        if (problem || window.__ran || {}.polluted) seen.push([milepost.data.steps[step].name, problem]);
    }
    return seen;
}"""
AT_ONCE = 8
"""How many steps are looked at before the driver asks what went wrong."""


def folder_name(number, text):
    """A folder whose name is as hostile as its content, as far as file systems allow."""
    kept = text.replace("/", "_").replace("\0", "_").encode("utf-8", "ignore")[:150].decode("utf-8", "ignore")
    return f"{number:03} {kept}"


def text_of(attack):
    return on_page.PAYLOADS.get(attack.name.removeprefix("page_"), attack.name)


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    """A run with one step for each attack."""
    run = tmp_path_factory.mktemp("hostile") / f"<img src=x onerror={on_page.RUN}>"
    for number, attack in enumerate(on_page.corpus, 1):
        attack.make(run / folder_name(number, text_of(attack)))
    return run


@pytest.mark.slow
def test_no_text_of_a_checkpoint_runs_in_the_page(show, tab, hostile_run):
    page = show(hostile_run)
    count = len(on_page.corpus)
    assert soon(page.evaluate, "milepost.data.steps.length") == count
    for start in range(0, count, AT_ONCE):
        assert page.evaluate(LOOK, list(range(start, min(start + AT_ONCE, count)))) == []
        tab.check()


@pytest.mark.slow
def test_no_text_runs_in_what_is_shown_below_the_pointer(show, tab, hostile_run):
    """Tooltips are made of what a chart shows: names of metrics, phases, rules, tensors and files."""
    page = show(hostile_run)
    for part, chart in {"timeline": "timeline-chart", "tensors": "treemap", "layout": "layout-map"}.items():
        page.click(f"#tab-{part}")
        box = place_of(page, f"#{chart}")
        seen = set()
        for i in range(40):
            page.mouse.move(box["x"] + 110 + i * (box["width"] - 130) / 40, box["y"] + 60 + i)
            seen.add(page.evaluate("document.querySelector('.tip')?.textContent"))
        assert len(seen - {None}) > 0, part
        assert page.evaluate("Boolean(window.__ran)") is False
        tab.check()
    assert page.evaluate("document.querySelectorAll('.tip script, .tip img, .tip [onclick]').length") == 0


def test_a_single_checkpoint_shows_hostile_text_as_text(show, tmp_path):
    text = on_page.PAYLOADS["end_of_script"]
    attack = next(one for one in on_page.corpus if text_of(one) == text)
    attack.make(tmp_path / "checkpoint")
    page = show(tmp_path / "checkpoint")
    told = soon(lambda: page.inner_text("#step-details").count(text) >= 5)
    assert told, "reason, writer, metric, phase, metadata"
    page.click("#tab-tensors")
    assert f"tensor {text}" in soon(page.inner_text, "#tree")
    assert page.evaluate(LOOK, [0]) == []
    assert page.evaluate("document.scripts.length") == 5, "three of data and two of code"


def test_letters_that_hide_or_turn_text_are_spelled_out(show, tab, tmp_path):
    for name in ("page_other_direction", "page_hidden_letters", "page_controls", "page_marks_without_end"):
        next(one for one in on_page.corpus if one.name == name).make(tmp_path / "run" / f"{name}-1")
    page = show(tmp_path / "run")
    seen = ""
    for step in range(4):
        page.select_option("#step-select", value=str(step))
        assert soon(page.evaluate, "milepost.view.step") == step
        tab.until("!document.querySelector('[aria-busy=true]')")
        seen += page.inner_text("body")
    assert "\\u{202e}" in seen
    assert "\\u{200b}" in seen
    assert not {letter for letter in seen if ord(letter) in range(0x202A, 0x202F) or ord(letter) in (0x1B, 0x200B, 0)}
    assert "\u0301" * 4 not in seen


def test_nothing_of_a_checkpoint_runs_in_a_notebook(tab, hostile_run, tmp_path):
    """What objects show of themselves, all on one page without a policy that would stop it."""
    blocks = [milepost.Checkpointer(hostile_run)._repr_html_()]
    for place in sorted(hostile_run.iterdir()):
        with milepost.open(place) as checkpoint:
            blocks.append(checkpoint._repr_html_())
            blocks += [tensor._repr_html_() for tensor in list(checkpoint.tensors.values())[:4]]
    assert len(blocks) > 100
    file = tmp_path / "notebook.html"
    file.write_text(f"<!doctype html><meta charset=utf-8><body>{''.join(blocks)}", errors="surrogatepass")
    page = tab.open(file.as_uri())
    page.mouse.move(100, 100)
    assert page.evaluate("Boolean(window.__ran)") is False
    assert page.evaluate("document.querySelectorAll('script, img, svg, iframe, a, form, style, [onclick]').length") == 0


def test_the_policy_stops_code_that_was_put_into_the_file(tab, tmp_path):
    """Even a page that somebody changed runs no other script and asks nobody."""
    milepost.save({"w": b"x"}, tmp_path / "checkpoint")
    file = write_page(tmp_path / "checkpoint", tmp_path / "page.html")
    evil = f"<script>{on_page.RUN}</script><img src=http://127.0.0.1:9/x onerror={on_page.RUN}>"
    file.write_text(file.read_text().replace("</main>", f"{evil}</main>"))
    page = tab.open(file.as_uri())
    tab.until("document.documentElement.dataset.ready === 'true'")
    assert page.evaluate("Boolean(window.__ran)") is False
    with pytest.raises(AssertionError, match="script-src"):
        tab.check()
    digest = base64.b64encode(hashlib.sha256(on_page.RUN.encode()).digest()).decode()
    assert digest not in file.read_text()
