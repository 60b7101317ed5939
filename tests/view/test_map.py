"""Who holds what, and what another mesh would read: the page works it out as Milepost does, number by number."""

from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import milepost
from milepost.core.box import Box
from milepost.core.division import parts_of, read_plan
from milepost.core.layout import Cut, Grid, Mesh
from milepost.core.manifest import Tensor
from milepost.core.statistics import UNIT_BIN, bin_range
from milepost.inspection.load_plan import NewMesh, plan_load
from tests import strategies
from tests.browser import place_of, soon

RANKS = range(6)
BATCH = 24
MESHES = [
    ((1,), (None,)),
    ((3,), (Cut(0),)),
    ((5,), (Cut(1),)),
    ((2, 3), (Cut(0), Cut(1))),
    ((3, 2), (Cut(1), None)),
    ((2, 2), (Cut(0, 3), Cut(0))),
    ((7, 2), (None, Cut(0, 2))),
]


def js_box(box):
    return {"offset": list(box.offset), "shape": list(box.shape)}


def js_read(item):
    return {"rank": item.rank, "name": item.name, "source": js_box(item.source), "box": js_box(item.box)}


def sorted_reads(reads):
    keep = ("rank", "name", "source", "box")
    return sorted(({name: read[name] for name in keep} for read in reads), key=str)


@pytest.fixture(scope="module")
def opened(show_once, meshed):
    """The page of the checkpoint, for all tests of this file."""
    return show_once(meshed)


@pytest.fixture
def page(opened):
    yield opened.page
    opened.check()


def test_reads_on_other_meshes_are_those_of_read_plan(page, meshed):
    """Each tensor, cut in each way, on each new mesh, rank by rank."""
    compared = 0
    with milepost.open(meshed) as checkpoint:
        manifest = checkpoint.manifest
    for tensor in manifest.tensors:
        for shape, cuts in MESHES:
            if any(cut is not None and cut.dim >= len(tensor.shape) for cut in cuts):
                continue
            grid = Grid(Mesh.of(shape, range(Box.whole(shape).elements)), cuts)
            asked = {"key": tensor.key, "mesh": shape, "cuts": [cut and msgspec.structs.asdict(cut) for cut in cuts]}
            told = page.evaluate("wanted => milepost.explain(wanted)", asked)
            for plan in told:
                pieces = grid.pieces(tensor.shape, plan["rank"])
                wanted = [item for piece in pieces for item in read_plan(manifest, tensor, piece.box)]
                assert sorted_reads(plan["reads"]) == sorted_reads(map(js_read, wanted)), (tensor.key, shape, cuts)
                assert plan["bytes"] == sum(item.box.elements for item in wanted) * 4
                compared += len(wanted)
    assert compared > 150


@pytest.mark.parametrize(("mesh", "cuts"), [("1", "s0"), ("3", "s0"), ("2x3", "s0,s1"), ("4x2", "r,s1")])
def test_all_tensors_on_another_mesh_are_as_milepost_explain(page, meshed, mesh, cuts):
    with milepost.open(meshed) as checkpoint:
        found = plan_load(checkpoint.manifest, "", NewMesh.parse(None, mesh, cuts))
    told = page.evaluate(
        "wanted => milepost.explainAll(wanted).map(row => [row.rank, row.bytes, row.count, row.sources.size])",
        {"mesh": found.mesh, "cuts": [None if cut < 0 else {"dim": cut, "stride": 1} for cut in found.cuts]},
    )
    assert told == [[row.rank, row.bytes, row.reads, row.files] for row in found.ranks]


def test_the_map_lists_the_boxes_that_ranks_wrote(page, meshed):
    page.click("#tab-layout")
    with milepost.open(meshed) as checkpoint:
        manifest = checkpoint.manifest
    for tensor in manifest.tensors:
        if not tensor.size_bytes:
            continue
        page.fill("#layout-tensor", tensor.key)
        page.press("#layout-tensor", "Enter")
        layout = manifest.layout_of(tensor)
        held = layout.overlapping(tensor.shape, Box.whole(tensor.shape))
        written = [(part, rank) for one in held for part, rank in parts_of(tensor, one.box, one.holders)]
        drawn = """[...document.querySelectorAll('#layout-boxes .list-row')]
            .sort((a, b) => a.dataset.row - b.dataset.row)
            .map(row => [...row.children].slice(0, 2).map(cell => cell.textContent))"""
        assert soon(page.evaluate, drawn) == [[f"rank {rank}", box.text.replace(",", ", ")] for box, rank in written], (
            tensor.key
        )


