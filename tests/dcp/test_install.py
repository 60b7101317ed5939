"""`milepost.dcp.install`: programs that call torch's names get Milepost, and every name comes back."""

import functools
import os
import pickle
import sys
import threading
import types

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import FileSystemWriter, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint import save as taken_early
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import milepost
import milepost.dcp
from tests.ranks import spawn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::FutureWarning")
THEIRS = types.SimpleNamespace(save=torch_dcp.save, writer=torch_dcp.FileSystemWriter)  # which `install` does not see


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    milepost.dcp.uninstall()
    assert torch_dcp.save is THEIRS.save


def names_of_torch():
    """Every name of every module of torch.distributed.checkpoint, and the object behind it."""
    return {
        (key, name): value
        for key, module in list(sys.modules.items())
        if key.startswith("torch.distributed.checkpoint")
        for name, value in vars(module).items()
    }


def is_milepost(path):
    return not os.path.exists(f"{path}/.metadata") and milepost.open(path).verify().ok


def test_every_name_comes_back(tmp_path):
    milepost.dcp.install()
    milepost.dcp.uninstall()  # all modules are imported now
    before, here = names_of_torch(), dict(globals())
    installed = milepost.dcp.install()
    now = names_of_torch()
    changed = {key for key in before if now[key] is not before[key]}
    assert changed == {(place.module, place.name) for place in installed.rebound} & set(before)
    wanted = {"save", "async_save", "load", "save_state_dict", "load_state_dict", "FileSystemWriter"}
    assert {("torch.distributed.checkpoint", name) for name in wanted} <= changed
    assert (__name__, "taken_early", "") in installed.rebound
    taken_early({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    assert is_milepost(tmp_path)
    milepost.dcp.uninstall()
    after = names_of_torch()
    assert after.keys() == before.keys()
    assert [key for key in before if after[key] is not before[key]] == []
    assert [name for name in here if globals()[name] is not here[name]] == []


def test_module_imported_meanwhile_gets_torchs_names_back():
    late = types.ModuleType("late_module")
    sys.modules["late_module"] = late
    try:
        with milepost.dcp.install():
            exec("from torch.distributed.checkpoint import save, FileSystemReader", vars(late))
            exec("from milepost.dcp import load", vars(late))
            assert late.save is not THEIRS.save
        assert late.save is THEIRS.save
        assert late.FileSystemReader is torch_dcp.FileSystemReader
        assert late.load is milepost.dcp.load  # imported from Milepost: it stays
    finally:
        del sys.modules["late_module"]


def test_a_name_that_the_program_changed_meanwhile_is_left(monkeypatch):
    module = types.ModuleType("changing_module")
    module.save = THEIRS.save
    monkeypatch.setitem(sys.modules, "changing_module", module)
    with milepost.dcp.install():
        assert module.save is torch_dcp.save
        module.save = print
    assert module.save is print


def test_module_that_left_meanwhile_gets_torchs_names_back(monkeypatch):
    module = types.ModuleType("leaving_module")
    module.save = THEIRS.save
    monkeypatch.setitem(sys.modules, "leaving_module", module)
    with milepost.dcp.install():
        assert module.save is torch_dcp.save
        del sys.modules["leaving_module"]
    assert module.save is THEIRS.save


def test_blocks_and_calls_nest():
    milepost.dcp.install()
    milepost.dcp.install()
    with milepost.dcp.install():
        pass
    assert torch_dcp.save is not THEIRS.save  # the program installed it
    milepost.dcp.uninstall()  # once is enough
    assert torch_dcp.save is THEIRS.save
    milepost.dcp.uninstall()
    with milepost.dcp.install():
        with milepost.dcp.install():
            pass
        assert torch_dcp.save is not THEIRS.save
    assert torch_dcp.save is THEIRS.save
    with pytest.raises(ZeroDivisionError), milepost.dcp.install():
        raise ZeroDivisionError
    assert torch_dcp.save is THEIRS.save


def test_blocks_of_threads_overlap():
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()
    found = []

    def second():
        first_is_in.wait(60)
        with milepost.dcp.install():
            second_is_in.set()
            first_is_out.wait(60)
            found.append(torch_dcp.save is THEIRS.save)

    thread = threading.Thread(target=second)
    thread.start()
    with milepost.dcp.install():
        first_is_in.set()
        assert second_is_in.wait(60)
    first_is_out.set()
    thread.join()
    assert found == [False]
    assert torch_dcp.save is THEIRS.save


def test_old_checkpoints_and_all_ways_to_call(tmp_path):
    state = {"w": torch.arange(3.0), "n": 4}
    torch_dcp.save(state, checkpoint_id=tmp_path / "old")
    held = functools.partial(torch_dcp.save)
    with milepost.dcp.install():
        saves = {
            "path": lambda path: torch_dcp.save(state, checkpoint_id=path),
            "early": lambda path: taken_early(state, checkpoint_id=path),
            "held": lambda path: held(state, checkpoint_id=path),
            "writer": lambda path: state_dict_saver.save(
                state, storage_writer=torch_dcp.FileSystemWriter(path, thread_count=2), planner=DefaultSavePlanner()
            ),
            "before": lambda path: state_dict_saver.save_state_dict(
                state, torch_dcp.FileSystemWriter(path), no_dist=True
            ),
            "thread": lambda path: torch_dcp.async_save(state, checkpoint_id=path).result(),
            "staged": lambda path: torch_dcp.async_save(
                state, storage_writer=torch_dcp.FileSystemWriter(path)
            ).result(),
        }
        for name, save in saves.items():
            save(tmp_path / name)
            assert is_milepost(tmp_path / name), name
        for name in ("old", *saves):
            target = {"w": torch.zeros(3), "n": 0}
            torch_dcp.load(target, storage_reader=torch_dcp.FileSystemReader(tmp_path / name))
            assert target["w"].tolist() == [0.0, 1.0, 2.0], name
            assert target["n"] == 4
            assert state_dict_loader._load_state_dict_from_keys("n", checkpoint_id=tmp_path / name) == {"n": 4}


def test_records_and_errors_are_torchs(tmp_path):
    with milepost.dcp.install():
        torch_dcp.save({"w": torch.ones(2), "n": 1}, checkpoint_id=tmp_path)
        metadata = torch_dcp.FileSystemReader(tmp_path).read_metadata()
        assert isinstance(metadata, torch_dcp.Metadata)
        assert isinstance(metadata.state_dict_metadata["w"], torch_dcp.TensorStorageMetadata)
        pickle.loads(pickle.dumps(metadata))
        with pytest.raises(torch_dcp.CheckpointException) as caught:
            torch_dcp.load({"other": torch.ones(2)}, checkpoint_id=tmp_path)
    assert isinstance(caught.value, milepost.CheckpointError)
    assert "other" in str(caught.value.failures[0][0])


def test_default_planner_of_torch_pickles_nothing(tmp_path):
    with milepost.dcp.install():
        with pytest.raises(torch_dcp.CheckpointException, match="'args'"):
            torch_dcp.save({"args": types.SimpleNamespace(a=1)}, checkpoint_id=tmp_path, planner=DefaultSavePlanner())
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True, flatten_state_dict=False)
        torch_dcp.save({"args": {"a": 1}}, checkpoint_id=tmp_path, planner=planner)
    assert list(milepost.open(tmp_path)) == ["args"]  # its options count


def test_pickles_of_either_side(tmp_path):
    theirs = torch_dcp.FileSystemWriter(tmp_path / "theirs")
    with milepost.dcp.install():
        ours = torch_dcp.FileSystemWriter(tmp_path / "ours", thread_count=3)
        assert pickle.loads(pickle.dumps(torch_dcp.save)) is torch_dcp.save
        again, old = pickle.loads(pickle.dumps([ours, theirs]))
        assert (again.path, again.thread_count) == (tmp_path / "ours", 3)
        torch_dcp.save({"n": 1}, storage_writer=again)
    assert type(old) is THEIRS.writer
    assert (old.path, old.thread_count) == (tmp_path / "theirs", 1)
    assert is_milepost(tmp_path / "ours")
    assert type(pickle.loads(pickle.dumps(theirs))) is THEIRS.writer


class Derived(FileSystemWriter):
    pass


class Holder:
    save = staticmethod(torch_dcp.save)
    other = functools.partial(print)

    def method(self, write=torch_dcp.async_save):
        raise NotImplementedError


REGISTRY = {"reader": torch_dcp.FileSystemReader}


def test_what_is_not_reached_is_said():
    found = {(name, how.split(":")[0]) for module, name, how in milepost.dcp.install().unreached if module == __name__}
    assert found == {
        ("Derived", "derives from torch's FileSystemWriter"),
        ("Holder", "holds torch's save, which ends in Milepost's as its attribute save"),
        ("Holder", "holds torch's async_save as a default in its method method"),
        ("REGISTRY", "holds torch's FileSystemReader in a dict"),
    }


def test_a_class_derived_while_installed_is_called(tmp_path):
    with milepost.dcp.install():

        class Counting(torch_dcp.FileSystemWriter):
            items = 0

            def write_data(self, plan, planner):
                assert isinstance(plan, torch_dcp.SavePlan)
                self.items += len(plan.items)
                return super().write_data(plan, planner)

        writer = Counting(tmp_path)
        torch_dcp.save({"w": torch.ones(2), "n": 1}, storage_writer=writer)
    assert writer.items == 2
    assert is_milepost(tmp_path)


def model_and_optimizer():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, step):
    torch.manual_seed(step)
    model(torch.randn(4, 7)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model):
    return [parameter.full_tensor().tolist() for parameter in model.parameters()]


def saves_by_torchs_names(rank, folder):
    milepost.dcp.install()
    model, optimizer = model_and_optimizer()
    train(model, optimizer, 1)
    parts = get_state_dict(model, optimizer)
    torch_dcp.save({"model": parts[0], "optim": parts[1]}, checkpoint_id=folder)
    response = torch_dcp.async_save({"model": parts[0]}, checkpoint_id=folder / "model")
    response.result()
    train(model, optimizer, 2)
    return whole(model)


def loads_by_torchs_names(rank, folder):
    with milepost.dcp.install():
        model, optimizer = model_and_optimizer()
        parts = get_state_dict(model, optimizer)
        state = {"model": parts[0], "optim": parts[1]}
        torch_dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    train(model, optimizer, 2)
    return whole(model), dist.get_world_size()


@pytest.mark.slow
def test_fsdp2_goes_on_with_three_ranks(tmp_path):
    trained = spawn(2, saves_by_torchs_names, tmp_path / "run")[0]
    assert is_milepost(tmp_path / "run" / "model")
    for found, world in spawn(3, loads_by_torchs_names, tmp_path / "run"):
        assert world == 3
        for mine, theirs in zip(found, trained, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs))
