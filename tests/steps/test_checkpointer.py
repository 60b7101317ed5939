"""Steps: the newest whole one is restored on all ranks, old ones go by the rules, and nothing that counts is ever lost."""

import logging
import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import milepost
from milepost import CheckpointDamaged, Checkpointer, CheckpointNotFound, InvalidRequest, StateMismatch, StorageError
from milepost.commit.attempt import take_aim
from milepost.commit.find import REMOVED
from milepost.commit.removal import finish_removal, remove_checkpoint
from milepost.core.layout import Cut, Grid, Mesh
from milepost.core.manifest import manifest_name, shard_name
from milepost.steps.retention import Rule
from milepost.steps.shelf import MAX_STEP, Shelf, step_name
from milepost.store import LocalStore, MemoryStore, Within
from milepost.testing import CountingStore, Crash, CrashingStore, run_ranks
from tests.ranks import spawn


def state(number):
    return {"a": torch.full((3, 5), float(number)), "b": {"c": torch.full((7,), number)}, "n": number}


def holds(found, number):
    return bool((found["a"] == number).all() and (found["b"]["c"] == number).all()) and found["n"] == number


def places(tmp_path, kind):
    return LocalStore(tmp_path / "run") if kind == "local" else MemoryStore("memory://run")


def files_of(root, step):
    return sorted((Path(root) / step_name(step)).rglob("*.safetensors"))


def flip(path):
    """Change one byte of the data; the size stays."""
    data = bytearray(path.read_bytes())
    header = int.from_bytes(data[:8], "little") + 8
    data[header] ^= 1
    path.write_bytes(data)


# ---- saving and restoring


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_what_was_saved_last_is_restored_and_its_step_given(tmp_path, kind):
    keeper = Checkpointer(places(tmp_path, kind))
    for step in (2, 10, 9):
        receipt = keeper.save(state(step), step, metrics={"loss": torch.tensor(0.5)}, metadata={"note": "x"})
    assert receipt.url.endswith("run/step-0000000009")
    found = state(0)
    assert keeper.restore(found) == 10
    assert holds(found, 10)
    assert keeper.restore(found, step=np.int64(2)) == 2
    assert holds(found, 2)
    assert (keeper.steps(), keeper.latest()) == ([2, 9, 10], 10)
    with keeper.open() as newest, keeper.open(9) as older:
        assert newest.metadata == {"note": "x", "metrics": {"loss": 0.5}}
        assert older["n"] == 9


def test_where_nothing_was_saved_the_default_is_given_or_an_error_says_so(tmp_path):
    keeper = Checkpointer(tmp_path / "none")
    assert keeper.restore(state(0), default=0) == 0
    assert (keeper.steps(), keeper.latest()) == ([], None)
    with pytest.raises(CheckpointNotFound, match=r"nothing was saved at .*none yet"):
        keeper.restore(state(0))
    with pytest.raises(CheckpointNotFound, match="nothing was saved"):
        keeper.open()
    keeper.save(state(4), 4)
    with pytest.raises(CheckpointNotFound, match=r"no step 7 at .* there are: 4"):
        keeper.restore(state(0), step=7, default=0)


def test_a_step_that_exists_is_replaced_unless_that_is_refused(tmp_path):
    keeper = Checkpointer(tmp_path)
    keeper.save(state(1), 1)
    assert keeper.save(state(2), 1).generation == 2
    with pytest.raises(InvalidRequest, match="overwrite=True"):
        keeper.save(state(3), 1, overwrite=False)
    found = state(0)
    assert keeper.restore(found) == 1
    assert holds(found, 2)


def test_from_the_second_save_on_there_is_no_planning(tmp_path):
    planned = []

    def work(comm):
        keeper = Checkpointer(tmp_path, process_group=comm)
        for step in (1, 2, 3):
            keeper.save(state(step), step)

    run_ranks(2, work, trouble={1: {"describing the state": lambda: planned.append(1)}})
    assert planned == [1]


