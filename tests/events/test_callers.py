"""Every call that saves, loads, verifies, converts or removes tells of itself, and by one operation."""

import logging
import threading
import time

import pytest
import torch

import milepost
from milepost import dcp, events
from milepost.planning import CheckpointReader, CheckpointWriter, DefaultLoadPlanner, DefaultSavePlanner
from milepost.testing import run_ranks
from tests.events.hearing import Heard, check_whole, listening, undisturbed

SIZE = 4 * 1000


def state():
    return {"w": torch.ones(1000), "n": 1}


def watching(kind):
    """A planner that needs the plans of all ranks."""
    return type("Watching", (kind,), {"create_global_plan": lambda self, plans: kind.create_global_plan(self, plans)})()


CALLS = {
    "save": (lambda p: milepost.save(state(), p / "new"), ["save"]),
    "async save": (lambda p: milepost.async_save(state(), p / "new").result(), ["save"]),
    "save with a planner": (lambda p: milepost.save(state(), p / "new", planner=DefaultSavePlanner()), ["save"]),
    "save with global plans": (
        lambda p: milepost.save(state(), p / "new", planner=watching(DefaultSavePlanner)),
        ["save"],
    ),
    "save with a writer": (lambda p: milepost.save(state(), storage_writer=CheckpointWriter(p / "new")), ["save"]),
    "load": (lambda p: milepost.load(state(), p / "a"), ["load"]),
    "load with a planner": (lambda p: milepost.load(state(), p / "a", planner=watching(DefaultLoadPlanner)), ["load"]),
    "load with a reader": (lambda p: milepost.load(state(), storage_reader=CheckpointReader(p / "a")), ["load"]),
    "load of DCP's format": (lambda p: milepost.load(state(), p / "dcp"), ["load"]),
    "verify": (lambda p: milepost.open(p / "a").verify(), ["verify"]),
    "dcp.save": (lambda p: dcp.save(state(), checkpoint_id=p / "new"), ["save"]),
    "dcp.load": (lambda p: dcp.load(state(), checkpoint_id=p / "a"), ["load"]),
    "dcp.async_save": (lambda p: dcp.async_save(state(), checkpoint_id=p / "new").result(), ["save"]),
    "dcp with a planner": (
        lambda p: dcp.save(state(), checkpoint_id=p / "new", planner=watching(dcp.DefaultSavePlanner)),
        ["save"],
    ),
    "convert to ours": (lambda p: milepost.convert(p / "dcp", p / "new"), ["convert"]),
    "convert to DCP's": (lambda p: milepost.convert(p / "a", p / "new", "dcp"), ["convert"]),
    "convert to a file": (lambda p: milepost.convert(p / "a", p / "new", "torch"), ["convert"]),
    "convert to safetensors": (
        lambda p: milepost.convert(p / "a", p / "new", "safetensors", drop_values=True),
        ["convert"],
    ),
    "copy": (lambda p: milepost.copy(p / "a", p / "new"), ["copy"]),
    "export": (lambda p: milepost.export_safetensors({"w": torch.ones(1000)}, p / "new"), ["convert"]),
    "keeper.save": (lambda p: milepost.Checkpointer(p / "run", keep_last=1).save(state(), 9), ["save", "remove"]),
    "keeper.restore": (lambda p: milepost.Checkpointer(p / "run").restore(state()), ["restore", "load"]),
    "keeper.remove": (lambda p: milepost.Checkpointer(p / "run").remove(3), ["remove"]),
    "keeper.remove_unfinished": (lambda p: milepost.Checkpointer(p / "run").remove_unfinished(), ["remove"]),
    "explain": (lambda p: milepost.explain(state(), p / "a"), []),
    "look inside": (lambda p: milepost.open(p / "a").state(), []),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A checkpoint of ours, one of DCP, and a run with a save that never finished."""
    folder = tmp_path_factory.mktemp("places")
    milepost.save(state(), folder / "a")
    milepost.convert(folder / "a", folder / "dcp", "dcp")
    milepost.save(state(), folder / "run/step-0000000003")
    milepost.save(state(), folder / "run/step-0000000005")
    next((folder / "run/step-0000000005").glob("manifest*")).unlink()
    return folder


@pytest.mark.filterwarnings("ignore")  # torch's own, of DCP's functions in one process
@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_one_operation(places, tmp_path, name, caplog):
    caplog.set_level(logging.INFO, "milepost")
    for kept in places.iterdir():
        milepost_copy(kept, tmp_path / kept.name)
    call, kinds = CALLS[name]
    with listening() as heard:
        call(tmp_path)
    for operation in heard.operations():
        check_whole(operation)
        assert operation[-1].ok
    assert [operation[0].kind for operation in heard.operations()] == kinds
    commits = heard.of(events.Committed)
    assert all(SIZE <= event.bytes <= SIZE + 1 for event in commits), "planners count values, too"
    assert bool(commits) == bool({"save", "convert", "copy"} & set(kinds))
    assert bool(heard.of(events.Removed)) == ("remove" in kinds and "unfinished" not in name)
    if kinds and kinds != ["remove"]:
        assert max(operation[-1].bytes for operation in heard.operations()) >= SIZE, "bytes are counted"
    lines = len([record for record in caplog.records if record.levelno == logging.INFO])
    assert lines == len(kinds) - ("restore" in kinds) - ("unfinished" in name), "one line of the log for each"
    milepost.close_async()


def milepost_copy(source, target):
    """Copy a folder, as an operator would."""
    target.mkdir()
    for path in source.rglob("*"):
        there = target / path.relative_to(source)
        there.mkdir(parents=True) if path.is_dir() else there.write_bytes(path.read_bytes())


def test_ranks_convert_and_export_as_one_operation_each(tmp_path):
    milepost.save(state(), tmp_path / "a")
    with listening() as heard:
        run_ranks(2, lambda comm: milepost.convert(tmp_path / "a", tmp_path / "b", "dcp", process_group=comm))
        tensors = {"w": torch.ones(9)}
        run_ranks(2, lambda comm: milepost.export_safetensors(tensors, tmp_path / "c", process_group=comm))
    found = [(one[0].kind, one[0].rank, one[0].world) for one in heard.operations()]
    assert sorted(found) == [("convert", 0, 2)] * 2 + [("convert", 1, 2)] * 2
    for operation in heard.operations():
        check_whole(operation)


def test_save_that_fails_while_its_call_still_waits_ends_last(tmp_path, monkeypatch):
    monkeypatch.setattr("milepost.events.operation._PATIENCE_S", 60.0)
    (tmp_path / "file").touch()
    with listening() as heard, milepost.AsyncSaver(staging_bytes=4096) as saver:
        for _ in range(4):
            with pytest.raises(milepost.StorageError):
                saver.save({"w": torch.ones(100_000)}, tmp_path / "file" / "x").result()
    assert len(heard.operations()) == 4
    for operation in heard.operations():
        check_whole(operation)


# ---- listeners that take their time, and many of them


def test_slow_listener_does_not_count_as_the_work_it_hears_of(tmp_path):
    short, each_s = ("opening", "comparing", "reading"), 0.3

    def slow(event):
        time.sleep(each_s * (getattr(event, "phase", "") in short))

    def look(attempt):
        with listening() as heard, events.listen(slow):
            milepost.save(state(), tmp_path / str(attempt))
            milepost.load(state(), tmp_path / str(attempt))
        assert milepost.open(tmp_path / str(attempt)).verify().ok
        return heard.operations()

    def longest(operations):
        """How long these phases took. One event of them that counted would be as long as `each_s`."""
        return max(sum(seconds for name, seconds in one[-1].phases.items() if name in short) for one in operations)

    milepost.save(state(), tmp_path / "warm")
    operations = undisturbed(look, lambda found: longest(found) < each_s)
    save, load = operations
    heard = sum(getattr(event, "phase", "") in short for event in load)
    assert heard >= 2 * len(short)
    assert load[-1].seconds > each_s * heard
    assert longest([save, load]) < each_s


def test_a_hundred_listeners_hear_the_same_in_the_same_order(tmp_path):
    everyone = [Heard() for _ in range(100)]
    subscriptions = [events.listen(heard) for heard in everyone]
    try:
        milepost.save(state(), tmp_path)
    finally:
        for subscription in subscriptions:
            subscription.close()
    assert all(heard == everyone[0] for heard in everyone)
    assert len(everyone[0].operations()) == 1


def test_listener_that_loads_and_closes_itself_hears_no_more(tmp_path):
    milepost.save(state(), tmp_path / "a")
    heard, target = [], state()

    def once(event):
        heard.append(event)
        if isinstance(event, events.PhaseStarted):
            subscription.close()
            milepost.load(target, tmp_path / "a")

    with listening() as other:
        subscription = events.listen(once)
        milepost.save(state(), tmp_path / "b")
    assert [type(event).__name__ for event in heard] == ["Started", "PhaseStarted"]
    assert sorted(one[0].kind for one in other.operations()) == ["load", "save"]


def test_events_of_a_thread_come_in_that_thread(tmp_path):
    names = set()
    with events.listen(lambda event: names.add((event.kind, threading.current_thread().name))):
        thread = threading.Thread(target=lambda: milepost.save(state(), tmp_path), name="mine")
        thread.start()
        thread.join()
    assert names == {("save", "mine")}
