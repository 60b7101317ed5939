"""The page of a run whose steps share data: sizes, what is new, and the file that holds each box."""

import shutil

import pytest
import torch

import milepost
from milepost.core.box import Box
from milepost.core.division import read_plan
from milepost.testing import run_ranks
from milepost.view import Budget, ViewOptions, collect
from milepost.view.follow import Followed
from tests.browser import soon
from tests.view import jobs

STEPS = (100, 200, 300, 400)
WORLD = 3


def state_of(rank, step):
    """A frozen matrix that is cut over the ranks, one more since step 200, and one that always changes."""
    part = torch.arange(64 * 256.0).reshape(64, 256) + rank
    frozen = milepost.Sharded((64 * WORLD, 256), {(64 * rank, 0): part}, torch.float32)
    late = torch.full((100, 64), float(min(step, 200)))
    return {"frozen": frozen, "late": late, "adapter": torch.full((50, 64), float(step))}


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    place = tmp_path_factory.mktemp("shared") / "run"

    def work(comm):
        with milepost.Checkpointer(place, process_group=comm, incremental=True) as keeper:
            for step in STEPS:
                keeper.save(state_of(comm.rank, step), step)

    run_ranks(WORLD, work)
    return place


def files_in(place):
    """The file of each entry, as Milepost finds it: {(rank, entry): name}."""
    with milepost.open(place) as checkpoint:
        items = [
            item
            for tensor in checkpoint.manifest.tensors
            for item in read_plan(checkpoint.manifest, tensor, Box.whole(tensor.shape))
        ]
        return {(item.rank, item.name): checkpoint.file_name(item.rank, item.name) for item in items}


@pytest.mark.parametrize("at", range(len(STEPS)))
def test_each_entry_is_in_its_file(show, shared, at):
    page = show(shared)
    wanted = files_in(jobs.folder(shared, STEPS[at]))
    told = page.evaluate(
        "([step, entries]) => entries.map(([rank, entry]) => milepost.data.fileName(step, rank, entry))",
        [at, [list(entry) for entry in wanted]],
    )
    assert told == list(wanted.values())
    assert len(set(told)) > WORLD or at == 0


def test_map_and_reads_name_files_of_earlier_saves(show, shared):
    page = show(shared)
    page.select_option("#step-select", label="400")
    page.click("#tab-layout")
    page.fill("#layout-tensor", "frozen")
    page.press("#layout-tensor", "Enter")
    assert "Of earlier saves\n3 boxes" in soon(page.inner_text, "#layout-facts")
    wanted = files_in(jobs.folder(shared, 400))
    frozen = [name for (_, entry), name in wanted.items() if entry.startswith("frozen")]
    titles = """[...document.querySelectorAll('#layout-boxes .list-row')]
        .sort((a, b) => a.dataset.row - b.dataset.row).map(row => row.lastChild.title)"""
    assert soon(page.evaluate, titles) == frozen
    page.fill("#mesh-shape", "1")
    page.locator("#reads-table .list-row").first.click()
    for name in frozen:
        assert name in soon(page.inner_text, "#reads-detail")
    page.select_option("#step-select", label="100")
    assert soon(lambda: "Of earlier saves" not in page.inner_text("#layout-facts"))


def test_timeline_tells_new_beside_whole_bytes(show, shared):
    page = show(shared)
    heads = page.locator("#steps-table [role=columnheader]").all_inner_texts()
    assert heads[:4] == ["step", "state", "size", "new"]
    cells = """[...document.querySelectorAll('#steps-table .list-row')].sort((a, b) => a.dataset.row - b.dataset.row)
        .map(row => [...row.children].slice(0, 4).map(cell => cell.textContent))"""
    new = [step.new_bytes for step in collect(shared).steps]
    assert new[0] == 64 * WORLD * 1024 + 150 * 256
    assert new[1:] == [150 * 256, 50 * 256, 50 * 256]
    rows = page.evaluate(cells)
    assert [row[3] for row in rows] == ["12.8 kB", "12.8 kB", "38.4 kB", "235 kB"]
    assert all(row[2].endswith("kB") and float(row[2].split()[0]) > 230 for row in rows)
    page.select_option("#step-select", label="400")
    assert "12.8 kB, written by this save" in soon(page.inner_text, "#step-details")
    assert "of 2 earlier saves, the oldest 3 saves ago" in soon(page.inner_text, "#step-details")
    page.select_option("#step-select", label="100")
    assert soon(lambda: "earlier save" not in page.inner_text("#step-details"))


def test_size_of_the_run_counts_shared_files_once(shared):
    files = {one.stat().st_ino: one.stat().st_size for one in shared.rglob("*") if one.is_file()}
    page = collect(shared)
    assert page.file_bytes == sum(files.values())
    for step in page.steps:
        folder = jobs.folder(shared, step.step)
        assert step.size_bytes == sum(one.stat().st_size for one in folder.rglob("*.safetensors"))
        assert (step.reused is None) == (step.step == 100)


def test_files_that_were_not_looked_up_are_not_guessed(show, shared):
    page = show(shared, ViewOptions(Budget(headers=WORLD)))
    assert page.evaluate("milepost.data.fileName(3, 0, 'frozen[0:64,0:256]')").startswith("data/")
    assert page.evaluate("milepost.data.fileName(1, 0, 'frozen[0:64,0:256]')").startswith("a file of rank 0, ")
    page.select_option("#step-select", label="200")
    page.click("#tab-layout")
    assert "Of earlier saves\nnot known" in soon(page.inner_text, "#layout-facts")


def test_page_that_follows_a_run_knows_the_files_of_new_steps(tmp_path):
    with milepost.Checkpointer(tmp_path, incremental=True) as keeper:
        made = Followed(tmp_path, ViewOptions(Budget(headers=1)))
        for step in (1, 2, 3, 4):
            keeper.save({"frozen": torch.ones(20_000), "step": step}, step)
            assert made.look()
    tables = [made.page.files[step.files].older for step in made.page.steps]
    assert [len(older) for older in tables] == [0, 1, 1, 1]
    assert all(older[0].entries for older in tables[1:]), "one header at each look"


def test_single_step_and_one_with_a_lost_file_are_shown(show, shared, tmp_path):
    place = shutil.copytree(jobs.folder(shared, 400), tmp_path / "one")
    assert collect(place).steps[0].reused.saves == 2
    names = files_in(place)
    page = show(place)
    told = page.evaluate("milepost.data.fileName(0, 0, 'frozen[0:64,0:256]')")
    assert told == names[0, "frozen[0:64,0:256]"]
    for one in place.rglob("00000.safetensors"):
        one.unlink()
    (tmp_path / "run").mkdir()
    place.rename(jobs.folder(tmp_path / "run", 400))
    [step] = collect(tmp_path / "run").steps
    assert (step.state, step.reused.saves) == ("damaged", 2)