def test_options_go_to_every_call_that_has_them(tmp_path):
    seen = []
    keeper = Checkpointer(tmp_path, progress=lambda p: seen.append(p.action), convert_dtype=True, on_difference="warn")
    keeper.save({"w": torch.ones(3)}, 1)
    assert keeper.restore({"w": torch.ones(3, dtype=torch.float64)}) == 1
    assert set(seen) == {"save", "load"}
    with pytest.raises(StateMismatch):
        keeper.restore({"w": torch.ones(3, dtype=torch.float64)}, convert_dtype=False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep_last": 0}, "keep_last is a whole number from 1"),
        ({"keep_last": True}, "keep_last"),
        ({"keep_every": -5}, "keep_every"),
        ({"keep_best": 1.5, "best": "loss"}, "keep_best"),
        ({"keep_best": 2}, "keep_best needs the name of a metric"),
        ({"best": "loss", "mode": "largest"}, 'mode is "min" or "max"'),
        ({"colour": 1}, "colour: no option for every save and load"),
        ({"plans": None}, "plans"),
        ({"planner": None}, "pass it to `save` or `restore`"),
    ],
)
def test_wrong_rules_and_options_are_refused(tmp_path, options, text):
    with pytest.raises(InvalidRequest, match=text):
        Checkpointer(tmp_path, **options)


def test_wrong_calls_are_refused_and_leave_nothing(tmp_path):
    keeper = Checkpointer(tmp_path)
    for step in (-1, MAX_STEP + 1, 1.0, "1", True, None):
        with pytest.raises(InvalidRequest, match="a step is a whole number from 0"):
            keeper.save(state(1), step)
    for metrics in ({"loss": "low"}, {"loss": torch.ones(2)}, {3: 1.0}):
        with pytest.raises(InvalidRequest, match="metric"):
            keeper.save(state(1), 1, metrics=metrics)
    with pytest.raises(InvalidRequest, match="pass `metrics=`"):
        keeper.save(state(1), 1, metadata={"metrics": {}})
    with pytest.raises(InvalidRequest, match="allow_missing: no option for a save"):
        keeper.save(state(1), 1, allow_missing=True)
    with pytest.raises(InvalidRequest, match="a step is a whole number"):
        keeper.restore(state(0), step=-3)
    with pytest.raises(InvalidRequest, match="which metric"):
        keeper.best()
    with pytest.raises(InvalidRequest, match="put it into a dict"):
        keeper.restore((torch.ones(1), 0))
    assert list(tmp_path.iterdir()) == []


def test_a_closed_one_refuses_calls(tmp_path):
    with Checkpointer(tmp_path) as keeper:
        keeper.save(state(1), 1)
        keeper.wait()
    keeper.close()
    for call in (keeper.steps, keeper.latest, keeper.wait, lambda: keeper.save(state(2), 2)):
        with pytest.raises(InvalidRequest, match="is closed"):
            call()


def test_foreign_folders_are_ignored_and_never_touched(tmp_path):
    names = ["notes", "step-abc", "step-5", "step-00000000001", "step-0000000001.bak", "tensorboard"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest-00000001.json").write_text("mine")
    (tmp_path / "step-0000000007").write_text("a file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step-0000000008").symlink_to(tmp_path / "elsewhere")
    keeper = Checkpointer(tmp_path, keep_last=1)
    for step in (1, 2, 3):
        keeper.save(state(step), step)
    assert keeper.steps() == [3]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [*names, "step-0000000007", "step-0000000008", "elsewhere", "step-0000000003"]
    )
    for name in names:
        assert (tmp_path / name / "manifest-00000001.json").read_text() == "mine"


# ---- damage


def test_damaged_steps_are_skipped_with_a_warning_that_says_why(tmp_path, caplog):
    keeper = Checkpointer(tmp_path)
    for step in (1, 2, 3, 4, 5):
        keeper.save(state(step), step)
    flip(files_of(tmp_path, 2)[0])
    files_of(tmp_path, 3)[0].unlink()
    manifest = tmp_path / step_name(4) / manifest_name(1)
    manifest.write_bytes(manifest.read_bytes()[:-9])
    (tmp_path / step_name(5) / manifest_name(1)).unlink()
    found = state(0)
    with caplog.at_level(logging.WARNING, "milepost"):
        assert keeper.restore(found) == 1
    assert holds(found, 1)
    texts = [record.getMessage() for record in caplog.records]
    assert [step_name(s) in t for s, t in zip((4, 3, 2), texts, strict=True)] == [True] * 3
    assert "is damaged" in texts[0]
    assert "is missing" in texts[1]
    assert "not what was saved" in texts[2]
    with pytest.raises(CheckpointDamaged, match="not what was saved"):
        keeper.restore(found, step=2)


