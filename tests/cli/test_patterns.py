"""Patterns of keys that fit nothing: a mistake, and not an answer."""

import pytest

import milepost as library
from tests.cli.running import fine, milepost, refused


@pytest.mark.parametrize(
    "line",
    [
        ["show", "{}", "--keys", "zzz*"],
        ["stats", "{}", "--keys", "zzz*"],
        ["stats", "{}", "--keys", "zzz*", "--compute", "--json"],
        ["diff", "{}", "{}", "--keys", "zzz*"],
        ["explain", "{}", "--ranks", "2", "--keys", "zzz*"],
        ["explain", "{}", "--ranks", "2", "--rule", "model.*:shard0", "--rule", "zzz*:shard0"],
        ["convert", "{}", "{}/../out", "--keys", "zzz*"],
        ["convert", "{}", "{}/../out", "--without", "rng", "--without", "zzz*"],
    ],
)
def test_pattern_that_fits_nothing_is_refused(step, line):
    told = refused(2, *(part.format(step) for part in line))
    assert "matches 'zzz*'. `milepost show` lists the keys" in told
    assert not (step.parent / "out").exists()


def test_pattern_may_fit_one_side_only(step, tmp_path):
    library.save({"other": 1}, tmp_path / "b")
    assert milepost("diff", step, tmp_path / "b", "--keys", "other").status == 1
    with pytest.raises(library.InvalidRequest, match=r"no key matches 'zzz'"):
        library.diff(step, tmp_path / "b", keys="zzz")


def test_everything_of_an_empty_checkpoint_is_shown(tmp_path):
    library.save({}, tmp_path / "empty")
    for line in (["stats"], ["show"], ["explain", "--ranks", "2"]):
        fine(line[0], tmp_path / "empty", *line[1:])
    assert milepost("diff", tmp_path / "empty", tmp_path / "empty", "--keys", "*").status == 0
