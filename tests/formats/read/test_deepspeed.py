"""Checkpoints of DeepSpeed are read: parts of ZeRO of all stages, and universal folders, as its own tools read them."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import milepost
from tests import golden
from tests.ranks import spawn

FOLDER = Path(golden.__file__).parent / "deepspeed"
PAGE = FOLDER.parents[2] / "docs" / "frameworks" / "deepspeed.md"
EXPECTED = load_file(FOLDER / "expected.safetensors")
STEPS = {name: FOLDER / name / "global_step3" for name in ("zero1", "zero2", "zero3")}
STEPS["universal"] = FOLDER / "universal" / "global_step3_universal"


def expected(name):
    """What DeepSpeed's own tool makes of a checkpoint; the universal one was made of stage 1."""
    start = "zero1/" if name == "universal" else f"{name}/"
    return {key.removeprefix(start): value for key, value in EXPECTED.items() if key.startswith(start)}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("whole", [True, False], ids=["run", "step"])
def test_weights_are_those_of_the_tool(name, whole):
    with milepost.open(STEPS[name].parent if whole else STEPS[name]) as checkpoint:
        assert checkpoint.format == "deepspeed"
        wanted = expected(name)
        assert len(wanted) >= 7
        for key, value in wanted.items():
            assert torch.equal(checkpoint[f"module.{key}"][...].float(), value), key
        assert torch.equal(checkpoint["module.frozen"][...].float(), torch.arange(6.0).reshape(2, 3))
        assert checkpoint["module.embed.weight"][3:5, 2:].shape == (2, 5)
        assert (checkpoint["step"], checkpoint["note"]) == (3, "hello")
        assert checkpoint["lr_scheduler.last_epoch"] == 3
        assert checkpoint.verify().ok


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    """Not by test_docs: the page reads a checkpoint that no page can make."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(STEPS["zero2"].parent, tmp_path / "runs" / "deepspeed")
    (code,) = re.findall(r"^```\n(.+?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    model = nn.Sequential()
    model.embed = nn.Embedding(11, 7)
    exec(code, {"model": model})
    assert "deepspeed ['module.frozen'," in capsys.readouterr().out
    wanted = expected("zero2")["embed.weight"]
    assert torch.equal(model.embed.weight.detach(), wanted)
    assert torch.equal(milepost.open("runs/own")["module.embed.weight"][...].float(), wanted)


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_moments_have_names(name):
    """The universal folder, made by DeepSpeed from stage 1, says where each moment of stage 1 belongs."""
    with milepost.open(STEPS[name]) as checkpoint:
        for key in ("embed.weight", "head.weight", "norm.bias", "head.bias"):
            assert checkpoint[f"optimizer.state.{key}.exp_avg"].shape == checkpoint[f"module.{key}"].shape
            assert checkpoint[f"optimizer.state.{key}.exp_avg_sq"][...].min() >= 0
            assert checkpoint[f"optimizer.state.{key}.step"][...] == 3
        groups = checkpoint.state()["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [
        ["embed.weight", "head.weight"],
        ["norm.weight", "norm.bias", "head.bias"],
    ]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_moments_are_those_of_the_universal_folder():
    with milepost.open(STEPS["zero1"]) as parts, milepost.open(STEPS["universal"]) as universal:
        keys = [key for key in parts if key.startswith("optimizer.state.") and ".exp_avg" in key]
        assert len(keys) == 10
        for key in keys:
            assert torch.equal(parts[key][...], universal[key][...]), key


def load_sharded(rank, where):
    mesh = init_device_mesh("cpu", (3,))
    target = {"module": {"embed.weight": distribute_tensor(torch.zeros(11, 7), mesh, [Shard(0)])}}
    target["optimizer"] = {
        "state": {"head.weight": {"exp_avg": distribute_tensor(torch.zeros(5, 7), mesh, [Shard(1)])}}
    }
    milepost.load(target, where, allow_unexpected=True)
    return target["module"]["embed.weight"].full_tensor(), target["optimizer"]["state"]["head.weight"][
        "exp_avg"
    ].full_tensor()


@pytest.mark.slow
def test_parts_of_two_ranks_load_on_three(tmp_path):
    weight, moment = spawn(3, load_sharded, str(STEPS["zero3"]))[0]
    assert torch.equal(weight, expected("zero3")["embed.weight"])
    with milepost.open(STEPS["zero3"]) as checkpoint:
        assert torch.equal(moment, checkpoint["optimizer.state.head.weight.exp_avg"][...])
    milepost.convert(STEPS["zero3"], tmp_path / "own", to="milepost")
    with milepost.open(tmp_path / "own") as own:
        assert own.format == "milepost"
        assert torch.equal(own["module.embed.weight"][...], weight)


def test_a_module_loads_by_its_names():
    model = nn.ModuleDict({"embed": nn.Embedding(11, 7), "norm": nn.LayerNorm(7), "head": nn.Linear(7, 5)})
    milepost.load({"module": model}, FOLDER / "zero3", allow_unexpected=True)
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected("zero3")[key])


def test_what_only_a_pickle_can_make_is_refused_by_key(tmp_path):
    """The pickles name classes of DeepSpeed; nothing of it is imported or called."""
    shutil.copytree(STEPS["zero1"], tmp_path / "step")
    file = tmp_path / "step" / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    torch.save({**content, "hostile": Hostile()}, file)
    with milepost.open(tmp_path / "step") as checkpoint:
        assert checkpoint["note"] == "hello"
        with pytest.raises(milepost.CheckpointError):
            checkpoint["hostile"]
    assert not RAN


RAN = []


class Hostile:
    def __reduce__(self):
        return RAN.append, (1,)


def test_other_contents_are_errors_or_harmless(tmp_path):
    """Whatever stands in place of what DeepSpeed writes: the checkpoint opens, or the error is one of ours."""
    step = shutil.copytree(STEPS["zero2"], tmp_path / "step")
    file = step / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    outcomes = set()
    for key in ("module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"):
        for odd in (
            None,
            [],
            [3],
            {},
            {"x": 5},
            {"head.weight": ["a"]},
            5,
            "text",
            torch.ones(2),
            [{"head.weight": 4}],
        ):
            torch.save({**content, key: odd}, file)
            try:
                milepost.open(step).close()
                outcomes.add("opened")
            except milepost.CheckpointError:
                outcomes.add("refused")
    assert outcomes == {"opened", "refused"}


def test_what_does_not_fit_is_refused(tmp_path):
    def copy(name, number):
        return shutil.copytree(STEPS[name], tmp_path / f"{number}")

    missing = copy("zero1", 0)
    (missing / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(milepost.CheckpointDamaged, match="saved by 2 ranks, and has the parts of 1"):
        milepost.open(missing)
    parallel = copy("zero1", 1)
    shutil.copy(parallel / "mp_rank_00_model_states.pt", parallel / "mp_rank_01_model_states.pt")
    with pytest.raises(milepost.UnsupportedFormat, match="ds_to_universal"):
        milepost.open(parallel)
    half = copy("universal", 2)
    (half / "zero" / "head.bias" / "fp32.pt").unlink()
    with pytest.raises(milepost.CheckpointDamaged, match=r"head.bias has no fp32"):
        milepost.open(half)
    shapes = copy("zero2", 3)
    file = shapes / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    content["param_shapes"][0]["head.weight"] = torch.Size([50, 7])
    torch.save(content, file)
    with pytest.raises(milepost.CheckpointDamaged, match=r"of 350 elements of 'head.weight' are there"):
        milepost.open(shapes)
    damaged = copy("zero2", 4)
    file = damaged / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    data = bytearray(file.read_bytes())
    record = expected("zero2")["embed.weight"].numpy().tobytes()[:40]
    data[data.index(record)] ^= 1
    file.write_bytes(data)
    with milepost.open(damaged) as checkpoint, pytest.raises(milepost.CheckpointDamaged, match="CRC-32"):
        checkpoint["module.embed.weight"][...]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "latest").write_text("../../elsewhere")
    with pytest.raises(milepost.CheckpointNotFound):
        milepost.open(tmp_path / "other")


def test_a_module_that_is_not_whole_is_refused(tmp_path):
    experts = shutil.copytree(STEPS["zero1"], tmp_path / "experts")
    torch.save({"w": torch.ones(3)}, experts / "layer_0_expert_0_mp_rank_00_model_states.pt")
    with pytest.raises(milepost.UnsupportedFormat, match="1 files of layers or experts"):
        milepost.open(experts)
    parts = shutil.copytree(STEPS["zero3"], tmp_path / "parts")
    for file in parts.glob("*optim_states.pt"):
        file.unlink()
    with pytest.raises(milepost.CheckpointDamaged, match="are in no file"):
        milepost.open(parts)
    universal = shutil.copytree(STEPS["universal"], tmp_path / "universal")
    shutil.copy(universal / "mp_rank_00_model_states.pt", universal / "mp_rank_01_model_states.pt")
    with pytest.raises(milepost.UnsupportedFormat, match="Load it with DeepSpeed"):  # it is universal already
        milepost.open(universal)


def make_step(folder, elements=12, moment=12, dtype=torch.float32):
    """One step of stage 1 by two ranks, of which the first has this."""
    folder.mkdir()
    weight = torch.arange(24.0)
    torch.save({"module": {"w": weight}, "param_shapes": [{"w": weight.shape}]}, folder / "mp_rank_00_model_states.pt")
    for rank in range(2):
        mine = weight[12 * rank : 12 * rank + 12].clone()
        base = {"state": {0: {"step": 3, "exp_avg": mine[:moment].clone() if rank == 0 else mine}}}
        master = torch.cat([mine, torch.ones(max(elements - 12, 0))]).to(dtype) if rank == 0 else mine
        saved = {"base_optimizer_state": base, "single_partition_of_fp32_groups": [master], "partition_count": 2}
        torch.save({"optimizer_state_dict": saved}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def test_parts_that_would_be_read_wrongly_are_refused(tmp_path):
    with milepost.open(make_step(tmp_path / "good")) as checkpoint:
        assert checkpoint["optimizer.state.w.exp_avg"][...].tolist() == list(range(24))
    for name, odd, message in (
        ("short", {"moment": 5}, "shorter than the parameters"),  # what lies behind it was read
        ("long", {"elements": 16}, r"the ranks have \[16, 12\] elements"),  # what follows it was shifted
        ("type", {"dtype": torch.float64}, "float64 and float32"),
    ):
        with pytest.raises(milepost.CheckpointDamaged, match=message):
            milepost.open(make_step(tmp_path / name, **odd))


def test_the_optimizer_of_a_job_without_zero(tmp_path):
    state = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"module": {"w": torch.ones(3)}, "optimizer": state}, tmp_path / "mp_rank_00_model_states.pt")
    with milepost.open(tmp_path) as checkpoint:
        assert checkpoint.state()["optimizer"]["param_groups"] == state["param_groups"]
        assert checkpoint["module.w"][...].tolist() == [1, 1, 1]