def test_where_no_step_is_whole_all_reasons_are_raised(tmp_path):
    keeper = Checkpointer(tmp_path)
    for step in (1, 2):
        keeper.save(state(step), step)
        flip(files_of(tmp_path, step)[0])
    with pytest.raises(CheckpointDamaged, match=r"(?s)no step at .* is whole.*step 2: .*step 1: "):
        keeper.restore(state(0), default=0)


def test_a_state_that_does_not_fit_is_an_error_and_not_a_reason_to_go_back(tmp_path):
    keeper = Checkpointer(tmp_path)
    keeper.save({"a": torch.zeros(3)}, 1)
    keeper.save({"b": torch.zeros(3)}, 2)
    with pytest.raises(StateMismatch):
        keeper.restore({"a": torch.ones(3)})


@pytest.mark.parametrize("options", [{"verify_first": True}, {"allow_missing": True}])
def test_with_verify_first_a_damaged_step_leaves_nothing_in_the_state(tmp_path, options):
    keeper = Checkpointer(tmp_path)
    keeper.save({"a": torch.full((50_000,), 1.0)}, 1)
    keeper.save({"a": torch.full((50_000,), 2.0), "b": torch.full((50_000,), 2.0)}, 2)
    path = files_of(tmp_path, 2)[0]
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1  # in one of the last blocks: the first ones would be loaded
    path.write_bytes(data)
    found = {"a": torch.zeros(50_000), "b": torch.zeros(50_000)}
    if "allow_missing" not in options:
        with pytest.raises(CheckpointDamaged, match="damaged blocks"):
            keeper.restore(found, step=2, **options)
        assert not found["a"].any()
        assert not found["b"].any()
        return
    assert keeper.restore(found, **options) == 1
    assert (found["a"] == 1).all()
    assert not found["b"].any(), "nothing of step 2 is left in it"


# ---- which steps are kept


@given(
    scores=st.dictionaries(
        st.integers(0, 60),
        st.none() | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1.0, 1.5, -3.0]),
        max_size=20,
    ),
    last=st.none() | st.integers(1, 5),
    every=st.none() | st.integers(1, 9),
    best=st.none() | st.integers(1, 4),
    mode=st.sampled_from(["min", "max"]),
)
def test_the_rules_keep_what_a_step_by_step_reading_of_them_keeps(scores, last, every, best, mode):
    def better(one, other):
        """Whether `one` goes before `other`."""
        a, b = scores[one], scores[other]
        return (a < b if mode == "min" else a > b) or (a == b and one > other)

    ranked = [s for s, v in scores.items() if v is not None and v == v]
    expected = set()
    for step in scores:
        newer = sum(other > step for other in scores)
        if newer < (last if last is not None else 1):
            expected.add(step)
        if every is not None and step % every == 0:
            expected.add(step)
        if best is not None and step in ranked and sum(better(o, step) for o in ranked if o != step) < best:
            expected.add(step)
        if last is every is best is None:
            expected.add(step)
    assert Rule(last, every, best, "loss", mode).kept(scores) == expected


@settings(max_examples=40, deadline=None)
@given(
    saves=st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from([None, math.nan, 1.0, 2.0, 3.0])), min_size=1, max_size=8
    ),
    last=st.none() | st.integers(1, 3),
    every=st.none() | st.integers(1, 5),
    best=st.none() | st.integers(1, 2),
)
def test_a_run_of_saves_leaves_what_the_rules_say(saves, last, every, best):
    keeper = Checkpointer(MemoryStore(), keep_last=last, keep_every=every, keep_best=best, best="loss")
    there = {}
    for step, loss in saves:
        keeper.save({"n": step}, step, metrics=None if loss is None else {"loss": loss})
        there[step] = loss
        kept = Rule(last, every, best, "loss").kept(there) | {step}
        there = {s: v for s, v in there.items() if s in kept}
        assert keeper.steps() == sorted(there)
    known = {s: v for s, v in there.items() if v is not None and v == v}
    assert keeper.best() == min(known, key=lambda s: (known[s], -s), default=None)
    for step in there:
        with keeper.open(step) as checkpoint:
            assert checkpoint["n"] == step


