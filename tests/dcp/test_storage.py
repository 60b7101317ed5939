"""Storage written for DCP: a user's own, torch's and ours, with both kinds of base classes."""

import io
import json
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.futures import Future

import milepost.dcp
from milepost.dcp import MilepostReader, MilepostWriter
from milepost.dcp.filesystem import CURRENT_DCP_VERSION
from tests.dcp.compare import both, plain
from tests.dcp.programs import OURS, THEIRS, run, run_both
from tests.ranks import spawn


def make_storage(dcp):
    """A store in a dict and its reader, against the base classes of one side."""
    memory = {}

    class Writer(dcp.storage.StorageWriter):
        def __init__(self):
            self.calls = []

        def reset(self, checkpoint_id=None):
            self.calls.append("reset")

        def set_up_storage_writer(self, is_coordinator):
            self.calls.append("set_up_storage_writer")

        def prepare_local_plan(self, plan):
            self.calls.append("prepare_local_plan")
            return plan

        def prepare_global_plan(self, plans):
            self.calls.append("prepare_global_plan")
            return plans

        def write_data(self, plan, planner):
            self.calls.append("write_data")
            results = []
            for item in plan.items:
                data = planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    memory[item.index] = data.getvalue()
                else:
                    memory[item.index] = data.detach().clone()
                results.append(dcp.storage.WriteResult(index=item.index, size_in_bytes=1, storage_data="here"))
            future = Future()
            future.set_result(results)
            return future

        def finish(self, metadata, results):
            self.calls.append("finish")
            metadata.storage_data = {r.index: r.storage_data for rank in results for r in rank}
            memory["metadata"] = metadata

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id):
            return True

    class Reader(dcp.storage.StorageReader):
        def reset(self, checkpoint_id=None):
            pass

        def read_metadata(self):
            return memory["metadata"]

        def set_up_storage_reader(self, metadata, is_coordinator):
            assert isinstance(metadata, dcp.metadata.Metadata)

        def prepare_local_plan(self, plan):
            return plan

        def prepare_global_plan(self, plans):
            return plans

        def read_data(self, plan, planner):
            for item in plan.items:
                stored = memory[item.storage_index]
                if item.type == dcp.planner.LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(stored))
                    continue
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    stored = stored.narrow(dim, start, length)
                target = planner.resolve_tensor(item)
                target.copy_(stored)
                planner.commit_tensor(item, target)
            future = Future()
            future.set_result(None)
            return future

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id):
            return True

    return Writer(), Reader()


def custom_storage(dcp, rank, folder, made_for=None):
    writer, reader = make_storage(made_for or dcp)
    state = {"w": torch.arange(6.0).view(2, 3), "deep": [torch.ones(2), {"n": (1, 2)}], "lr": 0.5}
    metadata = dcp.save(state, storage_writer=writer)
    target = {"w": torch.zeros(2, 3), "deep": [torch.zeros(2), {"n": None}], "lr": 0.0}
    dcp.load(target, storage_reader=reader)
    return writer.calls, sorted(metadata.state_dict_metadata), plain(target["w"]), target["deep"][1], target["lr"]


def test_storage_of_ones_own_is_called_as_torch_calls_it(tmp_path):
    calls, keys, _, value, _ = both(custom_storage, tmp_path)
    assert calls == ["set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish"]
    assert keys == ["deep.0", "deep.1.n", "lr", "w"]
    assert value == {"n": (1, 2)}


def test_storage_made_for_torchs_base_classes_works_with_ours(tmp_path):
    from tests.dcp.programs import modules

    def mixed(dcp, rank, folder):
        return custom_storage(dcp, rank, folder, made_for=modules(THEIRS))

    assert run(mixed, OURS, tmp_path) == run(custom_storage, THEIRS, tmp_path)


def test_torchs_own_storage_and_planners_work_with_ours(tmp_path):
    import torch.distributed.checkpoint as torch_dcp

    state = {"w": torch.arange(4.0), "n": {"x": 1}}
    milepost.dcp.save(
        state, storage_writer=torch_dcp.FileSystemWriter(tmp_path), planner=torch_dcp.DefaultSavePlanner()
    )
    for planner in (None, torch_dcp.DefaultLoadPlanner()):
        target = {"w": torch.zeros(4), "n": {"x": 0}}
        milepost.dcp.load(target, storage_reader=torch_dcp.FileSystemReader(tmp_path), planner=planner)
        assert plain(target) == plain(state)


def hugging_face(dcp, rank, folder):
    state = {"w": torch.arange(4.0), "v": torch.ones(2, 2)}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(folder)))
    target = {"w": torch.zeros(4), "v": torch.zeros(2, 2)}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    return plain(target), sorted(file.suffix for file in folder.iterdir())


def test_hugging_face_storage_works_with_ours(tmp_path):
    both(hugging_face, tmp_path)


