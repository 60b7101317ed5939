"""A checkpoint does not depend on how a module was wrapped: torch.compile, DDP, FSDP1, activation checkpoints."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.nn.parallel import DistributedDataParallel

import milepost
from milepost.state.wrappers import load_module, module_state
from tests.ranks import spawn


class Inner(nn.Module):
    """Has a submodule that is really called `module`, and one that stands in two places."""

    def __init__(self):
        super().__init__()
        self.module = nn.ModuleDict({"module": nn.Linear(4, 4), "_orig_mod": nn.Linear(4, 2, bias=False)})
        self.norm = nn.BatchNorm1d(4)
        self.again = self.module["module"]

    def forward(self, x):
        return self.module["_orig_mod"](self.norm(self.module["module"](x)))


NAMES = set(Inner().state_dict())


def model(seed):
    torch.manual_seed(seed)
    return Inner()


def with_compiled_part(inner):
    inner.module["module"] = torch.compile(inner.module["module"])
    inner.again = inner.module["module"]
    return inner


def with_checkpoints(inner):
    inner.module["_orig_mod"] = checkpoint_wrapper(inner.module["_orig_mod"])
    return checkpoint_wrapper(inner)


def fsdp(inner):
    return FullyShardedDataParallel(inner, device_id=torch.device("cpu"), use_orig_params=True)


HERE = {
    "plain": lambda m: m,
    "compile": torch.compile,
    "compiled part": with_compiled_part,
    "checkpoints": with_checkpoints,
    "compiled checkpoints": lambda m: torch.compile(with_checkpoints(m)),
    "DataParallel": nn.DataParallel,
}
ON_RANKS = {
    "DDP": DistributedDataParallel,
    "compiled DDP": lambda m: torch.compile(DistributedDataParallel(m)),
    "DDP of a compiled one": lambda m: DistributedDataParallel(torch.compile(m)),
    "DDP with a compiled part": lambda m: DistributedDataParallel(with_compiled_part(m)),
    "FSDP1": fsdp,
    "FSDP1 of a compiled one": lambda m: fsdp(torch.compile(m)),
    "a compiled FSDP1 with checkpoints": lambda m: torch.compile(fsdp(with_checkpoints(m))),
}


@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("saved", HERE)
def test_a_module_loads_however_it_is_wrapped(saved, target):
    store = milepost.store.MemoryStore()
    new = model(2)
    milepost.save({"m": HERE[saved](model(1)), "own": milepost.PerRank(HERE[saved](model(1)))}, store)
    assert {k for k in milepost.open(store) if k != "own"} == {f"m.{name}" for name in NAMES}
    other, private = HERE[target](new), HERE[target](model(3))
    milepost.load({"m": other, "own": milepost.PerRank(private)}, store)
    for inner in (other, private):
        found = [value.cpu() for value in inner.state_dict().values()]  # DataParallel puts them on a GPU
        assert all(map(torch.equal, found, model(1).state_dict().values()))


def matrix_on_ranks(rank, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, (name, wrap) in enumerate(ON_RANKS.items()):
            milepost.save({"m": wrap(model(number))}, f"{folder}/{number}")
            assert set(milepost.open(f"{folder}/{number}")) == {f"m.{key}" for key in NAMES}, name
            assert holds(milepost.load({"m": model(99)}, f"{folder}/{number}")["m"], number), name
        for name, wrap in ON_RANKS.items():
            other = wrap(model(98))
            milepost.load({"m": other}, f"{folder}/0")
            milepost.save({"m": other}, f"{folder}/again")
            assert holds(milepost.load({"m": model(97)}, f"{folder}/again")["m"], 0), name
        check_optimizer(folder)
        return rank, shards_of(fsdp(model(1)))


def check_optimizer(folder):
    """The optimizer of FSDP1 holds other shards on each rank: refused alone, saved beside its model or by torch."""

    def job(seed):
        module = fsdp(model(seed))
        optimizer = torch.optim.Adam(module.parameters())
        for p in module.parameters():
            p.grad = torch.full_like(p, float(seed))
        optimizer.step()
        FullyShardedDataParallel.set_state_dict_type(module, StateDictType.SHARDED_STATE_DICT)
        return module, optimizer, FullyShardedDataParallel.optim_state_dict(module, optimizer)

    module, optimizer, state = job(1)
    with pytest.raises(milepost.RanksDisagree, match=r"'o\.state"):
        milepost.save({"o": optimizer}, f"{folder}/refused")
    milepost.save({"m": module, "o": optimizer}, f"{folder}/named")
    milepost.save({"m": module, "o": state}, f"{folder}/optimizer")
    for place in ("named", "optimizer"):
        module, optimizer, _ = job(2)
        milepost.load({"m": module, "o": optimizer}, f"{folder}/{place}")
        check_average(optimizer)
    module, optimizer, state = job(2)
    milepost.load({"m": module, "o": state}, f"{folder}/optimizer")
    loaded = FullyShardedDataParallel.optim_state_dict_to_load(module, optimizer, state)
    optimizer.load_state_dict(loaded)
    check_average(optimizer)


def check_average(optimizer):
    found = [kept["exp_avg"] for kept in optimizer.state.values() if kept["exp_avg"].numel()]
    assert found
    assert all(torch.allclose(tensor, torch.tensor(0.1)) for tensor in found), "the average of gradients of 1"


def tiny_on_rank(rank, folder):
    module = fsdp(nn.Linear(4, 1))
    with FullyShardedDataParallel.state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
        state = module.state_dict()
    shards = len(state["bias"].local_shards())
    milepost.save({"m": state}, folder)
    milepost.load({"m": state}, folder)
    return shards


@pytest.mark.slow
def test_ranks_without_a_shard_of_fsdp1_load(tmp_path):
    assert spawn(2, tiny_on_rank, str(tmp_path)) == [1, 0], "the bias has one element"


def holds(module, seed):
    expected = model(seed).state_dict()
    return all(torch.equal(tensor, expected[key]) for key, tensor in module.state_dict().items())


def shards_of(module):
    """Which of the tensors that a save sees of FSDP1 are cut. Its own setting stays as it was."""
    found = module_state(module)
    assert FullyShardedDataParallel.get_state_dict_type(module).state_dict_type == StateDictType.FULL_STATE_DICT
    return sorted(key for key, value in found.items() if hasattr(value, "local_shards"))


@pytest.mark.slow
def test_wrappers_of_jobs_are_left_out_too(tmp_path):
    cut = sorted(name for name in NAMES if name.endswith(("weight", "bias")))
    assert spawn(2, matrix_on_ranks, str(tmp_path)) == [(0, cut), (1, cut)]


def test_an_optimizer_goes_with_a_wrapped_model(tmp_path):
    def job(wrap, seed):
        wrapped = wrap(model(seed))
        return {"m": wrapped, "o": torch.optim.Adam(wrapped.named_parameters())}

    old, new = job(torch.compile, 1), job(lambda m: m, 2)
    for p in old["m"].parameters():
        p.grad = torch.ones_like(p)
    old["o"].step()
    milepost.save(old, tmp_path)
    milepost.load(new, tmp_path)
    for number, kept in old["o"].state_dict()["state"].items():
        assert all(torch.equal(kept[name], new["o"].state_dict()["state"][number][name]) for name in kept)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_names_with_wrappers_still_load_into_such_a_module(tmp_path):
    compiled = torch.compile(model(1))
    torch_dcp.save({"m": compiled.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save({"m": compiled.state_dict()}, tmp_path / "file.pt")
    milepost.save({"m": compiled.state_dict()}, tmp_path / "own")
    assert "m._orig_mod.norm.weight" in milepost.open(tmp_path / "own"), "a dict of the user is saved as it is"
    for place in ("dcp", "file.pt", "own"):
        target = torch.compile(model(2))
        milepost.load({"m": target}, tmp_path / place)
        assert all(map(torch.equal, target.state_dict().values(), compiled.state_dict().values()))


@pytest.mark.parametrize("turned", [False, True])
def test_keys_that_differ_by_a_wrapper_get_a_hint_that_helps(tmp_path, turned):
    compiled, plain = torch.compile(model(1)), model(2)
    if turned:
        milepost.save({"m": plain.state_dict()}, tmp_path)
        target = {"m": compiled.state_dict()}
    else:
        milepost.save({"m": compiled.state_dict()}, tmp_path)
        target = {"m": plain}
    with pytest.raises(milepost.StateMismatch, match="differ only by what torch") as caught:
        milepost.load(target, tmp_path)
    assert "'_orig_mod.' + name" in str(caught.value)
    if not turned:
        named = {"_orig_mod." + name: t for name, t in plain.state_dict().items()}
        milepost.load({"m": named}, tmp_path)
        assert holds(plain, 1)
    with pytest.raises(milepost.StateMismatch) as caught:
        milepost.load({"m": {"other": torch.ones(1)}}, tmp_path)
    assert "differ only" not in str(caught.value)


class Versioned(nn.Linear):
    """Sees which version its state had."""

    _version = 3

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.seen = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_versions_of_modules_follow_their_names():
    def build():
        return nn.ModuleDict({"a": checkpoint_wrapper(Versioned(2, 2)), "b": torch.compile(Versioned(2, 2))})

    state = module_state(torch.compile(build()))
    assert state._metadata["a"] == state._metadata["b"] == {"version": 3}
    assert not any("_orig_mod" in name or "_checkpoint" in name for name in state._metadata)
    target = torch.compile(build())
    load_module(target, state)
    assert [m.seen for m in target.modules() if isinstance(m, Versioned)] == [3, 3]


def test_names_that_would_collide_are_kept():
    wrapped = nn.DataParallel(nn.Linear(2, 2))
    wrapped.register_buffer("bias", torch.ones(1))
    assert set(module_state(wrapped)) == {"bias", "module.weight", "module.bias"}
    store = milepost.store.MemoryStore()
    milepost.save({"m": wrapped}, store)
    other = nn.DataParallel(nn.Linear(2, 2))
    other.register_buffer("bias", torch.zeros(1))
    milepost.load({"m": other}, store)
    assert all(map(torch.equal, wrapped.state_dict().values(), other.state_dict().values()))
