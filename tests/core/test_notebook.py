"""What a notebook shows of a checkpoint and of a tensor: facts and first keys, and no key acts as HTML."""

from html.parser import HTMLParser

import pytest
import torch

import milepost
from milepost.core.layout import Cut, Grid, Mesh
from milepost.core.notebook import escaped, show_age, show_size
from milepost.testing import run_ranks

TAGS = {"div", "strong", "code", "table", "thead", "tbody", "tr", "th", "td", "em"}
EVIL = (
    "<img src=x onerror=alert(1)>",
    "</code></td><script>alert(1)</script>",
    "\" onload='alert(1)",
    "&lt;b&gt;",
    "$\\alpha$ {{7*7}}",
    "a\u202eb\x1b[31m\x00\u200b",
)


class Reader(HTMLParser):
    """The elements of a block and the text in each cell; fails on any other element or attribute."""

    def __init__(self, text):
        super().__init__()
        self.cells, self.open, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert tag in TAGS
        assert {name for name, _ in attrs} <= {"style", "scope"}
        self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if {"td", "th"} & set(self.open):
            self.cells[-1] += data


def test_checkpoint_shows_its_facts_and_first_keys():
    state = {f"w{number:02}": torch.zeros(3, 1000) for number in range(12)} | {"step": 7}
    milepost.save(state, "memory://shown")
    shown = Reader(milepost.open("memory://shown")._repr_html_())
    for fact in ("generation 1", "13 keys", "144 kB", "saved by 1 rank ", "seconds ago", "3 more"):
        assert fact in shown.text
    assert shown.cells[4:8] == ["w00", "float32", "3 x 1,000", "12 kB"]
    assert len(shown.cells) == 4 * 11


def test_keys_cannot_act_as_html():
    store = milepost.store.MemoryStore()
    milepost.save({**{key: torch.ones(2) for key in EVIL}, "x" * 10_000: 1}, store)
    found = milepost.open(store)
    shown = Reader(found._repr_html_())
    assert shown.cells[4:20:4] == list(EVIL[:4])
    assert shown.cells[20] == EVIL[4]
    assert shown.cells[24] == "a\\u202eb\\x1b[31m\\x00\\u200b"
    assert len(shown.cells[28]) == 120
    assert EVIL[0] in Reader(found[EVIL[0]]._repr_html_()).text
    assert escaped("\udc80") == "\\udc80"


def test_tensor_shows_the_ranks_and_files_of_its_boxes():
    store = milepost.store.MemoryStore()
    grid = Grid(Mesh.of((2,), range(2)), (Cut(0),))

    def save(comm):
        part = milepost.Sharded.on_grid((64, 32), torch.zeros(32, 32), grid, comm.rank)
        milepost.save({"w": part}, store, process_group=comm)

    run_ranks(2, save)
    lazy = milepost.open(store)["w"]
    shown = Reader(lazy._repr_html_())
    assert "on a mesh of 2 ranks: dim 0" in shown.text
    assert shown.cells[3:5] == ["0:32, 0:32", "0"]
    assert shown.cells[6:8] == ["32:64, 0:32", "1"]
    assert shown.cells[8] in store.objects


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (13_100_000_000, "13.1 GB"), (10**21, "1e+03 EB")],
)
def test_sizes_read_well(size_bytes, text):
    assert show_size(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 seconds"), (119, "119 seconds"), (120, "2 minutes"), (7200, "2 hours"), (1e6, "11 days")],
)
def test_ages_read_well(seconds, text):
    assert show_age(seconds) == f"{text} ago"