def test_a_mesh_is_picked_by_hand(page):
    page.click("#tab-layout")
    page.fill("#layout-tensor", "uneven")
    page.press("#layout-tensor", "Enter")
    page.fill("#mesh-shape", "3x2")
    assert soon(page.get_attribute, "#reads-table", "aria-rowcount") == "7"
    page.select_option("#mesh-cut-1", "copy")
    assert "2.00" in soon(page.inner_text, "#reads-summary")
    page.locator("#reads-table .list-row").nth(4).click()
    assert "rank 4 reads" in soon(page.inner_text, "#reads-detail")
    page.select_option("#mesh-cut-0", "1")
    page.fill("#mesh-stride-0", "2")
    page.select_option("#reads-scope", "all")
    page.locator("#reads-summary", has_text="all tensors").wait_for()
    for wrong in ("", "0", "2x", "1e9", "-1", "99999x99999"):
        page.fill("#mesh-shape", wrong)
        assert soon(page.inner_text, "#mesh-problem"), wrong
        assert soon(page.is_hidden, "#reads-body")
    page.fill("#mesh-shape", "2")
    assert soon(page.inner_text, "#mesh-problem") == ""


def test_a_box_is_picked_in_the_map_and_in_the_table(page):
    page.click("#tab-layout")
    page.fill("#layout-tensor", "even")
    page.press("#layout-tensor", "Enter")
    assert "64 \u00d7 32" in soon(page.inner_text, "#layout-facts")
    box = place_of(page, "#layout-map")
    page.mouse.click(box["x"] + box["width"] - 60, box["y"] + box["height"] - 40)
    assert soon(page.locator("#layout-boxes [aria-selected=true]").inner_text).startswith("rank 3")
    page.locator("#layout-boxes .list-row").first.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    assert "Box [0:32, 16:32], written by rank 1" in soon(page.inner_text, "#status")


@st.composite
def cases(draw):
    """A tensor, how it is cut, and a region of it."""
    shape = draw(strategies.shapes())
    layout = draw(strategies.layouts(shape, RANKS))
    tensor = Tensor("w", "float32", shape, 0, draw(st.integers(1, 4)), draw(st.integers(0, 5)), "tensor")
    return tensor, layout, draw(strategies.boxes_in(shape))


EVALUATE = """cases => cases.map(({tensor, layout, region, ranks}) => ({
    plan: milepost.plan(tensor, layout, region),
    pieces: ranks.map(rank => milepost.pieces(layout, tensor.shape, rank)),
}))"""


@pytest.mark.slow
def test_arithmetic_of_the_page_is_that_of_milepost(page):
    @strategies.examples(60)
    @given(st.lists(cases(), min_size=BATCH, max_size=BATCH))
    def compare(batch):
        asked = [
            {
                "tensor": {"key": t.key, "shape": t.shape, "parts": t.parts, "turn": t.turn, "stored": t.key},
                "layout": msgspec.to_builtins(layout),
                "region": js_box(region),
                "ranks": list(RANKS),
            }
            for t, layout, region in batch
        ]
        for (tensor, layout, region), told in zip(batch, page.evaluate(EVALUATE, asked), strict=True):
            plan = read_plan(SimpleNamespace(layout_of=lambda _, layout=layout: layout), tensor, region)
            assert sorted_reads(told["plan"]) == sorted_reads(map(js_read, plan))
            pieces = [[{"box": js_box(p.box), "at": list(p.at)} for p in layout.pieces(tensor.shape, r)] for r in RANKS]
            assert told["pieces"] == pieces

    compare()


def test_bins_of_histograms_have_the_limits_of_milepost(page):
    bins = [0, *range(1, UNIT_BIN + 1023, 37), *range(-UNIT_BIN - 60, 0, 91)]
    told = page.evaluate("bins => bins.map(bin => milepost.bin(bin).map(String))", bins)
    assert [tuple(map(float, pair)) for pair in told] == [bin_range(number) for number in bins]
