"""The planner and storage protocols through `save` and `load`: order of calls, the five patterns, storage of others, trouble."""

import io
import sys
import warnings
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
import torch.distributed.checkpoint._extension as torch_extension
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.futures import Future

import milepost
import milepost.dcp
from milepost import CheckpointDamaged, InvalidRequest, InvalidState, StorageError
from milepost.comm import Phase
from milepost.comm.distributed import ranks_of
from milepost.planning import CheckpointReader, CheckpointWriter, DefaultLoadPlanner, DefaultSavePlanner, WriteResult
from milepost.planning.torch_adapters import MilepostReader, MilepostWriter
from milepost.store import MemoryStore
from milepost.testing import run_ranks
from tests.ranks import spawn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

WHOLE = torch.arange(48.0).view(8, 6)


class Central(DefaultSavePlanner):
    """Takes part in the global plan, and changes nothing."""

    def create_global_plan(self, all_plans):
        self.seen = [plan.usable for plan in all_plans]
        return super().create_global_plan(all_plans)


def state_of(rank=0, world=1, fill=lambda t: t.clone()):
    rows = slice(8 * rank // world, 8 * (rank + 1) // world)
    part = milepost.Sharded((8, 6), {(rows.start, 0): fill(WHOLE[rows])})
    inner = [fill(torch.arange(3)), {"deep": fill(torch.ones(2, dtype=torch.bfloat16))}]
    return {"cut": part, "plain": fill(WHOLE[0]), "n": {"list": inner, "lr": 0.1}, "name": "x", "pair": (1, 2)}


def blank(rank=0, world=1):
    state = state_of(rank, world, torch.zeros_like)
    state["n"]["lr"], state["name"], state["pair"] = 0.0, "", ()
    return state


def assert_full(state, rank=0, world=1):
    expected = state_of(rank, world)
    assert all(torch.equal(a.data, b.data) for a, b in zip(state["cut"].parts, expected["cut"].parts, strict=True))
    assert torch.equal(state["plain"], expected["plain"])
    assert torch.equal(state["n"]["list"][0], expected["n"]["list"][0])
    assert torch.equal(state["n"]["list"][1]["deep"], expected["n"]["list"][1]["deep"])
    assert (state["n"]["lr"], state["name"], state["pair"]) == (0.1, "x", (1, 2))


# ---- one format, whoever plans


@pytest.mark.parametrize("planner", [DefaultSavePlanner, Central, type("Local", (DefaultSavePlanner,), {}), None])
@pytest.mark.parametrize("world", [1, 3])
def test_whoever_plans_the_checkpoint_loads_on_any_ranks_with_and_without_a_planner(planner, world):
    store = MemoryStore()
    receipts = run_ranks(
        world,
        lambda comm: milepost.save(
            state_of(comm.rank, world), store, planner=planner and planner(), process_group=comm
        ),
    )
    checkpoint = milepost.open(store)
    assert {(r.generation, r.save_id, r.world, r.data_bytes) for r in receipts} == {
        (1, checkpoint.manifest.save_id, world, WHOLE.nbytes + WHOLE[0].nbytes + 3 * 8 + 2 * 2)
    }
    assert checkpoint.verify().ok
    assert torch.equal(checkpoint["cut"].read(), WHOLE)
    assert checkpoint.state()["pair"] == (1, 2)
    written = sum(file.size_bytes - file.header_bytes for file in checkpoint.manifest.files)
    assert written < WHOLE.nbytes + WHOLE[0].nbytes + 100  # nothing twice
    for ranks in (1, 2):
        for planned in (False, True):

            def load(comm, ranks=ranks, planned=planned):
                state = blank(comm.rank, ranks)
                milepost.load(state, store, process_group=comm, planner=DefaultLoadPlanner() if planned else None)
                assert_full(state, comm.rank, ranks)

            run_ranks(ranks, load)


def test_plans_are_gathered_only_where_someone_wants_to_see_them():
    def steps_of(planner):
        seen = []

        def run(comm):
            class Watched:
                def __getattr__(self, name):
                    return getattr(comm, name)

                def meet(self, phase, payload, decide):
                    seen.append((phase.step, len(payload)))
                    return comm.meet(phase, payload, decide)

                def announce(self, phase, note):
                    return comm.announce(phase, note)

                def hand_out(self, phase, notes):
                    return comm.hand_out(phase, notes)

                def leave(self, phase, payload):
                    return comm.leave(phase, payload)

                def index_of(self, rank):
                    return comm.index_of(rank)

                rank, size, coordinator, group = comm.rank, comm.size, comm.coordinator, comm.group

            state = {f"t{i}": torch.ones(4) for i in range(200)}
            milepost.save(state, store, planner=planner(), process_group=Watched())
            milepost.load(dict(state), store, planner=DefaultLoadPlanner(), process_group=Watched())

        store = MemoryStore()
        run_ranks(2, run)
        return seen

    local = steps_of(type("Local", (DefaultSavePlanner,), {}))
    assert "planning" not in {step for step, _ in local}
    central = steps_of(Central)
    assert max(size for step, size in central if step == "planning") > 10_000


def _examples(rank, folder):
    import planners

    return planners.run(folder)


def test_the_five_patterns_of_the_documentation_run_on_three_ranks(tmp_path):
    results = spawn(3, _examples, str(tmp_path))
    for found in results:
        assert found["keys"] == ["ema_weight", "ema_bias", "ema_step"]
        assert found["renamed"] == {"weight": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "bias": [1.0, 1.0], "step": 3}
        assert found["half"] == "float16"
        assert found["writers"] == 2  # two tensors; the third rank's turn is the value, which needs no file
        assert found["notes"] == [{"rank": r, "seen": 100 * r} for r in range(3)]
        assert found["made"] == ["weight"]
        assert found["model"] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def _dtensors(rank, folder, world, dims):
    mesh = init_device_mesh("cpu", (world,))
    save_dim, load_dim = dims
    whole = torch.arange(7 * 5, dtype=torch.float32).view(7, 5)
    state = {"w": distribute_tensor(whole, mesh, [Shard(save_dim)]), "b": torch.ones(3), "step": 4}
    for name, planner in (("central", Central()), ("half", __import__("planners").Half())):
        milepost.save(state, f"{folder}/{name}", planner=planner)
    target = {"w": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(load_dim)]), "b": torch.zeros(3), "step": 0}
    milepost.load(target, f"{folder}/central", planner=DefaultLoadPlanner())
    assert torch.equal(target["w"].full_tensor(), whole)
    milepost.load(target, f"{folder}/half", planner=DefaultLoadPlanner())  # float16 into float32
    assert torch.equal(target["w"].full_tensor(), whole)
    assert target["step"] == 4
    assert isinstance(target["w"], DTensor)


