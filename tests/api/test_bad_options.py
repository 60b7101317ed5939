"""A wrong option on one rank is raised on every rank, at once, by every call. Nothing is saved or loaded."""

import contextlib
import time

import pytest
import torch

import milepost
from milepost.errors import CheckpointError, InvalidRequest, StorageError
from milepost.planning import CheckpointReader, CheckpointWriter, DefaultLoadPlanner, DefaultSavePlanner
from milepost.store import MemoryStore
from milepost.testing import CountingStore, run_ranks

WORLD, ODD = 3, 1
TIMEOUT_S = 60.0
PROMPT_S = 25.0
"""What ends within this did not wait for a timeout."""


class Renaming(DefaultSavePlanner):
    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        super().set_up_planner({f"new.{k}": v for k, v in state_dict.items()}, storage_meta, is_coordinator)


class Global(DefaultSavePlanner):
    def create_global_plan(self, all_plans):
        return super().create_global_plan(all_plans)


def state():
    return {"w": torch.ones(3), "step": 1}


def outcomes(call, odd=ODD, **wrong):
    """What `call(comm, **options)` raised on each rank; only one of them gets the wrong options."""

    def work(comm):
        try:
            call(comm, **(wrong if comm.rank == odd else {}))
        except Exception as error:
            return error
        return None

    start = time.monotonic()
    found = run_ranks(WORLD, work, timeout_s=TIMEOUT_S)
    assert time.monotonic() - start < PROMPT_S
    return found


def check(errors, text, odd=ODD):
    for error in errors:
        assert isinstance(error, InvalidRequest), errors
        assert text in str(error)
    for rank, error in enumerate(errors):
        if rank != odd:
            assert list(error.failures) == [odd]


WRONG_SAVES = [
    ({"colour": 1}, "colour"),
    ({"on_difference": "ignore"}, "on_difference"),
    ({"host_memory_bytes": 1}, "host_"),
    ({"overwrite": "no"}, "overwrite"),
]
WRONG_LOADS = [({"colour": 1}, "colour"), ({"host_memory_bytes": 1}, "host_memory_bytes"), ({"verify": 0}, "verify")]
PLANNERS = [None, DefaultSavePlanner, Renaming, Global]


@pytest.mark.parametrize("odd", [0, ODD])
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(("wrong", "text"), WRONG_SAVES)
def test_save(wrong, text, planner, odd):
    store = MemoryStore()

    def call(comm, **options):
        milepost.save(state(), store, process_group=comm, planner=planner and planner(), **options)

    check(outcomes(call, odd, **wrong), text, odd)
    assert not store.objects


@pytest.mark.parametrize("odd", [0, ODD])
def test_save_with_a_storage_writer(odd):
    store = MemoryStore()

    def call(comm, **options):
        milepost.save(state(), storage_writer=CheckpointWriter(store), process_group=comm, **options)

    check(outcomes(call, odd, colour=1), "colour", odd)
    assert not store.objects


@pytest.mark.parametrize("odd", [0, ODD])
@pytest.mark.parametrize("planner", [None, DefaultLoadPlanner])
@pytest.mark.parametrize(("wrong", "text"), WRONG_LOADS)
def test_load(wrong, text, planner, odd):
    store, target = MemoryStore(), {"w": torch.zeros(3), "step": 0}
    milepost.save(state(), store)

    def call(comm, **options):
        milepost.load(target, store, process_group=comm, planner=planner and planner(), **options)

    check(outcomes(call, odd, **wrong), text, odd)
    assert target["step"] == 0
    if planner is None:  # planners of other ranks may read before they hear of it
        assert not target["w"].any()


def test_load_with_a_storage_reader():
    store = MemoryStore()
    milepost.save(state(), store)

    def call(comm, **options):
        milepost.load(state(), storage_reader=CheckpointReader(store), process_group=comm, **options)

    check(outcomes(call, colour=1), "colour")


