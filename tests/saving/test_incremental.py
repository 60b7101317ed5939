"""Incremental saves: what did not change is not written again, and each checkpoint is whole by itself."""

import errno
import os
import re
import shutil

import pytest
import torch

import milepost
from milepost import Checkpointer, InvalidRequest, PerRank, Sharded
from milepost.store import LocalStore, MemoryStore, Within
from milepost.testing import CountingStore, Crash, CrashingStore, run_ranks

ROWS = 96_000


def frozen_state(moved=0, rows=ROWS):
    """A large tensor that stays, an odd one, a small one, and one that changes."""
    numbers = torch.Generator().manual_seed(7)
    return {
        "frozen": torch.randn(rows, 5, generator=numbers),
        "odd": torch.randn(70_001, generator=numbers).bfloat16(),
        "small": torch.arange(9),
        "adapter": torch.full((40_000,), float(moved)),
        "step": moved,
    }


def short_state(moved=0):
    return frozen_state(moved, 40_000)


def same(one, other):
    return all(torch.equal(a, other[key]) if isinstance(a, torch.Tensor) else a == other[key] for key, a in one.items())


def loaded(path, like):
    target = {key: torch.zeros_like(a) if isinstance(a, torch.Tensor) else None for key, a in like.items()}
    return milepost.load(target, path)


def files_in(path):
    return sorted(p.relative_to(path).as_posix() for p in path.rglob("*.safetensors"))


FROZEN_BYTES = ROWS * 5 * 4 + 70_001 * 2 + 72


def test_unchanged_tensors_are_not_written_again(tmp_path):
    first = milepost.save(frozen_state(0), tmp_path / "1", base=tmp_path / "0")
    assert (first.data_bytes, first.reused_bytes) == (FROZEN_BYTES + 160_000, 0)
    second = milepost.save(frozen_state(1), tmp_path / "2", base=tmp_path / "1")
    assert (second.data_bytes, second.reused_bytes) == (160_000, FROZEN_BYTES)
    own = tmp_path / "2" / "data" / second.save_id / "00000.safetensors"
    assert own.stat().st_size < 160_000 + 3 * 4096
    assert same(frozen_state(1), loaded(tmp_path / "2", frozen_state()))


def test_checkpoint_is_whole_when_its_base_is_gone(tmp_path):
    for step in range(4):
        milepost.save(frozen_state(step), tmp_path / f"{step}", base=tmp_path / f"{step - 1}")
    for step in range(3):
        shutil.rmtree(tmp_path / f"{step}")
    assert same(frozen_state(3), loaded(tmp_path / "3", frozen_state()))
    with milepost.open(tmp_path / "3") as checkpoint:
        assert checkpoint.verify().ok
        assert torch.equal(checkpoint["frozen"][17:19, 1:], frozen_state()["frozen"][17:19, 1:])
    receipt = milepost.save(frozen_state(4), tmp_path / "4", base=tmp_path / "3")
    assert receipt.data_bytes == 160_000


def test_names_the_file_that_was_written_first(tmp_path):
    receipts = [milepost.save(frozen_state(n), tmp_path / f"{n}", base=tmp_path / f"{n - 1}") for n in range(5)]
    with milepost.open(tmp_path / "4") as checkpoint:
        [row] = checkpoint.manifest.older
        assert (row.save_id, row.writer, row.age, row.used_bytes) == (receipts[0].save_id, 0, 4, FROZEN_BYTES)
        assert checkpoint.manifest.data_bytes == FROZEN_BYTES + 160_000
    assert len(files_in(tmp_path / "4")) == 2
    inodes = {next((tmp_path / f"{n}" / "data").rglob(f"*{receipts[0].save_id}*")) for n in (1, 4)}
    first = tmp_path / "0" / "data" / receipts[0].save_id / "00000.safetensors"
    found = [p for n in (1, 4) for p in (tmp_path / f"{n}").rglob(f"00000-{receipts[0].save_id}-00000.safetensors")]
    assert inodes
    assert len(found) == 2
    assert all(p.samefile(first) for p in found), "one file, three names"