def test_metrics_are_read_from_the_checkpoints_by_a_new_job(tmp_path):
    Checkpointer(tmp_path).save(state(1), 1, metrics={"acc": 0.9})
    Checkpointer(tmp_path).save(state(2), 2, metrics={"acc": math.nan})
    milepost.save(state(3), tmp_path / step_name(3), metadata={"metrics": "somebody else's"})
    keeper = Checkpointer(tmp_path, keep_best=1, best="acc", mode="max")
    keeper.save(state(4), 4, metrics={"acc": 0.1})
    assert keeper.steps() == [1, 4]
    assert keeper.best() == 1


def test_metrics_that_are_no_numbers_of_ours_do_not_count(tmp_path):
    for step, loss in enumerate(("1_0", "٣", b"1", 10**400), start=1):
        milepost.save(state(step), tmp_path / step_name(step), metadata={"metrics": {"loss": loss}})
    keeper = Checkpointer(tmp_path, keep_best=1, best="loss")
    assert keeper.best() is None
    keeper.save(state(9), 9, metrics={"loss": 2.0})
    assert (keeper.steps(), keeper.best()) == ([9], 9)


def test_a_run_that_goes_back_keeps_what_it_saves_and_can_remove_what_lies_ahead(tmp_path):
    keeper = Checkpointer(tmp_path, keep_last=1)
    keeper.save(state(100), 100)
    keeper.save(state(60), 60)
    assert keeper.steps() == [60, 100], "what was just saved is kept, though it is not the newest"
    keeper.remove(100)
    assert keeper.restore(state(0)) == 60
    assert [p.name for p in tmp_path.iterdir()] == [step_name(60)]
    with pytest.raises(CheckpointNotFound):
        keeper.remove(100)


def test_nothing_is_removed_in_favour_of_a_step_that_is_not_whole(tmp_path, caplog):
    keeper = Checkpointer(tmp_path, keep_last=1)
    keeper.save(state(9), 9)
    files_of(tmp_path, 9)[0].unlink()
    everything = Checkpointer(tmp_path)
    for step in (1, 2, 3):
        everything.save(state(step), step)
    with caplog.at_level(logging.WARNING, "milepost"):
        keeper.save(state(4), 4)
        keeper.save(state(5), 5)
    assert keeper.steps() == [5, 9], "9 does not count, and is left for somebody to look at"
    assert sum("does not count" in r.getMessage() for r in caplog.records) == 1, "told once"
    assert keeper.restore(state(0)) == 5


def test_a_save_whose_files_vanish_at_once_is_an_error_and_removes_nothing(tmp_path):
    class Losing(CountingStore):
        """Loses the data of step 2 when its manifest appears."""

        def after(self, number, call):
            if call.startswith(f"create {step_name(2)}/manifest"):
                for path in files_of(tmp_path, 2):
                    path.unlink()

    keeper = Checkpointer(Losing(LocalStore(tmp_path)), keep_last=1)
    keeper.save(state(1), 1)
    with pytest.raises(CheckpointDamaged, match=r"just committed is not whole: .* is missing"):
        keeper.save(state(2), 2)
    found = state(0)
    assert keeper.restore(found) == 1
    assert holds(found, 1)


def test_a_save_whose_files_are_cut_short_at_once_is_an_error_and_removes_nothing(tmp_path):
    class Cutting(CountingStore):
        """Takes the last byte of the data of step 2 when its manifest appears."""

        def after(self, number, call):
            if call.startswith(f"create {step_name(2)}/manifest"):
                for path in files_of(tmp_path, 2):
                    path.write_bytes(path.read_bytes()[:-1])

    keeper = Checkpointer(Cutting(LocalStore(tmp_path)), keep_last=1)
    keeper.save(state(1), 1)
    with pytest.raises(CheckpointDamaged, match=r"just committed is not whole: .* and was saved with"):
        keeper.save(state(2), 2)
    assert keeper.steps() == [1, 2]


def test_a_store_that_does_not_answer_says_nothing_about_a_step_and_nothing_is_removed(caplog):
    class Silent(CountingStore):
        """Does not answer who looks at the data of step 9."""

        def before(self, number, call):
            if call.startswith(f"reader {step_name(9)}/data"):
                raise StorageError("no answer")

    store = MemoryStore()
    for step in (1, 2, 9):
        Checkpointer(store).save(state(step), step)
    Checkpointer(Silent(store), keep_last=1).save(state(3), 3)
    assert Checkpointer(store).steps() == [1, 2, 3, 9]
    assert "the next save will: no answer" in caplog.text