@pytest.mark.parametrize("dims", [(0, 1), (1, 0)])
def test_dtensors_by_plans_onto_another_dimension(tmp_path, dims):
    spawn(3, _dtensors, str(tmp_path), 3, dims)
    with milepost.open(tmp_path / "half") as checkpoint:
        assert checkpoint.tensors["w"].dtype == torch.float16
        assert type(checkpoint.tensors["w"].layout).__name__ == "Grid"  # described by its layout, not by its boxes


@pytest.mark.parametrize("module", ["milepost", "milepost.dcp"])
def test_data_that_a_planner_sends_with_its_local_plan_is_not_lost(module):
    class Notes(DefaultSavePlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            return plan if self.note is None else replace(plan, planner_data={f"note {self.note}": 5})

    store = MemoryStore()

    def save(comm):
        planner = Notes()
        planner.note = comm.rank if comm.rank < 2 else None  # the third has none
        state = {"a": torch.ones(3), "n": {"b": 4}}
        if module == "milepost":
            milepost.save(state, store, planner=planner, process_group=comm)
        else:
            milepost.dcp.save(state, storage_writer=CheckpointWriter(store), planner=planner, process_group=comm)

    run_ranks(3, save)
    found = CheckpointReader(store).read_metadata().planner_data
    assert (found["note 0"], found["note 1"]) == (5, 5)
    assert torch.equal(milepost.open(store)["a"].read(), torch.ones(3))


# ---- plan caching


def test_ranks_whose_plan_did_not_change_send_nothing_and_changes_are_noticed():
    store = MemoryStore()
    planners = [Central(enable_plan_caching=True) for _ in range(3)]

    def save(change):
        def run(comm):
            state = {"a": torch.full((4,), 1.0 + change), f"own{comm.rank}": torch.ones(2)}
            if change == 2 and comm.rank == 1:
                state["own1"] = torch.ones(2, dtype=torch.bfloat16)
            milepost.save(state, store, planner=planners[comm.rank], process_group=comm)

        run_ranks(3, run)
        return planners[0].seen

    assert save(0) == [True, True, True]
    assert save(1) == [False, False, False]
    assert torch.equal(milepost.open(store)["a"].read(), torch.full((4,), 2.0))
    assert save(2) == [False, True, False]
    assert milepost.open(store).tensors["own1"].dtype == torch.bfloat16
    assert save(2) == [False, False, False]
    assert milepost.open(store).verify().ok


@pytest.mark.parametrize("failing", [0, 1])
def test_plans_that_are_kept_survive_a_rank_that_failed_after_planning(failing):
    class Fails(Central):
        fail = False

        def finish_plan(self, new_plan):
            if self.fail:
                raise ZeroDivisionError("a bug of the planner")
            return super().finish_plan(new_plan)

    store, planners = MemoryStore(), [Fails(enable_plan_caching=True) for _ in range(2)]

    def save(number, fail=False):
        def run(comm):
            planners[comm.rank].fail = fail and comm.rank == failing
            state = {"a": torch.full((3,), float(number)), f"own{comm.rank}": torch.ones(2)}
            milepost.save(state, store, planner=planners[comm.rank], process_group=comm)

        run_ranks(2, run)

    save(1)
    with pytest.raises(milepost.CheckpointError, match="a bug of the planner"):
        save(2, fail=True)
    for number in (3, 4):
        save(number)
        assert milepost.open(store)["a"].read().tolist() == [number] * 3
    assert planners[0].seen == [False, False]


# ---- lazy data


@pytest.mark.parametrize("base", [DefaultSavePlanner, Central])
def test_data_is_made_when_it_is_written_and_let_go_then(tmp_path, base):
    alive, most = weakref.WeakSet(), []

    class Copies(base):
        def transform_object(self, write_item, object):  # noqa: A002
            made = super().transform_object(write_item, object)
            if isinstance(made, torch.Tensor):
                made = made.clone()
                alive.add(made)
                most.append(len(alive))
            return made

    state = {f"t{i}": torch.full((300_000,), float(i)) for i in range(60)}
    milepost.save(state, tmp_path, planner=Copies(), transfer=milepost.Transfer(2, 1 << 20))
    assert len(most) == 60  # each once: a tensor that lies in several blocks is not made for each of them
    assert max(most) <= 8
    with milepost.open(tmp_path) as checkpoint:
        assert all(torch.equal(checkpoint[key].read(), value) for key, value in state.items())


# ---- storage of others


class Shelf:
    """What a test's own storage keeps."""

    def __init__(self):
        self.data, self.metadata, self.calls = {}, None, []


class ShelfWriter(milepost.planning.StorageWriter):
    def __init__(self, shelf):
        self.shelf = shelf

    def reset(self, checkpoint_id=None):
        self.shelf.calls.append("reset")

    def set_up_storage_writer(self, is_coordinator):
        self.shelf.calls.append("set_up")

    def prepare_local_plan(self, plan):
        self.shelf.calls.append("local")
        return plan

    def prepare_global_plan(self, plans):
        self.shelf.calls.append("global")
        return [replace(plan, storage_data=f"place {rank}") for rank, plan in enumerate(plans)]

    def write_data(self, plan, planner):
        self.shelf.calls.append("write")
        results = []
        for item in plan.items:
            data = planner.resolve_data(item)
            self.shelf.data[item.index] = data.getvalue() if isinstance(data, io.BytesIO) else data.clone()
            results.append(WriteResult(item.index, 1, plan.storage_data))
        future = Future()
        future.set_result(results)
        return future

    def finish(self, metadata, results):
        self.shelf.calls.append("finish")
        self.shelf.metadata = metadata
        self.shelf.places = {result.storage_data for rank in results for result in rank}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True


class ShelfReader(milepost.planning.StorageReader):
    def __init__(self, shelf):
        self.shelf = shelf

    def reset(self, checkpoint_id=None):
        pass

    def read_metadata(self):
        return self.shelf.metadata

    def set_up_storage_reader(self, metadata, is_coordinator):
        pass

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans):
        return plans

    def read_data(self, plan, planner):
        for item in plan.items:
            data = self.shelf.data[item.storage_index]
            if isinstance(data, bytes):
                planner.load_bytes(item, io.BytesIO(data))
                continue
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                data = data.narrow(dim, start, length)
            target = planner.resolve_tensor(item)
            target.copy_(data)
            planner.commit_tensor(item, target)
        future = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True


