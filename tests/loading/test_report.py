"""Loading reports everything at once, and allows only what the options allow."""

import pytest
import torch
from torch import nn

import milepost
from milepost.loading.rank_match import RankMatch
from milepost.loading.report import merge_reports
from milepost.testing import run_ranks

SAVED = {
    "same": torch.ones(2),
    "shape": torch.ones(4, 4),
    "dtype": torch.ones(3),
    "number": torch.ones(3),
    "extra": torch.ones(1),
    "kind": 5,
}


def target():
    return {
        "same": torch.zeros(2),
        "shape": torch.zeros(4, 1),
        "dtype": torch.zeros(3, dtype=torch.float16),
        "number": torch.zeros(3, dtype=torch.int32),
        "absent": torch.zeros(1),
        "kind": torch.zeros(1),
    }


def test_all_differences_stand_in_one_error_and_nothing_is_touched(tmp_path):
    milepost.save(SAVED, tmp_path)
    state = target()
    with pytest.raises(milepost.StateMismatch) as caught:
        milepost.load(state, tmp_path)
    text = str(caught.value)
    for part in [
        "'absent'",
        "'extra'",
        "'shape': saved as (4, 4) and the target is (4, 1)",
        "'dtype': saved as float32 and the target is float16",
        "'number': saved as float32 and the target is int32",
        "'kind': saved as a value and the target is a tensor",
        "allow_missing=True",
        "allow_unexpected=True",
        "convert_dtype=True",
        'convert_dtype="lossy"',
        str(tmp_path),
    ]:
        assert part in text
    assert isinstance(caught.value, KeyError)
    assert state["same"].sum() == 0
    report = milepost.explain(state, tmp_path)
    assert report.missing == {"absent": (0,)}
    assert report.unexpected == ("extra",)
    assert report.shapes == {"shape": ((4, 4), (4, 1))}
    assert report.dtypes == {"dtype": ("float32", "float16"), "number": ("float32", "int32")}
    assert not report.fits()


def test_each_permission_allows_just_its_own_difference(tmp_path):
    milepost.save({"a": torch.full((2,), 1.5), "b": torch.ones(1)}, tmp_path)
    with pytest.raises(milepost.StateMismatch, match="not in the state"):
        milepost.load({"a": torch.zeros(2)}, tmp_path)
    assert milepost.load({"a": torch.zeros(2)}, tmp_path, allow_unexpected=True)["a"].tolist() == [1.5, 1.5]
    both = {"a": torch.zeros(2), "b": torch.zeros(1), "c": torch.full((1,), 9.0), "d": 4}
    with pytest.raises(milepost.StateMismatch, match="2 keys missing"):
        milepost.load(both, tmp_path, allow_unexpected=True)
    milepost.load(both, tmp_path, allow_missing=True)
    assert (both["b"].item(), both["c"].item(), both["d"]) == (1.0, 9.0, 4)
    half = {"a": torch.zeros(2, dtype=torch.float16), "b": torch.zeros(1)}
    with pytest.raises(milepost.StateMismatch, match="another dtype"):
        milepost.load(half, tmp_path)
    milepost.load(half, tmp_path, convert_dtype=True)
    assert half["a"].dtype == torch.float16
    assert half["a"].tolist() == [1.5, 1.5]


def test_five_thousand_differences_are_readable(tmp_path):
    milepost.save({f"layers.{i}.w": torch.zeros(1) for i in range(5000)}, tmp_path)
    with pytest.raises(milepost.StateMismatch) as caught:
        milepost.load({f"blocks.{i}.w": torch.zeros(1) for i in range(5000)}, tmp_path)
    text = str(caught.value)
    assert len(text.splitlines()) < 10
    assert "5000 x 'blocks.*.w' (first 'blocks.0.w')" in text
    assert "5000 x 'layers.*.w'" in text


def test_a_modules_missing_and_unexpected_keys_are_named(tmp_path):
    milepost.save({"m": nn.Linear(2, 2)}, tmp_path)
    with pytest.raises(milepost.StateMismatch, match=r"(?s)'m\.weight_g'.*'m\.weight'"):
        milepost.load({"m": nn.ParameterDict({"weight_g": torch.zeros(1), "bias": torch.zeros(2)})}, tmp_path)


def test_explain_tells_the_bytes_of_each_rank_and_who_misses_what():
    store = milepost.store.MemoryStore()
    milepost.save({"a": torch.ones(10), "b": torch.ones(6)}, store)

    def work(comm):
        state = {"a": milepost.Sharded((10,), {(5 * comm.rank,): torch.zeros(5)})}
        if comm.rank == 1:
            state["c"] = torch.zeros(1)
        return milepost.explain(state, store, process_group=comm)

    for report in run_ranks(2, work):
        assert report.read_bytes == (20, 20)
        assert report.missing == {"c": (1,)}
        assert report.unexpected == ("b",)
        assert "rank 1" in str(report)


@pytest.mark.parametrize(
    ("hosts", "extra", "text"),
    [
        (1, 0, "2 ranks would read 400,000,000 bytes, at most 200,000,000 on one"),
        (1, 150_000_000, "at most 200,000,000 on one, and about 300,000,000 that lie beside them"),
        (2, 150_000_000, "would get 400,000,000 bytes, at most 200,000,000 on one: each byte is read once, by one of"),
    ],
)
def test_report_says_which_way_the_ranks_would_read(hosts, extra, text):
    found = [
        RankMatch((), {}, {}, {}, b"\x80", 200_000_000, host=bytes([i % hosts]), extra_bytes=extra) for i in range(2)
    ]
    report = merge_reports("memory://x", ["w"], found)
    assert report.way == ("swap" if hosts == 2 else "apart")
    assert text in str(report)


def test_a_key_that_one_rank_wants_is_not_unexpected_on_the_others():
    store = milepost.store.MemoryStore()
    milepost.save({"a": torch.ones(1), "b": torch.full((1,), 2.0)}, store)

    def work(comm):
        state = {"ab"[comm.rank]: torch.zeros(1)}
        milepost.load(state, store, process_group=comm)
        return state

    assert run_ranks(2, work) == [{"a": torch.ones(1)}, {"b": torch.full((1,), 2.0)}]
