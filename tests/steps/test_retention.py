"""Which steps are kept: the rules, metrics, and steps that are not whole."""

import logging
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import milepost
from milepost import CheckpointDamaged, Checkpointer, CheckpointNotFound, StorageError
from milepost.core.manifest import manifest_name
from milepost.steps.retention import Rule
from milepost.steps.shelf import step_name
from milepost.store import LocalStore, MemoryStore
from milepost.testing import CountingStore
from tests.steps.numbered import files_of, holds, state


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


def test_run_that_goes_back_keeps_its_saves_and_can_drop_later_ones(tmp_path):
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
    assert keeper.steps() == [5, 9], "9 does not count, and is kept for inspection"
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


def test_save_with_truncated_files_fails_and_removes_nothing(tmp_path):
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


def test_nothing_is_removed_while_the_store_does_not_answer(caplog):
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