def test_a_writer_and_a_reader_of_the_users_own_work_on_any_ranks():
    shelf = Shelf()
    run_ranks(
        2, lambda comm: milepost.save(state_of(comm.rank, 2), storage_writer=ShelfWriter(shelf), process_group=comm)
    )
    assert [shelf.calls.count(name) for name in ("reset", "set_up", "local", "global", "write", "finish")] == [
        2,
        2,
        2,
        1,
        2,
        1,
    ]
    assert shelf.places == {"place 0", "place 1"}

    def load(comm):
        state = blank(comm.rank, 3)
        milepost.load(state, storage_reader=ShelfReader(shelf), process_group=comm)
        assert_full(state, comm.rank, 3)

    run_ranks(3, load)


def _with_torch(rank, folder):
    state = {"w": torch.arange(6.0), "n": {"v": [1, "x"]}, "lr": 0.5}
    zero = {"w": torch.zeros(6), "n": {"v": []}, "lr": 0.0}
    # Our functions, torch's storage; torch's functions read it.
    milepost.save(state, f"{folder}/theirs", storage_writer=torch_dcp.FileSystemWriter(f"{folder}/theirs"))
    found = {"w": torch.zeros(6), "n": {"v": []}, "lr": 0.0}
    torch_dcp.load(found, checkpoint_id=f"{folder}/theirs")
    assert torch.equal(found["w"], state["w"])
    assert (found["n"], found["lr"]) == (state["n"], 0.5)
    found = dict(zero, w=torch.zeros(6))
    milepost.load(found, f"{folder}/theirs", storage_reader=torch_dcp.FileSystemReader(f"{folder}/theirs"))
    assert torch.equal(found["w"], state["w"])
    # Torch's functions, our storage; our functions read it.
    for turn in range(3):
        state["lr"] = turn
        torch_dcp.save(
            state,
            storage_writer=MilepostWriter(f"{folder}/ours"),
            planner=torch_dcp.DefaultSavePlanner(enable_plan_caching=True),
        )
    found = dict(zero, w=torch.zeros(6))
    torch_dcp.load(found, storage_reader=MilepostReader(f"{folder}/ours"))
    assert torch.equal(found["w"], state["w"])
    assert found["lr"] == 2
    found = milepost.load({"w": torch.zeros(6), "n": {"v": []}, "lr": 0}, f"{folder}/ours")
    assert (found["lr"], found["n"]) == (2, {"v": [1, "x"]})
    # Torch's planners, our functions and storage.
    milepost.save(state, f"{folder}/planned", planner=torch_dcp.DefaultSavePlanner())
    found = dict(zero, w=torch.zeros(6))
    milepost.load(found, f"{folder}/planned", planner=torch_dcp.DefaultLoadPlanner())
    assert torch.equal(found["w"], state["w"])


