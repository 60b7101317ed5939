"""Storage and stream transforms that a user brings, and those of torch."""

import io
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
import torch.distributed.checkpoint._extension as torch_extension
from torch.futures import Future

import milepost
import milepost.dcp
from milepost import CheckpointDamaged
from milepost.planning import CheckpointReader, CheckpointWriter, DefaultLoadPlanner, DefaultSavePlanner, WriteResult
from milepost.planning.torch_adapters import MilepostReader, MilepostWriter
from milepost.testing import run_ranks
from tests.planning.states import WHOLE, Central, assert_full, blank, state_of
from tests.ranks import spawn

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