@pytest.mark.parametrize(
    "changed",
    [
        ("frozen", lambda t: t[-1].add_(1)),  # the very end
        ("frozen", lambda t: t[0, 0].mul_(-1)),
        (
            "frozen",
            lambda t: t.view(-1)[ROWS * 5 // 2 + 13].add_(1e-3),
        ),  # one element, in no block that is looked at first
        ("odd", lambda t: t[-1].add_(1)),
        ("small", lambda t: t[4].add_(1)),
    ],
)
def test_one_changed_element_is_saved(tmp_path, changed):
    key, change = changed
    milepost.save(frozen_state(), tmp_path / "1", base=tmp_path / "0")
    state = frozen_state()
    change(state[key])
    receipt = milepost.save(state, tmp_path / "2", base=tmp_path / "1", max_waste=1)
    assert receipt.data_bytes == state[key].nbytes
    assert same(state, loaded(tmp_path / "2", state))


def test_equal_bytes_under_another_shape_or_dtype_are_written(tmp_path):
    first = {"a": torch.zeros(100, 70), "b": torch.zeros(64, dtype=torch.int32), "c": torch.zeros(30, 20)}
    milepost.save(first, tmp_path / "1", base=tmp_path / "0")
    second = {"a": torch.zeros(70, 100), "b": torch.zeros(64), "c": torch.zeros(40, 20)}
    receipt = milepost.save(second, tmp_path / "2", base=tmp_path / "1")
    assert receipt.reused_bytes == 0
    assert same(second, loaded(tmp_path / "2", second))


def test_strided_tensors_and_views_are_compared_too(tmp_path):
    data = torch.randn(300, 400)
    state = {"turned": data.t(), "part": data[:, ::2], "conj": torch.randn(9, 5, dtype=torch.complex64).conj()}
    milepost.save(state, tmp_path / "1", base=tmp_path / "0")
    receipt = milepost.save(state, tmp_path / "2", base=tmp_path / "1")
    assert receipt.data_bytes == 0
    target = {key: torch.zeros_like(a) for key, a in state.items()}
    assert same(state, milepost.load(target, tmp_path / "2"))


def test_same_place_can_be_its_own_base(tmp_path):
    for step in range(3):
        receipt = milepost.save(frozen_state(step), tmp_path / "a", base=tmp_path / "a")
    assert (receipt.data_bytes, receipt.generation) == (160_000, 3)
    assert same(frozen_state(2), loaded(tmp_path / "a", frozen_state()))
    assert len(files_in(tmp_path / "a")) == 2, "the older generations are swept"


def test_base_saved_without_digests_is_written_anew_once(tmp_path):
    milepost.save(frozen_state(0), tmp_path / "1")
    assert milepost.save(frozen_state(1), tmp_path / "2", base=tmp_path / "1").reused_bytes == 0
    assert milepost.save(frozen_state(2), tmp_path / "3", base=tmp_path / "2").reused_bytes == FROZEN_BYTES


@pytest.mark.parametrize("damage", ["manifest", "header", "cut short", "gone", "another format"])
def test_base_that_cannot_be_used_costs_only_bytes(tmp_path, damage, caplog):
    receipt = milepost.save(frozen_state(0), tmp_path / "1", base=tmp_path / "0")
    file = tmp_path / "1" / "data" / receipt.save_id / "00000.safetensors"
    if damage == "manifest":
        (tmp_path / "1" / "manifest-00000001.json").write_bytes(b"{}")
    elif damage == "header":
        with file.open("r+b") as handle:
            handle.seek(200)
            handle.write(b"x")
    elif damage == "cut short":
        os.truncate(file, file.stat().st_size - 1)
    elif damage == "gone":
        file.unlink()
    else:
        shutil.rmtree(tmp_path / "1")
        torch.save(frozen_state(0), tmp_path / "1")
    receipt = milepost.save(frozen_state(1), tmp_path / "2", base=tmp_path / "1")
    assert receipt.reused_bytes == 0
    assert same(frozen_state(1), loaded(tmp_path / "2", frozen_state()))
    assert re.search(r"all (data )?is written", caplog.text)


def test_base_that_is_not_there_is_told_quietly(tmp_path, caplog):
    caplog.set_level("INFO", "milepost")
    milepost.save(frozen_state(0), tmp_path / "1", base=tmp_path / "0")
    [told] = [record for record in caplog.records if "all is written" in record.message]
    assert (told.levelname, str(tmp_path / "0") in told.message) == ("INFO", True)


def test_base_that_is_only_read_is_not_asked(tmp_path, caplog):
    receipt = milepost.save(frozen_state(0), tmp_path / "1", base="https://127.0.0.1:1/steps/1")
    assert receipt.reused_bytes == 0
    assert "all data is written" in caplog.text


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.EACCES])
def test_without_hard_links_everything_is_written(tmp_path, monkeypatch, caplog, number):
    milepost.save(frozen_state(0), tmp_path / "1", base=tmp_path / "0")
    really = os.link

    def link(source, target, **options):
        if ".safetensors" in str(target) and "tmp" not in str(target):
            raise OSError(number, os.strerror(number))
        return really(source, target, **options)

    monkeypatch.setattr(os, "link", link)
    receipt = milepost.save(frozen_state(1), tmp_path / "2", base=tmp_path / "1")
    assert receipt.reused_bytes == 0
    assert "A folder needs hard links" in caplog.text
    assert same(frozen_state(1), loaded(tmp_path / "2", frozen_state()))