def test_a_step_with_an_unreadable_manifest_is_left_alone(tmp_path, caplog):
    keeper = Checkpointer(tmp_path, keep_last=1)
    keeper.save(state(1), 1)
    (tmp_path / step_name(1) / manifest_name(1)).write_text("{}")
    keeper.save(state(2), 2)
    keeper.save(state(3), 3)
    assert keeper.steps() == [1, 3]
    assert len(files_of(tmp_path, 1)) == 1
    assert sum("could not be removed" in r.getMessage() for r in caplog.records) == 1


# ---- removal is safe


def leftovers(store, steps):
    """What lies in folders of steps other than these, or beside the checkpoints in them."""
    found = [name for name in store.list("") if name.split("/")[0] not in {step_name(s) for s in steps}]
    return found + [name for name in store.list("") if REMOVED in name]


@pytest.mark.parametrize("kind", ["memory", "local"])
@pytest.mark.parametrize("after", [False, True])
def test_a_removal_that_is_cut_short_at_any_call_harms_nothing_and_is_finished_later(tmp_path, kind, after):
    def fresh(number):
        store = MemoryStore() if kind == "memory" else LocalStore(tmp_path / f"{number}")
        keeper = Checkpointer(store)
        for step in (1, 2, 3):
            keeper.save(state(step), step)
        milepost.save(state(2), Within(store, step_name(2)))  # a second generation
        return store

    counting = CountingStore(fresh("count"))
    assert Shelf(counting).retain(Rule(keep_last=1), 3) == [1, 2]
    assert counting.calls > 15
    for at in range(1, counting.calls + 1):
        store = fresh(at)
        with pytest.raises(Crash):
            Shelf(CrashingStore(store, at, after=after)).retain(Rule(keep_last=1), 3)
        keeper = Checkpointer(store, keep_last=1)
        for step in keeper.steps():
            found = state(0)
            assert keeper.restore(found, step=step) == step, "what is still a checkpoint is a whole one"
            assert holds(found, step)
        assert 3 in keeper.steps()
        keeper.save(state(4), 4)
        assert keeper.steps() == [4]
        assert leftovers(store, [4]) == []
        if kind == "local":
            assert [p.name for p in (tmp_path / f"{at}").iterdir()] == [step_name(4)], "folders go, too"


@pytest.mark.parametrize("after", [False, True])
def test_a_save_that_dies_at_any_call_leaves_the_kept_steps_whole(after):
    def fresh():
        store = MemoryStore()
        Checkpointer(store, keep_last=2).save(state(1), 1)
        Checkpointer(store, keep_last=2).save(state(2), 2)
        return store

    counting = CountingStore(fresh())
    Checkpointer(counting, keep_last=2).save(state(3), 3)
    newest = set()
    for at in range(1, counting.calls + 1):
        store = fresh()
        with pytest.raises(Crash):
            Checkpointer(CrashingStore(store, at, after=after), keep_last=2).save(state(3), 3)
        keeper = Checkpointer(store, keep_last=2)
        found = state(0)
        newest.add(step := keeper.restore(found))
        assert holds(found, step)
        keeper.save(state(3), 3)
        assert keeper.steps() == [2, 3]
        assert leftovers(store, [2, 3]) == []
    assert newest == {2, 3}


def test_an_older_generation_that_was_not_swept_does_not_come_to_light():
    place = MemoryStore()
    milepost.save(state(1), place)
    first = dict(place.objects)
    milepost.save(state(2), place)
    place.objects.update(first)  # as if the sweep of the second save had been cut short
    remove_checkpoint(place)
    assert place.objects == {}


def test_a_step_stays_where_an_older_generation_of_it_cannot_be_swept():
    class Stuck(CountingStore):
        def before(self, number, call):
            if call == f"delete {manifest_name(1)}":
                raise StorageError("cannot delete")

    place = Stuck(MemoryStore())
    for number in (1, 2):
        milepost.save(state(number), place)
    with pytest.raises(StorageError, match="older manifests there cannot be deleted; it stays"):
        remove_checkpoint(place)
    assert holds(milepost.open(place).state(), 2)
    assert not [name for name in place.list("manifest-") if name.endswith(REMOVED)]