@pytest.mark.parametrize("odd", [0, ODD])
def test_explain(odd):
    store = MemoryStore()
    milepost.save(state(), store)

    def call(comm, **options):
        milepost.explain(state(), store, process_group=comm, **options)

    check(outcomes(call, odd, verify=False), "verify", odd)


@pytest.fixture
def shared():
    yield
    milepost.close_async()


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("odd", [0, ODD])
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(("wrong", "text"), [*WRONG_SAVES, ({"stage": "later"}, "stage")])
def test_async_save(wrong, text, planner, odd):
    store = MemoryStore()

    def call(comm, **options):
        own = planner and planner()
        milepost.async_save(state(), store, process_group=comm, planner=own, **options).result(TIMEOUT_S)

    check(outcomes(call, odd, **wrong), text, odd)
    assert not store.objects


@pytest.mark.usefixtures("shared")
def test_async_save_in_a_background_that_does_not_exist():
    store = MemoryStore()

    def call(comm, **options):
        milepost.async_save(state(), store, process_group=comm, **options).result(TIMEOUT_S)

    check(outcomes(call, background="fork"), "background")


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("odd", [0, ODD])
def test_prewarm(odd):
    def call(comm, **options):
        milepost.prewarm(state(), process_group=comm, **options)

    check(outcomes(call, odd, colour=1), "colour", odd)


class Full(CountingStore):
    def before(self, number, call):
        if call.startswith("create"):
            raise StorageError("No space left on device")


def test_a_wrong_option_does_not_hide_the_error_of_an_earlier_save():
    def work(comm):
        with milepost.AsyncSaver(process_group=comm) as saver:
            saver.save(state(), Full(MemoryStore()))
            saver.join()
            met = []
            for options in ({"colour": 1} if comm.rank == ODD else {}, {}):
                try:
                    saver.save(state(), "memory://after-an-error", **options).result(TIMEOUT_S)
                except CheckpointError as error:
                    met.append(str(error))
            return met

    for met in run_ranks(WORLD, work, timeout_s=TIMEOUT_S):
        assert len(met) == 1
        assert "No space left" in met[0]


def test_wrong_option_does_not_take_the_error_of_an_earlier_save():
    saver = milepost.AsyncSaver()
    saver.save(state(), Full(MemoryStore()))
    with pytest.raises(StorageError, match="No space left"):
        saver.save(state(), "memory://refused", stage="wrong")
    with pytest.raises(InvalidRequest, match="wrong"):
        saver.save(state(), "memory://refused", stage="wrong")
    saver.close()


@pytest.mark.parametrize("call", [milepost.save, milepost.load, milepost.explain, milepost.async_save])
def test_one_process(call):
    with pytest.raises(InvalidRequest, match=r"colour, shape: .* no such option"):
        call(state(), "memory://one-process", colour=1, shape=2)
    milepost.close_async()


@pytest.mark.parametrize("odd", [0, ODD])
@pytest.mark.parametrize("call", ["save", "async_save"])
def test_checkpointer_saves(call, odd):
    store = MemoryStore()

    def work(comm, **options):
        with milepost.Checkpointer(store, process_group=comm) as keeper:
            pending = getattr(keeper, call)(state(), 1, **options)
            if call == "async_save":
                pending.result(TIMEOUT_S)

    check(outcomes(work, odd, timeout_s=3), "timeout_s: a save has no such option", odd)
    assert not store.objects


@pytest.mark.parametrize("odd", [0, ODD])
@pytest.mark.parametrize("verify_first", [False, True])
def test_checkpointer_restore(verify_first, odd):
    store, target = MemoryStore(), {"w": torch.zeros(3), "step": 0}
    milepost.Checkpointer(store).save(state(), 1)

    def work(comm, **options):
        milepost.Checkpointer(store, process_group=comm).restore(target, verify_first=verify_first, **options)

    check(outcomes(work, odd, process_group=None), "process_group: a restore has no such option", odd)
    assert target["step"] == 0


# Right options that differ between ranks: the coordinator's count.


