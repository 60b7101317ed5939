"""Versions of modules (`_version`) come back, so that code which upgrades old states runs."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import milepost
from tests.ranks import spawn


class Scale(nn.Module):
    """Version 2: `weight` holds the logarithm. Version 3: it is called `log`, and there is a shift."""

    _version = 2

    def __init__(self, version=2):
        super().__init__()
        self._version = version
        self.register_parameter("weight" if version < 3 else "log", nn.Parameter(torch.full((3,), 4.0)))
        if version == 3:
            self.shift = nn.Parameter(torch.zeros(2, 3))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        version = local_metadata.get("version")
        if version == 1 and self._version > 1:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].log2()
        if version in (1, 2) and self._version == 3:
            state_dict[prefix + "log"] = state_dict.pop(prefix + "weight")
            state_dict[prefix + "shift"] = torch.ones(2, 3)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def model(version):
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(Scale(version), nn.ReLU()))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_old_module_is_upgraded_by_its_own_code(tmp_path, device):
    milepost.save({"m": model(1)}, tmp_path)
    for version in (1, 2, 3):
        with torch.device(device):
            new = model(version)
        milepost.load({"m": new}, tmp_path)
        values = new[1][0].log if version == 3 else new[1][0].weight
        assert values.tolist() == [4.0 if version == 1 else 2.0] * 3
        if version == 3:
            assert new[1][0].shift.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel], ids=["compile", "data parallel"])
@pytest.mark.parametrize("saved", ["module", "state dict", "file"])
def test_wrapped_module_sees_the_versions_that_were_saved(tmp_path, saved, wrap, device):
    if wrap is nn.DataParallel and device == "meta" and torch.cuda.is_available():
        pytest.skip("DataParallel copies a module to its GPU at once")
    place = tmp_path / "file.pt"
    for old in (1, 2):
        if saved == "file":
            torch.save({"m": wrap(model(old)).state_dict()}, place)
        else:
            place = tmp_path / str(old)
            milepost.save({"m": wrap(model(old)) if saved == "module" else wrap(model(old)).state_dict()}, place)
        for version in (2, 3):
            with torch.device(device):
                inner = model(version)
            milepost.load({"m": wrap(inner)}, place)
            values = inner[1][0].log if version == 3 else inner[1][0].weight
            assert values.tolist() == [2.0 if old == 1 else 4.0] * 3


def test_module_whose_code_does_not_upgrade_fails_by_name(tmp_path):
    milepost.save({"m": model(2)}, tmp_path)
    new = model(3)
    new[1][0]._version = 7
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "1\.0\.log"'):
        milepost.load({"m": new}, tmp_path)
    milepost.save({"m": model(3)}, tmp_path)
    with pytest.raises(milepost.StateMismatch, match=r"m\.1\.0\.log"):
        milepost.load({"m": nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU()))}, tmp_path)


def versions(state_dict):
    return {prefix: entry.get("version") for prefix, entry in state_dict._metadata.items()}


def test_state_dict_keeps_its_versions(tmp_path):
    saved = model(1).state_dict()
    milepost.save({"m": saved, "ranked": milepost.PerRank(saved)}, tmp_path)
    with milepost.open(tmp_path) as checkpoint:
        assert versions(checkpoint.state()["m"]) == versions(saved)
        assert versions(checkpoint.tree()["m"]) == versions(saved)
    target = {"m": model(2).state_dict(), "ranked": milepost.PerRank(None)}
    milepost.load(target, tmp_path)
    assert versions(target["m"]) == versions(target["ranked"].value) == versions(saved)
    new = model(2)
    new.load_state_dict(target["m"])
    assert new[1][0].weight.tolist() == [2.0] * 3
    size = sum(f.stat().st_size for f in tmp_path.glob("manifest-*.json"))
    milepost.save({"m": dict(saved), "ranked": milepost.PerRank(saved)}, tmp_path / "plain")
    plain = sum(f.stat().st_size for f in (tmp_path / "plain").glob("manifest-*.json"))
    assert size - plain < 100


def test_converted_files_give_what_torch_save_gives(tmp_path):
    saved = {"m": model(1).state_dict(), "step": 3}
    torch.save(saved, tmp_path / "torch.pt")
    milepost.save(saved, tmp_path / "own")
    milepost.convert(tmp_path / "own", tmp_path / "converted.pt", to="torch")
    milepost.convert(tmp_path / "torch.pt", tmp_path / "back")
    converted = torch.load(tmp_path / "converted.pt", weights_only=True)
    assert versions(converted["m"]) == versions(torch.load(tmp_path / "torch.pt")["m"]) == versions(saved["m"])
    for place in ("torch.pt", "back", "own", "converted.pt"):
        new = model(2)
        milepost.load({"m": new}, tmp_path / place, allow_unexpected=True)
        assert new[1][0].weight.tolist() == [2.0] * 3, place


def test_dcp_save_keeps_versions(tmp_path):
    saved = model(1).state_dict()
    milepost.dcp.save({"m": saved}, checkpoint_id=tmp_path)
    assert versions(milepost.open(tmp_path).state()["m"]) == versions(saved)
    new = model(2)
    milepost.load({"m": new}, tmp_path)
    assert new[1][0].weight.tolist() == [2.0] * 3


@pytest.mark.parametrize("odd", [(1, 2), "x" * 101, float("nan"), 2**60])
def test_version_that_cannot_be_saved_is_refused(tmp_path, odd):
    state = OrderedDict(w=torch.ones(1))
    state._metadata = OrderedDict({"": {"version": 1}, "inner": {"version": odd}})
    with pytest.raises(milepost.InvalidState, match=r"'m' .* module 'inner' has the version"):
        milepost.save({"m": state}, tmp_path)
    torch.save({"m": state}, tmp_path / "odd.pt")
    assert versions(milepost.open(tmp_path / "odd.pt").state()["m"]) == {"": 1}


def stages(rank, path):
    """Each rank has another stage; then both load both, sharded."""
    names = ["first", "second"]
    stage = nn.ModuleDict({names[rank]: Scale(1)})
    milepost.save({"m": stage}, path)
    whole = nn.ModuleDict({name: Scale(2) for name in names})
    for part in whole.values():
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    milepost.load({"m": whole}, path)
    return [whole[name].weight.full_tensor().tolist() for name in names]


@pytest.mark.slow
def test_stages_of_several_ranks_keep_their_versions(tmp_path):
    assert spawn(2, stages, str(tmp_path)) == [[[2.0] * 3] * 2] * 2