def test_data_that_is_old_is_written_again(tmp_path):
    new = [
        milepost.save(frozen_state(n), tmp_path / f"{n}", base=tmp_path / f"{n - 1}", max_depth=2).reused_bytes > 0
        for n in range(8)
    ]
    assert new == [False, True, True, False, True, True, False, True]


def test_file_of_which_little_is_used_is_given_up(tmp_path):
    parts = {f"p{i}": torch.full((50_000,), float(i)) for i in range(4)}
    milepost.save(parts, tmp_path / "1", base=tmp_path / "0")
    for key in ("p0", "p1"):
        parts[key] = parts[key] - 1
    assert milepost.save(parts, tmp_path / "2", base=tmp_path / "1").reused_bytes == 400_000
    parts["p2"] = parts["p2"] - 1  # now a quarter of the first file is used
    receipt = milepost.save(parts, tmp_path / "3", base=tmp_path / "2")
    assert (receipt.data_bytes, receipt.reused_bytes) == (400_000, 400_000)
    receipt = milepost.save(parts, tmp_path / "4", base=tmp_path / "3", max_waste=1.0)
    assert receipt.data_bytes == 0


def test_statistics_are_those_of_a_plain_save(tmp_path):
    state = frozen_state()
    state["frozen"][5, 2] = float("nan")
    milepost.save(state, tmp_path / "1", base=tmp_path / "0", statistics="histogram")
    state["adapter"] += 1
    receipt = milepost.save(state, tmp_path / "2", base=tmp_path / "1", statistics="histogram", healthy=True)
    assert receipt.reused_bytes == FROZEN_BYTES
    assert receipt.health is not None
    assert not receipt.health.ok
    milepost.save(state, tmp_path / "plain", statistics="histogram")
    with milepost.open(tmp_path / "2") as found, milepost.open(tmp_path / "plain") as plain:
        assert found.statistics == plain.statistics


# --- ranks