def test_a_checkpoint_that_torch_saved_is_loaded_as_it_is(tmp_path):
    def saving(dcp, rank, folder):
        dcp.save({"model": {"w": torch.arange(4.0)}, "groups": [{"lr": 0.5}], "n": (1, 2)}, checkpoint_id=folder)
        return folder

    target = {"model": {"w": torch.zeros(4)}, "groups": [{"lr": 0.0}], "n": None}
    milepost.dcp.load(target, checkpoint_id=run(saving, THEIRS, tmp_path))
    assert plain(target) == {"model": {"w": ("torch.float32", [0, 1, 2, 3])}, "groups": [{"lr": 0.5}], "n": (1, 2)}


def test_folder_that_both_saved_to_gives_nobody_the_older(tmp_path, monkeypatch):
    def save(dcp, number):
        dcp.save({"w": torch.full((3,), float(number))}, checkpoint_id=tmp_path, no_dist=True)

    def load(dcp):
        target = {"w": torch.zeros(3)}
        dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
        return target["w"].tolist()

    monkeypatch.setattr("warnings.warn", lambda *_, **__: None)
    save(torch.distributed.checkpoint, 1)
    save(milepost.dcp, 2)
    assert load(milepost.dcp) == [2.0] * 3
    with pytest.raises(torch.distributed.checkpoint.api.CheckpointException, match=r"No such file|metadata"):
        load(torch.distributed.checkpoint)
    save(torch.distributed.checkpoint, 3)
    with pytest.raises(milepost.dcp.CheckpointException, match="two checkpoints"):
        load(milepost.dcp)


def test_a_checkpoint_of_milepost_save_is_loaded(tmp_path):
    state = {"groups": [{"lr": 0.5}], "cfg": {"x": 1}, "pair": (torch.ones(1), 2)}
    milepost.save(state, tmp_path)
    target = {"groups": [{"lr": 0.0}], "cfg": {"x": 0}, "pair": (torch.zeros(1), 0)}
    milepost.dcp.load(target, checkpoint_id=tmp_path)
    assert target == state


def test_subclasses_of_our_writer_take_part(tmp_path):
    class Writer(milepost.dcp.FileSystemWriter):
        def finish(self, metadata, results):
            super().finish(metadata, results)
            (self.path / "done.json").write_text(json.dumps(sorted(metadata.state_dict_metadata)))

    milepost.dcp.save({"w": torch.ones(1)}, storage_writer=Writer(tmp_path))
    assert json.loads((tmp_path / "done.json").read_text()) == ["w"]


@pytest.mark.parametrize("name", [OURS, THEIRS])
def test_places_are_told_as_torch_tells_them(tmp_path, name):
    def program(dcp, rank, folder):
        writer, reader = dcp.FileSystemWriter(folder / "a"), dcp.FileSystemReader(str(folder / "a"))
        assert writer.path == reader.path == writer.checkpoint_id == reader.checkpoint_id == folder / "a"
        dcp.save({"n": 1}, checkpoint_id=folder / "b", storage_writer=writer)
        assert writer.path == folder / "b"
        with pytest.raises(RuntimeError, match="`checkpoint_id` must be specified"):
            dcp.save({})
        with pytest.raises(RuntimeError, match="`checkpoint_id` must be specified"):
            dcp.load({})

    run(program, name, tmp_path)


def test_a_place_that_nobody_knows_is_refused():
    with pytest.raises(RuntimeError, match="Cannot detect which"):
        milepost.dcp.save({"n": 1}, checkpoint_id="nowhere://bucket/a")


def overwriting(dcp, rank, folder):
    dcp.save({"n": 1}, checkpoint_id=folder)
    try:
        dcp.save({"n": 2}, storage_writer=dcp.FileSystemWriter(folder, overwrite=False))
    except dcp.CheckpointException as error:
        return list(error.failures), "already" in str(error)


def test_a_checkpoint_is_not_replaced_if_one_says_so(tmp_path):
    assert both(overwriting, tmp_path) == ([0], True)


def test_the_storage_as_second_argument_is_taken_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="storage_writer"):
        milepost.dcp.save({"n": 1}, milepost.dcp.FileSystemWriter(tmp_path))
    target = {"n": 0}
    with pytest.warns(UserWarning, match="storage_reader"):
        milepost.dcp.load(target, milepost.dcp.FileSystemReader(tmp_path))
    assert target == {"n": 1}


class Counter:
    def __init__(self, n=0):
        self.n = n

    def state_dict(self):
        return {"n": self.n, "w": torch.full((2,), float(self.n))}

    def load_state_dict(self, state_dict):
        self.n = state_dict["n"] + int(state_dict["w"].sum())


def stateful(dcp, rank, folder):
    assert isinstance(Counter(), dcp.stateful.Stateful)
    dcp.save({"c": Counter(3), "plain": {"x": 1}}, checkpoint_id=folder)
    target = {"c": Counter(), "plain": {"x": 0}}
    keep = target["c"]
    dcp.load(target, checkpoint_id=folder)
    return target["c"] is keep, keep.n, target["plain"]


def test_stateful_objects_give_and_take_their_state(tmp_path):
    assert both(stateful, tmp_path) == (True, 9, {"x": 1})