def test_ranks_that_differ_in_on_difference_write_one_checkpoint():
    store, whole = MemoryStore(), torch.arange(2 << 20, dtype=torch.float32)

    def work(comm):
        mine = {"w": whole.clone(), "rng": milepost.PerRank(torch.ones(4 << 20))}
        milepost.save(mine, store, process_group=comm, on_difference="warn" if comm.rank else "error")

    run_ranks(2, work, timeout_s=TIMEOUT_S)
    with milepost.open(store) as checkpoint:
        assert checkpoint.verify().ok
        assert torch.equal(checkpoint["w"].read(), whole)


@pytest.mark.parametrize("coordinators", ["error", "warn"])
def test_the_coordinators_on_difference_counts_for_all(coordinators):
    store, other = MemoryStore(), {"error": "warn", "warn": "error"}[coordinators]

    def work(comm):
        how = coordinators if comm.rank == 0 else other
        try:
            milepost.save({"step": comm.rank}, store, process_group=comm, on_difference=how)
        except milepost.RanksDisagree:
            return "error"
        return "warn"

    with pytest.warns(RuntimeWarning, match="should be equal") if coordinators == "warn" else contextlib.nullcontext():
        start = time.monotonic()
        assert run_ranks(WORLD, work, timeout_s=TIMEOUT_S) == [coordinators] * WORLD
        assert time.monotonic() - start < PROMPT_S


@pytest.mark.parametrize("coordinators", [True, False])
def test_the_coordinators_verify_first_counts_for_all(coordinators):
    store = MemoryStore()
    milepost.Checkpointer(store).save(state(), 1)

    def work(comm):
        wish = coordinators if comm.rank == 0 else not coordinators
        return milepost.Checkpointer(store, process_group=comm).restore(state(), verify_first=wish)

    start = time.monotonic()
    assert run_ranks(WORLD, work, timeout_s=TIMEOUT_S) == [1] * WORLD
    assert time.monotonic() - start < PROMPT_S


@pytest.mark.parametrize("odd", [0, ODD])
@pytest.mark.parametrize("wrong", [{"host_memory_bytes": 1}, {"to": "zip"}, {"max_shard_bytes": 0}])
def test_convert(tmp_path, wrong, odd):
    milepost.save(state(), tmp_path / "source")

    def call(comm, **options):
        milepost.convert(tmp_path / "source", tmp_path / "target", process_group=comm, **options)

    check(outcomes(call, odd, **wrong), next(iter(wrong)), odd)
    assert not (tmp_path / "target").exists()


def test_export_safetensors(tmp_path):
    def call(comm, **options):
        milepost.export_safetensors({"w": torch.ones(3)}, tmp_path / "target", process_group=comm, **options)

    check(outcomes(call, host_memory_bytes=1), "host_memory_bytes")


def test_prewarm_raises_an_unread_error_of_one_rank_on_all():
    def work(comm):
        with milepost.AsyncSaver(process_group=comm) as saver:
            pending = saver.save(state(), Full(MemoryStore()))
            saver.join()
            if comm.rank == 0:
                assert pending.exception() is not None
            try:
                saver.prewarm(state())
            except CheckpointError as error:
                return str(error)
            return "ready"

    start = time.monotonic()
    for met in run_ranks(WORLD, work, timeout_s=TIMEOUT_S):
        assert "No space left" in met
    assert time.monotonic() - start < PROMPT_S


def test_options_of_the_call_hold_for_a_writer_with_a_global_plan(tmp_path):
    writer = CheckpointWriter(tmp_path)
    milepost.save(state(), storage_writer=writer, planner=Global(), metadata={"a": 1})
    assert milepost.open(tmp_path).metadata == {"a": 1}
    with pytest.raises(InvalidRequest, match="overwrite=True"):
        milepost.save(state(), storage_writer=writer, planner=Global(), overwrite=False)
    milepost.save(state(), storage_writer=writer, planner=Global())
    assert milepost.open(tmp_path).metadata == {}
