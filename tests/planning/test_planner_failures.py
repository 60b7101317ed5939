"""Planned saves and loads that go wrong: every rank raises, and the old checkpoint stands."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import milepost
import milepost.dcp
from milepost import CheckpointDamaged, InvalidRequest, InvalidState, StorageError
from milepost.comm import Call
from milepost.comm.distributed import ranks_of
from milepost.planning import CheckpointReader, CheckpointWriter, DefaultLoadPlanner, DefaultSavePlanner
from milepost.testing import run_ranks
from tests.planning.states import WHOLE, Central, state_of
from tests.ranks import spawn


class Lies(DefaultSavePlanner):
    def transform_object(self, write_item, object):  # noqa: A002
        found = super().transform_object(write_item, object)
        return found if write_item.tensor_data is None else found.half()


@pytest.mark.parametrize("kind", [Lies, type("CentralLies", (Lies, Central), {})])
def test_plan_contradicting_the_data_keeps_the_old_checkpoint(tmp_path, kind):
    milepost.save({"a": torch.ones(3)}, tmp_path)
    with pytest.raises(InvalidState, match=r"'a'.*float32.*float16"):
        milepost.save({"a": torch.zeros(3)}, tmp_path, planner=kind())
    assert torch.equal(milepost.open(tmp_path)["a"].read(), torch.ones(3))
    assert len(list(tmp_path.glob("data/*"))) == 1


@pytest.mark.parametrize(
    "step", ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data"]
)
def test_planner_error_in_any_step_reaches_all_ranks(tmp_path, step):
    class Fails(Central):
        pass

    def fail(self, *args, **kwargs):
        if comm_rank[id(self)] == (0 if step == "create_global_plan" else 1):
            raise ZeroDivisionError("a bug of the planner")
        return getattr(Central, step)(self, *args, **kwargs)

    setattr(Fails, step, fail)
    comm_rank = {}
    milepost.save({"a": torch.ones(3)}, tmp_path)

    def save(comm):
        planner = Fails()
        comm_rank[id(planner)] = comm.rank
        with pytest.raises(milepost.CheckpointError, match="a bug of the planner") as caught:
            milepost.save(state_of(comm.rank, 2), tmp_path, planner=planner, process_group=comm)
        assert set(caught.value.failures) == {0 if step == "create_global_plan" else 1}

    run_ranks(2, save)
    assert torch.equal(milepost.open(tmp_path)["a"].read(), torch.ones(3))
    assert len([path for path in tmp_path.glob("data/*/*") if path.is_file()]) == 1


def test_a_disk_that_fails_on_one_rank_leaves_nothing_of_a_planned_save(tmp_path, monkeypatch):
    from milepost.store import LocalStore

    real = LocalStore.writer

    def writer(self, name, size_bytes, *, direct=True):
        if name.endswith("00001.safetensors"):
            raise StorageError(f"cannot write {name}: no", errno=28)
        return real(self, name, size_bytes, direct=direct)

    monkeypatch.setattr(LocalStore, "writer", writer)

    def save(comm):
        with pytest.raises(StorageError, match="rank 1"):
            milepost.save(state_of(comm.rank, 2), tmp_path, planner=Central(), process_group=comm)

    run_ranks(2, save)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    with pytest.raises(milepost.CheckpointNotFound):
        milepost.open(tmp_path)


def test_a_planned_load_verifies_and_converts_only_within_a_kind(tmp_path):
    milepost.save({"a": torch.ones(1000), "i": torch.arange(4)}, tmp_path, planner=Central())
    target = {"a": torch.zeros(1000, dtype=torch.float64), "i": torch.zeros(4, dtype=torch.int32)}
    milepost.load(target, tmp_path, planner=DefaultLoadPlanner())
    assert torch.equal(target["a"], torch.ones(1000, dtype=torch.float64))
    assert torch.equal(target["i"], torch.arange(4, dtype=torch.int32))
    with pytest.raises(InvalidState, match=r"'a'.*float32.*int32"):
        milepost.load({"a": torch.zeros(1000, dtype=torch.int32)}, tmp_path, planner=DefaultLoadPlanner())
    with pytest.raises(RuntimeError, match="Missing key in checkpoint state_dict: x, y"):
        milepost.load({"x": torch.zeros(1), "y": 3}, tmp_path, planner=DefaultLoadPlanner())
    (path,) = tmp_path.glob("data/*/*")
    with path.open("r+b") as file:
        file.seek(4096 + 17)
        file.write(b"\xff")
    with pytest.raises(CheckpointDamaged):
        milepost.load(target, tmp_path, planner=DefaultLoadPlanner())


def test_requests_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="say where"):
        milepost.save({"a": 1})
    with pytest.raises(InvalidRequest, match="a dict"):
        milepost.save(torch.nn.Linear(2, 2), tmp_path, planner=Central())
    milepost.save({"a": 1}, tmp_path, planner=Central())
    with pytest.raises(InvalidRequest, match="overwrite"):
        milepost.save({"a": 1}, tmp_path, planner=Central(), overwrite=False)
    with pytest.raises(InvalidRequest, match="overwrite"):
        milepost.save({"a": 1}, storage_writer=CheckpointWriter(tmp_path, overwrite=False))
    assert CheckpointWriter.validate_checkpoint_id(tmp_path)
    assert not CheckpointWriter.validate_checkpoint_id("s3://")
    assert CheckpointReader(tmp_path).read_metadata().state_dict_metadata.keys() == {"a"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_planners_read_what_torch_saved_in_its_own_format(tmp_path):
    state = {"w": WHOLE.clone(), "n": {"l": [torch.ones(2), 3]}, "lr": 0.5, "flag": True}
    torch_dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    target = {"w": torch.zeros(8, 6), "n": {"l": [torch.zeros(2), 0]}, "lr": 0.0, "flag": False}
    milepost.load(target, tmp_path, planner=DefaultLoadPlanner())
    assert torch.equal(target["w"], WHOLE)
    assert torch.equal(target["n"]["l"][0], torch.ones(2))
    assert (target["n"]["l"][1], target["lr"], target["flag"]) == (3, 0.5, True)
    empty = {}
    milepost.load(empty, tmp_path, planner=milepost.planning.EmptyStateDictLoadPlanner(keys=["n"]))
    assert list(empty) == ["n"]


class Fragile:
    """A stateful object that fails on one rank."""

    def __init__(self, fails_in):
        self.fails_in = fails_in

    def state_dict(self):
        if self.fails_in == "state_dict":
            raise ZeroDivisionError("a bug of the object")
        return {"a": torch.ones(2)}

    def load_state_dict(self, state_dict):
        if self.fails_in == "load_state_dict":
            raise ZeroDivisionError("a bug of the object")


@pytest.mark.parametrize("planner", [Central, lambda: DefaultSavePlanner(flatten_state_dict=False)])
def test_a_stateful_object_that_fails_on_one_rank_fails_on_all(tmp_path, planner):
    def work(comm):
        def fails(call, in_what):
            with pytest.raises(milepost.CheckpointError, match="rank 1: ZeroDivisionError: a bug of the object"):
                call({"s": Fragile(in_what if comm.rank == 1 else "")})

        place = tmp_path / "kept"
        milepost.save({"s": {"a": torch.ones(2)}}, place, process_group=comm)
        fails(lambda s: milepost.save(s, tmp_path / "new", planner=planner(), process_group=comm), "state_dict")
        for step in ("state_dict", "load_state_dict"):
            fails(lambda s: milepost.load(s, place, planner=DefaultLoadPlanner(), process_group=comm), step)

    run_ranks(2, work, timeout_s=20)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("text", ["", "not \udcff text"])
def test_unprintable_error_still_reaches_all_ranks(tmp_path, text):
    class Mute(Exception):
        def __str__(self):
            return text or None  # None: a TypeError in str()

    class Fails(Central):
        def create_local_plan(self):
            raise Mute

    def save(comm):
        with pytest.raises(milepost.CheckpointError, match="rank 1: Mute"):
            milepost.save({}, tmp_path, planner=Fails() if comm.rank == 1 else Central(), process_group=comm)

    run_ranks(2, save, timeout_s=20)


def test_all_ranks_load_what_the_coordinator_found(tmp_path):
    class Slow(CheckpointReader):
        """On rank 1 another job replaces the checkpoint just before it is read there."""

        def read_metadata(self, *args, rank=0, **kwargs):
            if rank == 1:
                milepost.save({"a": torch.full((4,), 2.0)}, tmp_path)
            return super().read_metadata()

    milepost.save({"a": torch.full((4,), 1.0)}, tmp_path)

    def load(comm):
        state = {"a": torch.zeros(4)}
        try:
            milepost.load(state, storage_reader=Slow(tmp_path), process_group=comm)
        except CheckpointDamaged as error:
            return str(error).partition("is missing. If a newer save replaced this checkpoint")[1]
        return state["a"].tolist()

    first, second = run_ranks(2, load, timeout_s=20)
    assert first == second


class KeepsItsFirst(Central):
    """A planner that gives the plan of its first save again and again, with what storage said then."""

    def finish_plan(self, new_plan):
        self.first = getattr(self, "first", new_plan)
        return self.first


def test_what_was_written_for_another_save_is_not_committed(tmp_path):
    planners = [Central(), KeepsItsFirst()]

    def save(comm):
        state = {f"a{comm.rank}": torch.ones(3)}
        milepost.save(state, tmp_path / "1", planner=planners[comm.rank], process_group=comm)
        with pytest.raises(InvalidRequest, match="for another save: a1"):
            milepost.save(state, tmp_path / "2", planner=planners[comm.rank], process_group=comm)

    run_ranks(2, save, timeout_s=20)
    assert milepost.open(tmp_path / "1").verify().ok
    assert [path for path in (tmp_path / "2").rglob("*") if path.is_file()] == []


def test_metadata_that_says_something_else_than_the_plans_is_refused(tmp_path):
    class Contradicts(DefaultSavePlanner):
        def create_global_plan(self, all_plans):
            plans, metadata = super().create_global_plan(all_plans)
            saved = metadata.state_dict_metadata["a"]
            other = replace(saved, properties=replace(saved.properties, dtype=torch.float16))
            return plans, replace(metadata, state_dict_metadata={"a": other})

    with pytest.raises(InvalidRequest, match=r"'a' is float16.*float32.*was written"):
        milepost.save({"a": torch.ones(3)}, tmp_path, planner=Contradicts())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_where_nobody_can_say_whether_it_was_committed_nothing_is_removed(tmp_path):
    from milepost.store import LocalStore

    class Breaks(LocalStore):
        """A store that fails for good right after the manifest came into being."""

        broken = False

        def create(self, name, *data):
            super().create(name, *data)
            self.broken = True
            raise StorageError("the first trouble", errno=5)

        def list(self, prefix, **depth):
            if self.broken:
                raise StorageError("the second trouble", errno=5)
            return super().list(prefix, **depth)

        def reader(self, name, **expected):
            if self.broken:
                raise StorageError("the second trouble", errno=5)
            return super().reader(name, **expected)

    with pytest.raises(StorageError, match=r"the (first|second) trouble"):
        milepost.save({"a": torch.ones(4)}, Breaks(tmp_path), planner=Central())
    assert torch.equal(milepost.open(tmp_path)["a"].read(), torch.ones(4))


@pytest.mark.parametrize("base", [Central, DefaultSavePlanner])
def test_planners_may_use_the_same_memory_for_every_item(tmp_path, base):
    class Saves(base):
        def resolve_data(self, write_item):
            found = super().resolve_data(write_item)
            self.memory = getattr(self, "memory", torch.empty_like(found))
            return self.memory.copy_(found)

    class Loads(DefaultLoadPlanner):
        def resolve_tensor(self, read_item):
            self.memory = getattr(self, "memory", torch.empty(1 << 20))
            return self.memory[: read_item.lengths[0]]

        def commit_tensor(self, read_item, tensor):
            super().resolve_tensor(read_item).copy_(tensor)

    state = {f"w{i}": torch.full((1 << 20,), float(i)) for i in range(40)}
    milepost.save(state, tmp_path, planner=Saves())
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    milepost.load(found, tmp_path, planner=Loads())
    assert [name for name in state if not torch.equal(state[name], found[name])] == []


def large_notes(rank):
    comm, phase, note = ranks_of(None, 60.0), Call("testing", "notes").at("a step"), bytes(20 << 20)
    answer = comm.meet(phase, note[:-rank] if rank else note, lambda notes: b"".join(notes))
    mine = comm.hand_out(phase, [note, note + b"1"] if rank == 0 else None)
    told = comm.announce(phase, note if rank == 0 else None)
    return len(answer), len(mine), len(told)


@pytest.mark.slow
def test_plans_may_be_larger_than_what_the_jobs_store_takes_at_once():
    size = 20 << 20
    assert spawn(2, large_notes) == [(2 * size - 1, size + rank, size) for rank in range(2)]


def empty_shards(rank, folder):
    mesh, part = init_device_mesh("cpu", (3,)), DeviceMesh("cpu", [0, 2])
    state = {"short": distribute_tensor(torch.arange(2.0), mesh, [Shard(0)])}
    if rank != 1:
        state["part"] = distribute_tensor(torch.arange(1.0, 2.0), part, [Shard(0)])
    for name, planner in (("central", Central()), ("half", __import__("planners").Half())):
        milepost.save(state, f"{folder}/{name}", planner=planner)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        milepost.dcp.save(state, checkpoint_id=f"{folder}/dcp")


@pytest.mark.slow
def test_rank_with_an_empty_dtensor_part_plans_nothing(tmp_path):
    spawn(3, empty_shards, str(tmp_path))
    for name in ("central", "half", "dcp"):
        with milepost.open(tmp_path / name) as checkpoint:
            assert checkpoint.verify().ok
            assert [checkpoint[key].read().tolist() for key in ("short", "part")] == [[0.0, 1.0], [1.0]]


def no_such_coordinator(rank, folder):
    with pytest.raises(InvalidRequest, match="one of 0 to 1, not 2"):
        milepost.Checkpointer(folder, coordinator_rank=2).save({}, 1)


def test_a_coordinator_that_is_no_rank_is_refused_at_once(tmp_path):
    spawn(2, no_such_coordinator, str(tmp_path))