def test_torchs_functions_storage_and_planners_mix_with_ours_on_two_ranks(tmp_path):
    spawn(2, _with_torch, str(tmp_path))
    assert milepost.open(tmp_path / "ours").verify().ok


# ---- stream transforms, and bytes of the planner's own


class Rot(milepost.planning.StreamTransformExtension):
    """Adds one to every byte, and remembers nothing."""

    @staticmethod
    def registry_name():
        return "rot@tests"

    @staticmethod
    def from_descriptor(version):
        if version != "7":
            raise ValueError("another rot")
        return Rot()

    def get_descriptor(self):
        return "rot@tests/7"

    def transform_to(self, output):
        class Writer(io.RawIOBase):
            def write(self, data):
                output.write(bytes((byte + 1) % 256 for byte in bytes(data)))
                return len(data)

        return Writer()

    def transform_from(self, input):  # noqa: A002
        return io.BytesIO(bytes((byte - 1) % 256 for byte in input.read()))


@pytest.mark.parametrize("order", [["zstd"], ["rot"], ["zstd", "rot"], ["rot", "zstd"]])
def test_stream_transforms_are_recorded_and_undone_by_every_reader(tmp_path, monkeypatch, order):
    monkeypatch.setitem(milepost.data.transforms.REGISTRY.extensions, "rot@tests", Rot)
    kinds = {"zstd": milepost.planning.ZStandard, "rot": Rot}
    run_ranks(
        2,
        lambda comm: milepost.save(
            state_of(comm.rank, 2),
            storage_writer=CheckpointWriter(tmp_path, transforms=[kinds[name]() for name in order]),
            process_group=comm,
        ),
    )
    with milepost.open(tmp_path) as checkpoint:
        assert {t.transforms for t in checkpoint.manifest.tensors} == {
            tuple(kinds[name]().get_descriptor() for name in order)
        }
        assert checkpoint.verify().ok
        assert torch.equal(checkpoint["cut"][2:5, 1:3], WHOLE[2:5, 1:3])
    for planner in (None, DefaultLoadPlanner()):
        state = blank()
        milepost.load(state, tmp_path, planner=planner)
        assert_full(state)
    if "rot" in order:
        monkeypatch.delitem(milepost.data.transforms.REGISTRY.extensions, "rot@tests")
        with pytest.raises(milepost.UnsupportedFormat, match="rot@tests"):
            milepost.load(blank(), tmp_path)
        registry = milepost.planning.ExtensionRegistry()
        registry.register(Rot)
        state = blank()
        milepost.load(state, storage_reader=CheckpointReader(tmp_path, registry=registry))
        assert_full(state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_transforms_of_torchs_own_format_are_undone_by_what_is_registered(tmp_path, monkeypatch):
    class Theirs(Rot, torch_extension.StreamTransformExtension):
        """The same for torch's writer, which closes the stream below."""

        def transform_to(self, output):
            inner = super().transform_to(output)
            inner.close = output.close
            return inner

    state = {"w": WHOLE.clone(), "lr": 0.5}
    writer = torch_dcp.FileSystemWriter(tmp_path, _extensions=[torch_extension.ZStandard(), Theirs()])
    torch_dcp.save(state, storage_writer=writer, no_dist=True)
    with pytest.raises(milepost.UnsupportedFormat, match="rot@tests"):
        milepost.load({"w": torch.zeros(8, 6), "lr": 0.0}, tmp_path)
    monkeypatch.setitem(milepost.data.transforms.REGISTRY.extensions, "rot@tests", Rot)
    found = milepost.load({"w": torch.zeros(8, 6), "lr": 0.0}, tmp_path)
    assert torch.equal(found["w"], WHOLE)
    assert found["lr"] == 0.5


def test_zstd_makes_it_smaller_and_a_bomb_is_refused(tmp_path, monkeypatch):
    state = {"a": torch.zeros(300_000)}
    milepost.save(state, storage_writer=CheckpointWriter(tmp_path, transforms=[milepost.planning.ZStandard()]))
    (path,) = tmp_path.glob("data/*/*")
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(milepost.planning.ZStandard, "transform_from", lambda self, stored: io.BytesIO(bytes(10**8)))
    with pytest.raises(milepost.UnsafeCheckpoint, match="more than 1200000 bytes"):
        milepost.load({"a": torch.ones(300_000)}, tmp_path)
    monkeypatch.setattr(milepost.planning.ZStandard, "transform_from", lambda self, stored: io.BytesIO(bytes(10)))
    with pytest.raises(CheckpointDamaged, match="10 bytes"):
        milepost.load({"a": torch.ones(300_000)}, tmp_path)


@pytest.mark.parametrize("base", [DefaultSavePlanner, Central])
def test_bytes_that_a_planner_gives_come_back_as_they_are(tmp_path, base):
    class Raw(base):
        def transform_object(self, write_item, object):  # noqa: A002
            return io.BytesIO(object) if isinstance(object, bytes) else super().transform_object(write_item, object)

    class Reads(DefaultLoadPlanner):
        def load_bytes(self, read_item, value):
            taken[read_item.dest_index.fqn] = value.getvalue()

    taken = {}
    milepost.save({"raw": b"\x00\x01 raw", "none": b"", "t": torch.ones(2)}, tmp_path, planner=Raw())
    milepost.load({"raw": b"", "none": b""}, tmp_path, planner=Reads())
    assert taken == {"raw": b"\x00\x01 raw", "none": b""}
    assert milepost.open(tmp_path).verify().ok


# ---- trouble


class Lies(DefaultSavePlanner):
    def transform_object(self, write_item, object):  # noqa: A002
        found = super().transform_object(write_item, object)
        return found if write_item.tensor_data is None else found.half()


@pytest.mark.parametrize("kind", [Lies, type("CentralLies", (Lies, Central), {})])
def test_a_plan_that_the_data_contradicts_is_an_error_and_the_old_checkpoint_stands(tmp_path, kind):
    milepost.save({"a": torch.ones(3)}, tmp_path)
    with pytest.raises(InvalidState, match=r"'a'.*float32.*float16"):
        milepost.save({"a": torch.zeros(3)}, tmp_path, planner=kind())
    assert torch.equal(milepost.open(tmp_path)["a"].read(), torch.ones(3))
    assert len(list(tmp_path.glob("data/*"))) == 1


@pytest.mark.parametrize(
    "step", ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data"]
)
def test_an_error_in_any_step_of_a_planner_reaches_all_ranks_and_leaves_nothing(tmp_path, step):
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
    assert not CheckpointWriter.validate_checkpoint_id("s3://bucket/x")
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
def test_an_error_that_cannot_be_shown_or_has_odd_characters_still_reaches_all(tmp_path, text):
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


def test_all_ranks_load_the_checkpoint_that_the_lead_found_though_a_save_replaces_it(tmp_path):
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
            return str(error).partition("is missing. If this checkpoint was removed or replaced")[1]
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

        def create(self, name, data):
            super().create(name, data)
            self.broken = True
            raise StorageError("the first trouble", errno=5)

        def list(self, prefix):
            if self.broken:
                raise StorageError("the second trouble", errno=5)
            return super().list(prefix)

    with pytest.raises(StorageError, match="the first trouble"):
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
    comm, phase, note = ranks_of(None, 60.0), Phase("testing", "notes", "a step"), bytes(20 << 20)
    answer = comm.meet(phase, note[:-rank] if rank else note, lambda notes: b"".join(notes))
    mine = comm.hand_out(phase, [note, note + b"1"] if rank == 0 else None)
    told = comm.announce(phase, note if rank == 0 else None)
    return len(answer), len(mine), len(told)


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


def test_ranks_whose_part_of_a_dtensor_is_empty_plan_nothing_and_nothing_is_missing(tmp_path):
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