def cut(whole, comm):
    """This rank's rows of a tensor."""
    size = -(-len(whole) // comm.size)
    part = whole[comm.rank * size : (comm.rank + 1) * size].clone()
    return Sharded(tuple(whole.shape), {(comm.rank * size, 0): part})


def held(sharded):
    """The rows that this rank has."""
    return sharded.parts[0].data


def on_ranks(comm, moved=0):
    whole = frozen_state(moved)
    state = {**whole, "frozen": cut(whole["frozen"], comm)}
    state["mine"] = PerRank({"table": torch.full((30_000,), float(comm.rank)), "at": moved})
    return state


def save_on(world, path, base, moved=0, **options):
    def work(comm):
        return milepost.save(on_ranks(comm, moved), path, base=base, process_group=comm, **options)

    return run_ranks(world, work)[0]


def load_on(world, path):
    def work(comm):
        target = on_ranks(comm, -1)
        for value in target.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        held(target["frozen"]).zero_()
        if world != 4:
            del target["mine"]
        milepost.load(target, path, process_group=comm, allow_unexpected=True)
        return target

    return run_ranks(world, work)


def check_loaded(found, moved):
    whole = frozen_state(moved)
    rows = torch.cat([held(one["frozen"]) for one in found])
    assert torch.equal(rows, whole["frozen"])
    for one in found:
        assert all(torch.equal(one[key], whole[key]) for key in ("odd", "small", "adapter"))
        assert one["step"] == moved


def test_every_rank_reuses_its_own_parts(tmp_path):
    save_on(4, tmp_path / "1", tmp_path / "0")
    receipt = save_on(4, tmp_path / "2", tmp_path / "1", moved=1)
    assert receipt.data_bytes < 160_000 + 4 * 500, "the adapter, and the records of the ranks"
    assert receipt.reused_bytes >= FROZEN_BYTES + 4 * 120_000
    shutil.rmtree(tmp_path / "1")
    for world in (4, 3, 1):
        check_loaded(load_on(world, tmp_path / "2"), 1)
    tables = [one["mine"].value["table"] for one in load_on(4, tmp_path / "2")]
    assert [int(table[0]) for table in tables] == [0, 1, 2, 3]


@pytest.mark.parametrize("worlds", [(4, 2), (2, 4), (1, 3), (4, 4)])
def test_other_ranks_store_more_at_worst(tmp_path, worlds):
    """What keeps its box is reused, whichever rank wrote it."""
    save_on(worlds[0], tmp_path / "1", tmp_path / "0")
    receipt = save_on(worlds[1], tmp_path / "2", tmp_path / "1", moved=1, max_waste=1)
    assert receipt.reused_bytes >= 70_001 * 2 + 72
    again = save_on(worlds[1], tmp_path / "3", tmp_path / "2", moved=2, max_waste=1)
    assert again.reused_bytes >= FROZEN_BYTES
    shutil.rmtree(tmp_path / "1")
    shutil.rmtree(tmp_path / "2")
    for world in (2, 3):
        check_loaded(load_on(world, tmp_path / "3"), 2)
    with milepost.open(tmp_path / "3") as checkpoint:
        assert checkpoint.verify().ok


def test_file_that_two_ranks_of_the_base_use_is_named_once(tmp_path):
    for step, world in ((1, 1), (2, 2), (3, 1), (4, 2)):
        save_on(world, tmp_path / f"{step}", tmp_path / f"{step - 1}", moved=step, max_waste=1)
        with milepost.open(tmp_path / f"{step}") as checkpoint:
            assert checkpoint.verify().ok
    check_loaded(load_on(1, tmp_path / "4"), 4)


def test_structure_that_changes_on_the_way_is_agreed_on_again(tmp_path):
    plans = [milepost.Plans() for _ in range(2)]

    def work(comm, step):
        state = on_ranks(comm, step)
        if step == 2 and comm.rank == 1:
            state["only here"] = torch.ones(5)
        path, base = tmp_path / f"{step}", tmp_path / f"{step - 1}"
        return milepost.save(state, path, base=base, process_group=comm, plans=plans[comm.rank])

    for step in range(4):
        receipts = run_ranks(2, lambda comm, step=step: work(comm, step))
        assert receipts[0].reused_bytes >= (FROZEN_BYTES if step else 0)
        check_loaded(load_on(2, tmp_path / f"{step}"), step)


def test_ranks_without_the_base_write_everything(tmp_path):
    """The coordinator's base counts. A rank that cannot see it writes what it has."""
    save_on(2, tmp_path / "1", tmp_path / "0")

    def work(comm):
        base = tmp_path / "1" if comm.rank == 0 else None
        return milepost.save(on_ranks(comm, 1), tmp_path / "2", base=base, process_group=comm)

    receipt = run_ranks(2, work)[0]
    assert 0 < receipt.reused_bytes < FROZEN_BYTES
    check_loaded(load_on(2, tmp_path / "2"), 1)


# --- what goes wrong


def test_file_that_is_removed_while_it_is_linked_is_written(tmp_path):
    milepost.save(frozen_state(0), tmp_path / "1", base=tmp_path / "0")

    class Removing(CountingStore):
        def before(self, number, call):
            if call.startswith("link"):
                shutil.rmtree(tmp_path / "1")

    receipt = milepost.save(frozen_state(1), Removing(LocalStore(tmp_path / "2")), base=tmp_path / "1")
    assert receipt.reused_bytes == 0
    assert same(frozen_state(1), loaded(tmp_path / "2", frozen_state()))


@pytest.mark.parametrize("kind", ["memory", "local"])
@pytest.mark.parametrize("after", [False, True])
def test_crash_at_any_call_leaves_every_checkpoint_whole(tmp_path, kind, after):
    def fresh(number):
        store = MemoryStore() if kind == "memory" else LocalStore(tmp_path / f"{number}")
        milepost.save(short_state(0), Within(store, "1"), base=Within(store, "0"))
        return store

    def save(store):
        return milepost.save(short_state(1), Within(store, "2"), base=Within(store, "1"))

    counting = CountingStore(fresh("count"))
    save(counting)
    for at in range(1, counting.calls + 1):
        store = fresh(at)
        with pytest.raises(Crash):
            save(CrashingStore(store, at, after=after))
        shutil.rmtree(tmp_path / f"{at}" / "1", ignore_errors=True)
        if kind == "memory":
            for name in list(store.list("1/")):
                store.delete(name)
        place = Within(store, "2")
        if list(place.list("manifest-0000000")):
            assert milepost.open(place).verify().ok
            assert same(short_state(1), loaded(place, short_state()))
        milepost.save(short_state(2), place, base=place)
        assert same(short_state(2), loaded(place, short_state()))


def test_failed_save_leaves_no_names_behind(tmp_path):
    milepost.save(frozen_state(0), tmp_path / "1", base=tmp_path / "0")

    class Full(CountingStore):
        def before(self, number, call):
            if call.startswith(("commit data", "create manifest")):
                raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(milepost.StorageError):
        milepost.save(frozen_state(1), Full(LocalStore(tmp_path / "2")), base=tmp_path / "1")
    assert not list(tmp_path.glob("2/**/*.safetensors"))
    assert milepost.save(frozen_state(1), tmp_path / "2", base=tmp_path / "1").reused_bytes == FROZEN_BYTES


def test_change_between_look_and_write_is_an_error(tmp_path, monkeypatch):
    """A tensor that another thread changes while it is compared could be saved as it never was."""
    milepost.save(frozen_state(0), tmp_path / "1", base=tmp_path / "0")
    state = frozen_state(1)
    from milepost.data import reuse

    really = reuse.compute_digests

    def changing(*given):
        really(*given)
        state["frozen"].add_(1)

    monkeypatch.setattr(reuse, "compute_digests", changing)
    with pytest.raises(milepost.InvalidState, match="frozen"):
        milepost.save(state, tmp_path / "2", base=tmp_path / "1")


@pytest.mark.parametrize(
    "options", [{"max_depth": 0}, {"max_waste": 2}, {"max_waste": "much"}, {"base": 3}, {"host_memory_bytes": 65536}]
)
def test_wrong_options_are_named(tmp_path, options):
    given = {"base": tmp_path / "1", **options}
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        milepost.save(frozen_state(), tmp_path / "2", **given)


def test_planner_of_global_plans_refuses_a_base(tmp_path):
    from milepost.planning import DefaultSavePlanner

    with pytest.raises(InvalidRequest, match="base"):
        milepost.save(
            frozen_state(), tmp_path / "1", base=tmp_path, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        )


def test_run_shares_what_stays(tmp_path):
    with Checkpointer(tmp_path, keep_last=2, incremental=True) as keeper:
        receipts = [keeper.save(frozen_state(step), step) for step in range(1, 6)]
        assert [one.data_bytes for one in receipts[1:]] == [160_000] * 4
        assert keeper.steps() == [4, 5]
        for step in (4, 5):
            target = frozen_state(-1)
            assert keeper.restore(target, step) == step
            assert same(frozen_state(step), target)
            assert keeper.open(step).verify().ok
        keeper.save(frozen_state(9), 5)  # again, over itself
        assert keeper.open(5)["step"] == 9
    stored = sum({p.stat().st_ino: p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()}.values())
    assert stored < FROZEN_BYTES + 4 * 160_000 + 100_000


@pytest.mark.parametrize("background", ["thread", "process"])
def test_async_saves_share_what_stays(tmp_path, background):
    state = frozen_state(0)
    with Checkpointer(tmp_path, keep_last=2, incremental=True, background=background) as keeper:
        for step in range(1, 4):
            state["adapter"] += 1
            state["step"] = step
            receipt = keeper.async_save(state, step).result()
        assert receipt.data_bytes == 160_000
        target = frozen_state(-1)
        assert keeper.restore(target) == 3
        assert same(state, target)


@pytest.mark.parametrize("stage", ["host", "overlap"])
@pytest.mark.parametrize("staging_bytes", [0, None])
def test_state_that_is_not_copied_before_it_is_compared(tmp_path, stage, staging_bytes):
    """Without staging memory the save reads the state itself, and the next step of the optimizer waits for that."""
    frozen, adapter = torch.nn.Linear(700, 300), torch.nn.Linear(300, 40)
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1)
    state = {"frozen": frozen, "adapter": adapter}
    wanted = {}
    with milepost.AsyncSaver(stage=stage, staging_bytes=staging_bytes) as saver:
        for step in range(1, 5):
            path, base = tmp_path / f"{step}", tmp_path / f"{step - 1}"
            wanted[step] = adapter.weight.detach().clone()
            pending = saver.save(state, path, base=base, optimizer=optimizer)
            adapter(torch.ones(2, 300)).sum().backward()
            optimizer.step()
            receipt = pending.result()
            assert receipt.reused_bytes == (0 if step == 1 else 700 * 300 * 4 + 300 * 4)
    for step, weight in wanted.items():
        with milepost.open(tmp_path / f"{step}") as checkpoint:
            assert torch.equal(checkpoint["adapter.weight"].read(), weight)
            assert torch.equal(checkpoint["frozen.weight"].read(), frozen.weight)
            assert checkpoint.verify().ok
