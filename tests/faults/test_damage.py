"""Damage, foreign files, hostile folders and wrong targets: every trial ends well, and a bad ending is noticed."""

from functools import partial

import pytest

import milepost
from faults import damage, targets


@pytest.mark.slow
def test_every_fault_is_met_as_promised_and_dcp_ran_beside_it(tmp_path):
    rows = {row.number: row for module in (damage, targets) for row in module.rows(False, tmp_path)}
    assert list(rows) == [13, 14, 15, 16, 18, 23]
    assert {number: row.milepost.counts for number, row in rows.items() if not row.ok} == {}
    assert all(row.dcp.trials >= 10 for row in rows.values())
    assert rows[16].milepost.trials >= 3
    assert rows[23].milepost.trials >= 15


# ---------------------------------------------------------------- a worse library would be noticed


def never_raises(target, where):
    """A load that hides what it finds."""
    try:
        milepost.load(target, where)
    except milepost.CheckpointError:
        return


def names_nothing(target, where):
    """A load that says that something is wrong, and not what."""
    try:
        milepost.load(target, where)
    except milepost.CheckpointError as error:
        raise type(error)("something is wrong") from None


def test_a_load_that_does_not_verify_loads_other_data_silently(tmp_path):
    row = damage.data_bits(False, tmp_path, partial(milepost.load, verify=False))
    assert row.ok is False
    assert row.milepost.counts == {"silent": 40}


@pytest.mark.slow
@pytest.mark.parametrize("row", ["data_bits", "index_bits", "broken_files", "foreign_files"])
@pytest.mark.parametrize(("load", "ending"), [(never_raises, "silent"), (names_nothing, "file not named")])
def test_a_load_that_hides_damage_or_does_not_name_it_keeps_no_promise(tmp_path, row, load, ending):
    found = getattr(damage, row)(False, tmp_path, load)
    assert found.ok is False
    assert found.milepost.counts == {ending: found.milepost.trials}


def test_damage_that_only_loading_finds_is_not_detected(tmp_path):
    """The file that is damaged is not the one that verifying would have to name."""
    state = damage.state_of(1)
    copy = damage.Copy.of(damage.save_milepost, state, tmp_path)
    one, two = copy.data[:2]
    fault = damage.Fault({one: b""}, frozenset({one, two}), state)
    assert damage.count(copy, [fault], partial(damage.ending_in_milepost, load=milepost.load)).counts == {
        "not verified": 1
    }


@pytest.mark.slow
def test_a_load_that_raises_something_else_keeps_no_promise(tmp_path):
    def load(target, where):
        raise OSError(str(where))

    for row in (damage.data_bits, targets.hostile_folders, targets.wrong_targets):
        found = row(False, tmp_path / row.__name__, load)
        assert found.ok is False
        assert found.milepost.of("another error: OSError") > 0


def test_a_checkpoint_without_a_fault_is_no_trial(tmp_path):
    state = damage.state_of(1)
    copy = damage.Copy.of(damage.save_milepost, state, tmp_path)
    fault = damage.Fault({copy.index: copy.whole[copy.index]}, frozenset(), state)
    with pytest.raises(AssertionError, match="no fault was made"):
        damage.count(copy, [fault], damage.ending_in_dcp)


def test_files_are_as_they_were_after_a_trial(tmp_path):
    state = damage.state_of(1)
    copy = damage.Copy.of(damage.save_milepost, state, tmp_path)
    with copy.changed(dict.fromkeys(copy.whole)):
        assert not any(path.is_file() for path in tmp_path.rglob("*"))
    target = damage.blank(state)
    milepost.load(target, tmp_path)
    assert damage.is_same(target, state)


def test_a_load_that_looks_outside_is_seen_although_it_raises(tmp_path):
    def load(target, where):
        list((where.parent / "outside").iterdir())
        milepost.load(target, where)

    found = targets.hostile_folders(False, tmp_path, load)
    assert found.ok is False
    assert found.milepost.counts == {"followed": found.milepost.trials}


@pytest.mark.slow
def test_a_load_that_waits_at_a_pipe_is_seen_and_let_go(tmp_path):
    def load(target, where):
        for path in where.rglob("*"):
            if path.is_fifo():
                path.read_bytes()
        milepost.load(target, where)

    found = targets.hostile_folders(False, tmp_path, load)
    assert found.ok is False
    assert found.milepost.of("hung") == 4


# ---------------------------------------------------------------- targets


@pytest.mark.parametrize("permission", ["allow_missing", "allow_unexpected", "convert_dtype"])
def test_a_load_that_allows_a_difference_unasked_is_silent(tmp_path, permission):
    found = targets.wrong_targets(False, tmp_path, partial(milepost.load, **{permission: True}))
    assert found.ok is False
    assert found.milepost.of("silent") > 0


def test_a_load_that_tells_only_the_first_difference_names_them_in_part(tmp_path):
    def load(target, where):
        try:
            milepost.load(target, where)
        except milepost.StateMismatch as error:
            raise milepost.StateMismatch("\n".join(str(error).splitlines()[:3])) from None

    found = targets.wrong_targets(False, tmp_path, load)
    assert found.ok is False
    assert found.milepost.of("named in part") > 0


def test_a_load_that_changes_the_target_before_it_raises_is_noticed(tmp_path):
    def load(target, where):
        target["half"] = "touched"
        milepost.load(target, where)

    found = targets.wrong_targets(False, tmp_path, load)
    assert found.milepost.counts == {"target changed before the error": found.milepost.trials}