def test_a_save_under_way_is_never_touched(tmp_path):
    """It has a folder without a manifest, as a removal that was cut short has; only the marker tells them apart."""
    keeper = Checkpointer(tmp_path, keep_last=1)

    class Slow(CountingStore):
        """Runs other saves, with their removals, before its own manifest is published."""

        def before(self, number, call):
            if call.startswith("create manifest"):
                for step in (6, 7, 8):
                    keeper.save(state(step), step)

    milepost.save(state(5), Slow(LocalStore(tmp_path / step_name(5))))
    assert keeper.steps() == [5, 8]
    with keeper.open(5) as checkpoint:
        assert checkpoint.verify().ok


@pytest.mark.parametrize("moment", ["marked", "manifest gone", "data gone"])
def test_a_save_into_a_step_that_is_being_removed_loses_nothing(moment):
    store = MemoryStore()
    place = Within(store, step_name(5))
    milepost.save(state(1), place)
    removed = milepost.open(place).manifest
    marker = manifest_name(1) + REMOVED
    place.create(marker, removed.save_id.encode())
    if moment != "marked":
        place.delete(manifest_name(1))
    if moment == "data gone":
        place.delete(shard_name(removed.save_id, 0))
    assert take_aim(place)[0] == 2, "the number that is being removed is not used again"

    class Meanwhile(CountingStore):
        """The removal is finished while this save is about to commit."""

        def before(self, number, call):
            if call.startswith("create"):
                finish_removal(place, [marker])

    milepost.save(state(2), Meanwhile(place))
    finish_removal(place, [marker])  # another remover, that comes late
    assert holds(milepost.open(place).state(), 2)
    assert milepost.open(place).verify().ok
    assert not [name for name in store.list("") if removed.save_id in name or REMOVED in name]


def test_a_late_remover_does_not_take_another_saves_manifest():
    """Its marker and the manifest are of one generation, but not of one save."""
    place = MemoryStore()
    milepost.save(state(1), place)
    marker = manifest_name(1) + REMOVED
    old = milepost.open(place).manifest.save_id
    remove_checkpoint(place)
    milepost.save(state(2), place)
    place.create(marker, old.encode())
    finish_removal(place, [marker])
    assert holds(milepost.open(place).state(), 2)


def test_a_marker_that_is_none_of_ours_is_left_alone(tmp_path, caplog):
    keeper = Checkpointer(tmp_path, keep_last=5)
    keeper.save(state(1), 1)
    (tmp_path / step_name(1) / (manifest_name(1) + REMOVED)).write_text("../../x")
    keeper.save(state(2), 2)
    assert keeper.steps() == [1, 2]
    assert "not a marker of Milepost" in caplog.text


def test_a_removal_is_finished_though_its_manifest_cannot_be_read_any_more():
    """It would be listed, without its data: and the marker says that it was to go."""
    place = MemoryStore()
    milepost.save(state(1), place)
    marker = manifest_name(1) + REMOVED
    place.create(marker, milepost.open(place).manifest.save_id.encode())
    place.objects[manifest_name(1)] = b"{}"
    finish_removal(place, [marker])
    assert place.objects == {}


def test_who_opens_a_step_that_is_being_removed_is_told():
    place = MemoryStore()
    milepost.save(state(1), place)
    marker = manifest_name(1) + REMOVED
    place.create(marker, milepost.open(place).manifest.save_id.encode())
    reader = milepost.open(place)
    place.delete(manifest_name(1))
    with pytest.raises(CheckpointNotFound, match="It was removed"):
        milepost.open(place)
    finish_removal(place, [marker])
    with pytest.raises(CheckpointDamaged, match="removed or replaced"):
        reader["a"].read()


def test_an_open_file_reads_on_after_the_removal(tmp_path):
    milepost.save(state(1), tmp_path / "x")
    with milepost.open(tmp_path / "x") as checkpoint:
        checkpoint["a"][0]  # opens the file
        remove_checkpoint(LocalStore(tmp_path / "x"))
        assert holds(checkpoint.state(), 1)


def test_a_root_never_looks_empty_while_a_newer_step_takes_the_place_of_the_only_one(tmp_path):
    keeper = Checkpointer(tmp_path, keep_last=1)
    keeper.save(state(1), 1)

    class Overtaken(LocalStore):
        """Between the list of folders and the look into the first, a newer step is saved and the older one removed."""

        def list(self, prefix):
            if keeper.latest() < 4:
                keeper.save(state(4), keeper.latest() + 1)
            return super().list(prefix)

    assert Checkpointer(Overtaken(tmp_path)).latest() == 4