def test_metadata_is_read_when_one_looks_and_is_then_plain(tmp_path):
    import pickle

    metadata = milepost.dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    milepost.dcp.save({"v": torch.ones(2)}, checkpoint_id=tmp_path / "other")
    assert isinstance(metadata, milepost.dcp.Metadata)
    assert list(metadata.state_dict_metadata) == ["w"]
    again = pickle.loads(pickle.dumps(metadata))
    assert type(again) is milepost.dcp.Metadata
    assert metadata == again
    assert replace(metadata, version="x").version == "x"
    metadata.planner_data = 5
    assert metadata.planner_data == 5


def test_the_metadata_of_a_checkpoint_that_was_replaced_is_gone(tmp_path):
    metadata = milepost.dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    milepost.dcp.save({"v": torch.ones(2)}, checkpoint_id=tmp_path)
    with pytest.raises(milepost.CheckpointNotFound, match="not there any more"):
        metadata.state_dict_metadata  # noqa: B018


def test_files_of_torch_save_become_checkpoints_and_back(tmp_path):
    from milepost.dcp.format_utils import dcp_to_torch_save, torch_save_to_dcp

    state = {"model": {"w": torch.arange(4.0)}, "lr": 0.5}
    torch.save(state, tmp_path / "a.pt")
    torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "dcp")
    target = {"model": {"w": torch.zeros(4)}, "lr": 0.0}
    milepost.dcp.load(target, checkpoint_id=tmp_path / "dcp")
    assert plain(target) == plain(state)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "b.pt")
    assert plain(torch.load(tmp_path / "b.pt")) == plain(state)


def small_parts(dcp, rank, folder):
    helpers, chunk = dcp.planner_helpers, dcp.metadata.ChunkStorageMetadata
    a, b, c = (chunk(torch.Size(o), torch.Size(s)) for o, s in (((0, 0), (4, 4)), ((2, 3), (4, 4)), ((4, 0), (1, 4))))
    import importlib

    resharding = importlib.import_module(dcp.__name__ + ".resharding")
    planner = dcp.default_planner
    item = helpers._create_write_items("w", torch.ones(2))[0]
    return (
        resharding._check_shard_metadata_pair_overlap(a, b),
        resharding._check_shard_metadata_pair_overlap(a, c),
        resharding._shards_get_overlap_region_wrt_saved_tensor(a, b),
        [planner._check_box_overlap(a, b), planner._check_box_overlap(a, c)],
        [planner._check_box_bounds(torch.Size((4, 4)), x) for x in (a, b, c)],
        planner._check_box_bounds(torch.Size((4, 4)), chunk(torch.Size((-1, 0)), torch.Size((1, 1)))),
        helpers._compare_save_plans(dcp.SavePlan([item]), dcp.SavePlan([item])),
        helpers._contains_usable_plan([dcp.SavePlan([], usable=False)]),
        [len(p.items) for p in dcp.filesystem._split_by_size_and_type(2, [item] * 3) and [dcp.SavePlan([item])]],
        dcp.utils._element_wise_add([1, 2], [3, 4]),
        dcp.utils._element_wise_sub([1, 2], [3, 4]),
        dcp.utils.find_tensor_shard(torch.arange(2), dcp.metadata.MetadataIndex("w", torch.Size([0]))).tolist(),
    )


def test_the_small_parts_give_what_torchs_give(tmp_path):
    both(small_parts, tmp_path)


def pieces(dcp, rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    helpers = dcp.planner_helpers
    tensor = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    item, chunk = helpers._create_write_items_for_dtensor("w", tensor), helpers._create_chunk_from_dtensor(tensor)
    dcp.utils._assert_same_keys({"a": 1})
    return item.index.fqn, tuple(item.index.offset), tuple(item.tensor_data.chunk.sizes), tuple(chunk.offsets)


@pytest.mark.slow
def test_the_parts_of_a_dtensor_are_those_of_torch(tmp_path):
    for ours, theirs in spawn(2, run_both, pieces, tmp_path):
        assert ours == theirs


def test_milepost_storage_for_torchs_own_functions_is_here_too():
    assert MilepostWriter.__module__ == MilepostReader.__module__ == "milepost.planning.torch_adapters"


def test_ids_version_and_positional_storage_are_as_torchs_tests_expect(tmp_path):
    writer = milepost.dcp.FileSystemWriter(tmp_path)
    with pytest.warns(UserWarning, match="by its name"):  # as programs of torch 2.2 do
        milepost.dcp.save({"a": torch.zeros(4, 4)}, writer)
    reader = milepost.dcp.FileSystemReader(tmp_path)
    told = reader.read_metadata().storage_meta
    assert (str(told.checkpoint_id), told.save_id, told.load_id) == (str(tmp_path), writer.save_id, reader.load_id)
    planner = milepost.dcp.DefaultLoadPlanner()
    milepost.dcp.load({"a": torch.zeros(4, 4)}, checkpoint_id=tmp_path, planner=planner)
    assert planner.metadata.version == CURRENT_DCP_VERSION
