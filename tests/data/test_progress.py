"""Progress: what the watcher is told, where and when; and the bar that draws it."""

import io
import threading
import time

import numpy as np
import pytest
import torch
from rich.console import Console

import milepost
from milepost import CheckpointDamaged, Progress, ProgressBar, StorageError, Transfer
from milepost.core.limits import BLOCK_BYTES, KIB, MIB
from milepost.store import LocalStore, MemoryStore
from milepost.testing import CountingStore, run_ranks

WHOLE = torch.arange(32 * BLOCK_BYTES // 4, dtype=torch.float32).view(1024, 512)
SMALL = Transfer(3, BLOCK_BYTES)


class Watcher:
    """Keeps all that it was told, and by which thread."""

    def __init__(self):
        self.told, self.threads = [], set()

    def __call__(self, progress):
        self.told.append(progress)
        self.threads.add(threading.current_thread())


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Tell after every job, so that quick tests see it."""
    monkeypatch.setattr("milepost.data.transfer._REPORT_EVERY_S", 0)


class SlowStore(CountingStore):
    """A store that takes its time, or fails at calls whose names start so."""

    def __init__(self, inner, fail=""):
        super().__init__(inner)
        self.fail = fail

    def before(self, number, call):
        if self.fail and call.startswith(self.fail):
            raise StorageError("no room")
        time.sleep(0.001)


def assert_told(watcher, action, url, total):
    """Growing, to the end, which is told once; and only in this thread."""
    told = watcher.told
    assert watcher.threads == {threading.current_thread()}
    assert {(p.action, p.url, p.total_bytes) for p in told} == {(action, url, total)}
    done = [p.done_bytes for p in told]
    assert done == sorted(done)
    assert [p.finished for p in told] == [False] * (len(told) - 1) + [True]
    assert done[-1] == total
    assert min(done) >= 0
    seconds = [p.seconds for p in told]
    assert seconds == sorted(seconds)


# ---- what is told


@pytest.mark.parametrize("threads", [1, 3])
def test_a_save_tells_how_far_it_is_in_the_thread_of_the_caller(tmp_path, threads):
    watcher = Watcher()
    store = SlowStore(LocalStore(tmp_path))
    milepost.save({"a": WHOLE, "b": WHOLE.t()}, store, transfer=Transfer(threads, BLOCK_BYTES), progress=watcher)
    assert_told(watcher, "save", str(tmp_path), 2 * WHOLE.nbytes)
    assert len({p.done_bytes for p in watcher.told}) > (50 if threads == 1 else 3)


FORMS = {
    "contiguous": lambda: torch.zeros(1024, 512),
    "strided": lambda: torch.zeros(512, 1024).t(),
    "of another type": lambda: torch.zeros(1024, 512, dtype=torch.float64),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_load_tells_how_far_it_is(tmp_path, form, verify, threads):
    milepost.save({"t": WHOLE}, tmp_path)
    watcher, way = Watcher(), Transfer(threads, BLOCK_BYTES)
    milepost.load({"t": FORMS[form]()}, tmp_path, convert_dtype=True, transfer=way, progress=watcher, verify=verify)
    assert_told(watcher, "load", str(tmp_path), WHOLE.nbytes)
    if threads == 1:  # one block after the other, and then the end
        assert len(watcher.told) > 20
        assert len({p.done_bytes for p in watcher.told}) > 20


def test_a_load_of_columns_tells_what_it_brings_and_not_what_it_reads():
    store, watcher = MemoryStore("memory://columns"), Watcher()
    milepost.save({"t": WHOLE}, store)

    def load(comm):
        columns = slice(0, 128) if comm.rank == 0 else slice(128, 512)
        part = torch.zeros(1024, columns.stop - columns.start)
        target = {"t": milepost.Sharded((1024, 512), {(0, columns.start): part})}
        milepost.load(target, store, process_group=comm, transfer=Transfer(1, BLOCK_BYTES), progress=watcher)

    run_ranks(2, load)
    assert {p.total_bytes for p in watcher.told} == {WHOLE.nbytes // 4}
    assert sum(p.finished for p in watcher.told) == 1
    assert 0.9 < watcher.told[-2].done_bytes / watcher.told[-2].total_bytes < 1


def test_a_load_over_wide_gaps_tells_how_far_it_is():
    whole = torch.arange(16 * MIB // 4, dtype=torch.float32).view(16, -1)
    store, watcher = MemoryStore(), Watcher()
    milepost.save({"t": whole}, store)

    def load(comm):
        columns = slice(0, 16 * KIB) if comm.rank == 0 else slice(16 * KIB, whole.shape[1])
        part = torch.zeros(16, columns.stop - columns.start)
        target = {"t": milepost.Sharded(tuple(whole.shape), {(0, columns.start): part})}
        milepost.load(target, store, process_group=comm, transfer=Transfer(1, BLOCK_BYTES), progress=watcher)

    run_ranks(2, load)
    assert watcher.told[-2].done_bytes > watcher.told[-2].total_bytes / 2


@pytest.mark.parametrize("damage", [False, True])
def test_a_verification_tells_how_far_it_is(tmp_path, damage):
    milepost.save({"t": WHOLE}, tmp_path)
    (path,) = tmp_path.glob("data/*/*")
    if damage:
        with path.open("r+b") as file:
            file.seek(500_000)
            file.write(b"other")
    watcher = Watcher()
    with milepost.open(tmp_path) as checkpoint:
        assert checkpoint.verify(transfer=Transfer(1, BLOCK_BYTES), progress=watcher).ok != damage
    assert_told(watcher, "verify", str(tmp_path), path.stat().st_size)
    assert len(watcher.told) > 20
    with milepost.open(tmp_path) as checkpoint:
        watcher = Watcher()
        checkpoint.verify(transfer=SMALL, progress=watcher)
    assert_told(watcher, "verify", str(tmp_path), path.stat().st_size)


def test_only_the_coordinator_is_told_about_its_own_part():
    store = MemoryStore("memory://lead")

    def parts(comm, fill):
        rows = slice(1024 * comm.rank // 3, 1024 * (comm.rank + 1) // 3)
        return {"t": milepost.Sharded((1024, 512), {(rows.start, 0): fill(WHOLE[rows])})}, WHOLE[rows].nbytes

    def run(comm):
        saved, loaded = Watcher(), Watcher()
        state, size = parts(comm, torch.clone)
        milepost.save(state, store, process_group=comm, progress=saved, transfer=SMALL)
        milepost.load(parts(comm, torch.zeros_like)[0], store, process_group=comm, progress=loaded, transfer=SMALL)
        if comm.rank == comm.coordinator:
            assert_told(saved, "save", "memory://lead", size)
            assert_told(loaded, "load", "memory://lead", size)
        return len(saved.told), len(loaded.told)

    lead, *others = run_ranks(3, run)
    assert min(lead) > 0
    assert others == [(0, 0)] * 2


@pytest.mark.parametrize("state", [{}, {"step": 3}, {"t": torch.zeros(0)}])
@pytest.mark.parametrize(
    "action",
    [
        "save",
        "load",
        "verify",
    ],
)
def test_the_end_is_told_also_where_there_is_no_data(tmp_path, state, action):
    saved, loaded, verified = Watcher(), Watcher(), Watcher()
    milepost.save(state, tmp_path, progress=saved)
    milepost.load(dict(state), tmp_path, progress=loaded)
    milepost.open(tmp_path).verify(progress=verified)
    told = {"save": saved, "load": loaded, "verify": verified}[action].told
    assert [p.finished for p in told] == [True]


# ---- trouble


def test_a_watcher_that_raises_is_logged_and_let_be(tmp_path, caplog):
    calls = []

    def fail(progress):
        calls.append(progress)
        raise ZeroDivisionError("a bug of the watcher")

    milepost.save({"t": WHOLE}, tmp_path, progress=fail, transfer=SMALL)
    assert len(calls) == 1
    assert [r.message for r in caplog.records] == ["the progress callback failed and is not called again"]
    assert "a bug of the watcher" in caplog.text
    target = {"t": torch.zeros_like(WHOLE)}
    milepost.load(target, tmp_path, progress=fail, transfer=SMALL)
    assert torch.equal(target["t"], WHOLE)
    assert milepost.open(tmp_path).verify(progress=fail).ok
    assert len(calls) == 3


def test_ctrl_c_in_a_watcher_ends_the_save_and_leaves_no_file(tmp_path):
    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        milepost.save({"t": WHOLE}, SlowStore(LocalStore(tmp_path)), progress=stop, transfer=SMALL)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert [thread for thread in threading.enumerate() if thread.name == "milepost"] == []


@pytest.mark.parametrize("fail", ["writer ", "write ", "commit "])
def test_the_end_of_a_save_that_fails_is_never_told(fail):
    watcher = Watcher()
    with pytest.raises(StorageError):
        milepost.save({"t": WHOLE}, SlowStore(MemoryStore(), fail), progress=watcher, transfer=SMALL)
    assert not any(p.finished for p in watcher.told)


def test_the_end_of_a_load_that_fails_is_never_told(tmp_path):
    milepost.save({"t": WHOLE}, tmp_path)
    (path,) = tmp_path.glob("data/*/*")
    with path.open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"other")
    watcher = Watcher()
    with pytest.raises(CheckpointDamaged):
        milepost.load({"t": torch.zeros_like(WHOLE)}, tmp_path, progress=watcher, transfer=SMALL)
    assert not any(p.finished for p in watcher.told)


def test_the_end_is_not_told_when_the_commit_fails():
    watcher = Watcher()
    with pytest.raises(StorageError):
        milepost.save({"t": WHOLE}, SlowStore(MemoryStore(), "create manifest"), progress=watcher)
    assert not any(p.finished for p in watcher.told)


def test_the_end_is_not_told_when_another_rank_fails():
    store, watcher = MemoryStore(), Watcher()

    def save(comm):
        mine = SlowStore(store, "write " if comm.rank == 1 else "")
        state = {"t": milepost.Sharded((2, 512), {(comm.rank, 0): WHOLE[:1].clone()})}
        with pytest.raises(StorageError):
            milepost.save(state, mine, process_group=comm, progress=watcher)

    run_ranks(2, save)
    assert not any(p.finished for p in watcher.told)


def test_the_end_is_told_once_when_the_ranks_must_agree_anew():
    store, watcher = MemoryStore(), Watcher()

    def save(comm):
        plans = milepost.Plans()
        state = {"t": WHOLE[:64], "mine": milepost.PerRank({"a": torch.ones(3)})}
        milepost.save(state, store, process_group=comm, plans=plans)
        if comm.rank == 1:
            state["more"] = torch.ones(3)
        milepost.save(state, store, process_group=comm, plans=plans, progress=watcher)

    run_ranks(2, save)
    assert sum(p.finished for p in watcher.told) == 1


# ---- arithmetic


@pytest.mark.parametrize(
    ("done", "total", "seconds", "rate", "left", "finished"),
    [
        (0, 100, 0.0, 0.0, None, False),
        (0, 100, 5.0, 0.0, None, False),
        (50, 100, 0.0, 0.0, None, False),
        (25, 100, 2.0, 12.5, 6.0, False),
        (100, 100, 4.0, 25.0, 0.0, True),
        (0, 0, 0.0, 0.0, None, True),
    ],
)
def test_rate_and_time_left_follow_from_the_bytes_and_the_seconds(done, total, seconds, rate, left, finished):
    progress = Progress("save", "runs/a", done, total, seconds)
    assert (progress.bytes_per_second, progress.seconds_left, progress.finished) == (rate, left, finished)


# ---- the bar


@pytest.fixture
def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=160, _environ={"TERM": "xterm"})


def drawn(console):
    return console.file.getvalue()


def drawing():
    return [thread for thread in threading.enumerate() if "rich" in type(thread).__module__]


def has_stopped():
    """Whether nothing draws any more. A thread of rich that was told to stop gets a moment to do so."""
    for thread in drawing():
        thread.join(5)
    return not drawing()


def test_bar_draws_action_place_bytes_and_end_of_each_call(tmp_path, terminal):
    bar = ProgressBar(terminal)
    place = tmp_path / "a"
    state = {"t": WHOLE}
    milepost.save(state, place, progress=bar, transfer=SMALL)
    assert f"save {place}" in drawn(terminal)
    assert "2.0/2.0 MiB" in drawn(terminal)
    assert has_stopped()
    milepost.load(state, place, progress=bar, transfer=SMALL)
    assert f"load {place}" in drawn(terminal)
    with milepost.open(place) as checkpoint:
        checkpoint.verify(progress=bar)
    assert f"verify {place}" in drawn(terminal)
    assert has_stopped()
    assert drawn(terminal).count("\x1b[?25l") == drawn(terminal).count("\x1b[?25h") == 3, "the cursor comes back"


@pytest.mark.parametrize("how", ["close", "with"])
def test_bar_releases_the_terminal_after_a_failure(tmp_path, terminal, how):
    bar = ProgressBar(terminal)
    bar(Progress("load", "a broken place", 10, 100, 1.0))
    assert drawing()
    if how == "close":
        bar.close()
        bar.close()
    else:
        with pytest.raises(StorageError), bar:
            raise StorageError("no room")
    assert has_stopped()
    assert "a broken place" in drawn(terminal)
    milepost.save({"t": WHOLE}, tmp_path, progress=bar)
    assert f"save {tmp_path}" in drawn(terminal)
    assert has_stopped()


def test_a_failed_save_is_drawn_no_further_once_the_bar_is_closed(terminal):
    with pytest.raises(StorageError), ProgressBar(terminal) as bar:
        milepost.save({"t": WHOLE}, SlowStore(MemoryStore(), "commit "), progress=bar, transfer=SMALL)
    assert has_stopped()
    assert "save memory://" in drawn(terminal)


def test_by_default_the_bar_draws_to_standard_error(capsys, tmp_path):
    milepost.save({"t": WHOLE}, tmp_path, progress=ProgressBar())
    out, err = capsys.readouterr()
    assert out == ""
    assert "save" in err


def test_without_a_watcher_all_is_silent(capfd, caplog, tmp_path):
    milepost.save({"t": WHOLE, "n": np.arange(3)}, tmp_path)
    milepost.load({"t": torch.zeros_like(WHOLE), "n": np.zeros(3, dtype=int)}, tmp_path)
    milepost.open(tmp_path).verify()
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