def test_readers_see_whole_checkpoints_while_steps_come_and_go(tmp_path):
    keeper = Checkpointer(tmp_path, keep_last=1)
    keeper.save(state(0), 0)
    done, problems = threading.Event(), []
    opened, gone = [0], [0]

    def read():
        reader = Checkpointer(tmp_path)
        while not done.is_set():
            step = reader.latest()
            if step is None:
                problems.append("there was no step at all")
                continue
            try:
                with reader.open(step) as checkpoint:
                    if not holds(checkpoint.state(), step):
                        problems.append(f"wrong data at {step}")
                opened[0] += 1
            except CheckpointNotFound:
                gone[0] += 1
            except CheckpointDamaged as error:
                gone[0] += 1
                if "removed or replaced" not in str(error):
                    problems.append(str(error))
            except BaseException as error:
                problems.append(repr(error))

    def restore():
        reader, last = Checkpointer(tmp_path), -1
        while not done.is_set():
            found = state(0)
            try:
                step = reader.restore(found)
                if step < last or not holds(found, step):
                    problems.append(f"restored {step} after {last}: {found}")
                last = step
            except CheckpointDamaged as error:
                if "removed or replaced" not in str(error) and "no checkpoint" not in str(error):
                    problems.append(str(error))
            except BaseException as error:
                problems.append(repr(error))

    threads = [threading.Thread(target=read), threading.Thread(target=restore)]
    for thread in threads:
        thread.start()
    step = 0
    while opened[0] < 300 and step < 3000 and not problems:
        step += 1
        keeper.save(state(step), step)
    done.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert opened[0] >= 300
    assert keeper.steps() == [step]


# ---- several ranks

GRID = {world: Grid(Mesh.of((world,), range(world)), (Cut(0),)) for world in (1, 2, 3)}


def sharded(number, rank, world):
    (piece,) = GRID[world].pieces((6, 4), rank)
    local = torch.full(piece.box.shape, float(number))
    return {"w": milepost.Sharded.on_grid((6, 4), local, GRID[world], rank), "n": number}, local


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_save_remove_and_restore_the_same_steps(tmp_path, world):
    def work(comm):
        keeper = Checkpointer(tmp_path, keep_last=2, keep_best=1, best="loss", process_group=comm)
        assert keeper.restore(sharded(0, comm.rank, world)[0], default=-1) == -1
        for step in range(1, 6):
            metrics = {"loss": abs(step - 2)} if comm.rank == comm.coordinator else None
            keeper.save(sharded(step, comm.rank, world)[0], step, metrics=metrics)
            assert keeper.latest() == step
        assert keeper.steps() == [2, 4, 5]
        found, local = sharded(0, comm.rank, world)
        return keeper.restore(found), found["n"], set(local.flatten().tolist()), keeper.best()

    assert run_ranks(world, work) == [(5, 5, {5.0}, 2)] * world


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("verify_first", [False, True])
def test_damage_in_one_ranks_file_takes_all_ranks_to_the_same_older_step(tmp_path, world, verify_first):
    def save(comm):
        keeper = Checkpointer(tmp_path, process_group=comm)
        for step in (1, 2, 3):
            keeper.save(sharded(step, comm.rank, world)[0], step)

    def restore(comm):
        keeper = Checkpointer(tmp_path, process_group=comm)
        found, local = sharded(0, comm.rank, world)
        step = keeper.restore(found, verify_first=verify_first)
        with pytest.raises(CheckpointDamaged):
            keeper.restore(sharded(0, comm.rank, world)[0], step=3)
        return step, found["n"], set(local.flatten().tolist())

    run_ranks(world, save)
    flip(files_of(tmp_path, 3)[-1])
    files_of(tmp_path, 2)[0].unlink()
    assert run_ranks(world, restore) == [(1, 1, {1.0})] * world


def test_errors_reach_all_ranks(tmp_path):
    def work(comm):
        keeper = Checkpointer(tmp_path, process_group=comm)
        errors = []
        for call in (
            lambda: keeper.save(state(1), 1, metrics={"loss": "low"} if comm.rank == comm.coordinator else None),
            lambda: keeper.restore(state(0)),
            lambda: keeper.remove(3),
            lambda: keeper.restore(state(0), step=3),
        ):
            with pytest.raises(milepost.CheckpointError) as caught:
                call()
            errors.append(type(caught.value))
        keeper.save(state(1), 1)
        return errors

    expected = [InvalidRequest, CheckpointNotFound, CheckpointNotFound, CheckpointNotFound]
    assert run_ranks(2, work, timeout_s=10) == [expected] * 2


def test_what_the_ranks_say_to_each_other_does_not_pile_up(tmp_path):
    boards = {}

    def work(comm):
        boards[comm.rank] = comm._board
        keeper = Checkpointer(tmp_path, keep_last=1, process_group=comm)
        counts = []
        for step in range(6):
            keeper.save(state(step), step)
            counts.append(len(comm._board._notes))
        return counts

    counts = run_ranks(2, work)
    assert len(boards[0]._notes) < 6, counts


def real_work(rank, root):
    keeper = Checkpointer(root, keep_last=2)
    for step in (10, 20, 30):
        keeper.save(sharded(step, rank, 2)[0], step)
    if rank == 0:
        flip(files_of(root, 30)[1])
    torch.distributed.barrier()
    found, local = sharded(0, rank, 2)
    return keeper.restore(found), found["n"], set(local.flatten().tolist()), keeper.steps()


def test_real_ranks_fall_back_to_the_same_step(tmp_path):
    assert spawn(2, real_work, str(tmp_path)) == [(20, 20, {20.0}, [20, 30])] * 2


# ---- planners, storage, and who decides


class Doubling(milepost.planning.DefaultSavePlanner):
    """Takes part in the global plan, and counts."""

    plans = 0

    def create_global_plan(self, all_plans):
        type(self).plans += 1
        return super().create_global_plan(all_plans)

    def transform_object(self, write_item, object):  # noqa: A002
        found = super().transform_object(write_item, object)
        return found if write_item.tensor_data is None else found * 2


class Halving(milepost.planning.DefaultLoadPlanner):
    def commit_tensor(self, read_item, tensor):
        tensor.div_(2)


def test_planners_and_another_coordinator_are_used_for_every_step(tmp_path):
    Doubling.plans = 0

    def run(comm):
        state = {"w": torch.full((3,), 7.0), "step": 1}
        board = comm._board
        other = milepost.testing.ranks.BoardComm(board, comm.rank, comm.size, 60.0, coordinator=1)
        keeper = milepost.Checkpointer(
            tmp_path, keep_last=1, process_group=other, save_planner=Doubling(), load_planner=Halving()
        )
        keeper.save(state, 1)
        keeper.save(state, 2)
        target = {"w": torch.zeros(3), "step": 0}
        assert keeper.restore(target) == 2
        assert torch.equal(target["w"], state["w"])
        assert keeper.steps() == [2]

    run_ranks(2, run)
    assert Doubling.plans == 2
    assert torch.equal(milepost.open(tmp_path / "step-0000000002")["w"].read(), torch.full((3,), 14.0))


def test_a_checkpointer_of_storage_saves_and_loads_with_what_it_was_given(tmp_path):
    keeper = milepost.StorageCheckpointer(
        milepost.planning.CheckpointWriter(tmp_path),
        milepost.planning.CheckpointReader(tmp_path),
        no_dist=True,
        save_planner=Doubling(),
        load_planner=Halving(),
    )
    for number in (3.0, 4.0):
        state = {"w": torch.full((3,), number), "n": int(number)}
        assert keeper.save(state).url == str(tmp_path)
        found = keeper.load({"w": torch.zeros(3), "n": 0})
        assert torch.equal(found["w"], state["w"])
        assert found["n"] == int(number)


@pytest.mark.parametrize("metrics", [{"loss": 10**400}, ["loss"]])
def test_metrics_that_are_none_are_refused_on_all_ranks(tmp_path, metrics):
    def work(comm):
        keeper = milepost.Checkpointer(tmp_path, process_group=comm)
        with pytest.raises(milepost.CheckpointError, match="rank 0"):
            keeper.save({"a": torch.ones(2)}, 1, metrics=metrics if comm.rank == 0 else None)
        keeper.save({"a": torch.ones(2)}, 2)

    run_ranks(2, work, timeout_s=20)
