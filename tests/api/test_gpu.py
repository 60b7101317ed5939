"""On an accelerator: states in device memory, saved and loaded exactly. Skipped, saying so, where there is none."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import milepost
from milepost.core.dtypes import DTYPES
from tests.tensors import check_statistics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator on this machine"),
]


def bits(tensor):
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).cpu()


def test_every_dtype_goes_from_device_memory_to_device_memory(tmp_path):
    state = {}
    for name, dtype in DTYPES.items():
        data = torch.randint(0, 2, (24 * dtype.size_bytes,), dtype=torch.uint8, device="cuda")
        state[name] = data.view(getattr(torch, name)).reshape(4, 6)
    state["transposed"] = torch.randn(40, 30, device="cuda").t()
    state["large"] = torch.randn(5 << 20, device="cuda")
    milepost.save(state, tmp_path)
    target = {k: torch.zeros_like(v.view(torch.uint8) if v.is_contiguous() else v) for k, v in state.items()}
    target = {k: v.view(state[k].dtype) for k, v in target.items()}
    milepost.load(target, tmp_path)
    for key in state:
        assert torch.equal(bits(state[key]), bits(target[key])), key
        assert target[key].is_cuda


def test_a_job_with_only_nccl_saves_and_loads_a_sharded_model(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    dist.init_process_group("nccl")
    try:
        mesh = init_device_mesh("cuda", (1,))
        model = fully_shard(nn.Linear(64, 32, device="cuda"), mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        milepost.save({"model": model, "optim": optimizer}, tmp_path)
        with torch.device("meta"):
            blank = nn.Linear(64, 32)
        blank = fully_shard(blank, mesh=mesh)
        milepost.load({"model": blank}, tmp_path, allow_unexpected=True)
        assert torch.equal(blank.weight.full_tensor(), model.weight.full_tensor())
        assert blank.weight.is_cuda
        fresh = torch.optim.AdamW(blank.parameters(), fused=True)
        milepost.load({"model": blank, "optim": fresh}, tmp_path)
        old, new = optimizer.state_dict()["state"][0], fresh.state_dict()["state"][0]
        assert torch.equal(old["exp_avg"].full_tensor(), new["exp_avg"].full_tensor())
        blank(torch.randn(4, 64, device="cuda")).sum().backward()
        fresh.step()
    finally:
        dist.destroy_process_group()


def gpu_state():
    base = torch.arange(4096.0, device="cuda")
    return {
        "many": [torch.full((257,), float(i), device="cuda") for i in range(1000)],
        "large": torch.rand(32 << 20, device="cuda"),
        "strided": torch.rand(512, 768, device="cuda").t(),
        "conj": torch.rand(64, dtype=torch.complex64, device="cuda").conj(),
        "views": [base[:1000], base[500:], base],
        "half": torch.rand(1001, device="cuda").to(torch.bfloat16),
        "eight": torch.rand(333, device="cuda").to(torch.float8_e4m3fn),
        "here": torch.rand(1000),
        "step": [1, {"a": 2}],
    }


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from tensors_of(item)


def spoil(state):
    """Change everything, right away, by work that the GPU has yet to do."""
    for tensor in tensors_of(state):
        tensor.view(torch.uint8).fill_(7) if tensor.element_size() == 1 else tensor.mul_(3).add_(1)
    state["step"][1]["a"] = 99


@pytest.mark.parametrize("background", ["thread", "process"])
@pytest.mark.parametrize("stage", ["auto", "host", "device", "overlap"])
def test_an_async_save_from_a_gpu_is_the_state_at_the_call(tmp_path, stage, background):
    with milepost.AsyncSaver(stage=stage, background=background) as saver:
        for turn in range(3):
            state = gpu_state()
            # Work that is queued when the call is made, and must be done before the copy.
            for _ in range(20):
                state["large"].mul_(1.0001)
            pending = saver.save(state, tmp_path / str(turn))
            expected = None
            if stage == "overlap":
                expected = [bits(tensor).clone() for tensor in tensors_of(state)]
                pending.wait_staged(60)
            else:
                kept = [tensor.clone() for tensor in tensors_of(state)]
            spoil(state)
            pending.result(120)
            expected = expected or [bits(tensor) for tensor in kept]
            found = milepost.open(tmp_path / str(turn)).state()
            assert all(torch.equal(bits(a), b) for a, b in zip(tensors_of(found), expected, strict=True))
            assert found["step"] == [1, {"a": 2}]


def test_without_room_on_the_gpu_it_is_copied_to_the_host(tmp_path, monkeypatch):
    state = {"w": torch.rand(1 << 20, device="cuda")}
    with milepost.AsyncSaver() as saver:
        monkeypatch.setattr("milepost.background.staging.snapshot.room_on", lambda device: 0)
        pending = saver.save(state, tmp_path / "1")
        assert pending.staged()
        monkeypatch.undo()

        def full(tensors):
            raise torch.OutOfMemoryError("full")

        monkeypatch.setattr("milepost.background.staging.snapshot.clone_on_devices", full)
        pending.result(60)
        expected = state["w"].clone()
        pending = saver.save(state, tmp_path / "2")
        state["w"].zero_()
        pending.result(60)
    assert torch.equal(milepost.open(tmp_path / "2")["w"].read(), expected.cpu())


@pytest.mark.parametrize("stage", ["host", "device"])
def test_a_budget_bounds_the_copy_of_a_gpu_state(tmp_path, stage):
    state = {f"w{i}": torch.rand(4 << 20, device="cuda") for i in range(8)}
    expected = {key: value.cpu() for key, value in state.items()}
    with milepost.AsyncSaver(stage=stage, staging_bytes=40 << 20) as saver:
        pending = saver.save(state, tmp_path)
        for value in state.values():
            value.zero_()
        pending.result(60)
        assert saver._engine.stager.arena.capacity <= 40 << 20
    found = milepost.open(tmp_path)
    assert all(torch.equal(found[key].read(), value) for key, value in expected.items())


def test_default_device_of_the_caller_changes_nothing(tmp_path):
    old = {"here": torch.randn(3000), "there": torch.randn(40, 30, device="cuda").t(), "own": milepost.PerRank([1])}
    torch.set_default_device("cuda")
    try:
        milepost.save(old, tmp_path / "now")
        milepost.async_save(old, tmp_path / "later").result()
        read = [milepost.open(tmp_path / place).state() for place in ("now", "later")]
        model = nn.Linear(3, 3, device="meta")
        milepost.save({"m": nn.Linear(3, 3)}, tmp_path / "m")
        milepost.load({"m": model}, tmp_path / "m")
    finally:
        torch.set_default_device(None)
    for state in read:
        assert (state["here"].device.type, state["there"].device.type) == ("cpu", "cpu")
        assert torch.equal(state["here"], old["here"])
        assert torch.equal(state["there"], old["there"].cpu())
    assert model.weight.device.type == "cpu", "memory is where `device` says, by default on the CPU"


@pytest.mark.parametrize("way", ["save", "device", "overlap", "process"])
def test_statistics_of_device_memory_are_those_of_what_was_saved(tmp_path, way):
    state = {"state": gpu_state(), "odd": torch.tensor([1.0, float("nan"), float("inf")], device="cuda")}
    if way == "save":
        milepost.save(state, tmp_path, statistics="histogram", healthy=True)
    else:
        given = {"background": "process"} if way == "process" else {"stage": way}
        with milepost.AsyncSaver(**given) as saver:
            pending = saver.save(state, tmp_path, statistics="histogram", healthy=True)
            pending.wait_staged(60)
            spoil(state["state"])
            pending.result(120)
    with milepost.open(tmp_path) as checkpoint:
        assert checkpoint.health.reason == "1 NaN and 1 infinite in 'odd'"
        assert checkpoint.statistics.keys() == checkpoint.tensors.keys()
        for key, found in checkpoint.statistics.items():
            check_statistics(found, checkpoint.tensors[key].read())


@pytest.mark.parametrize("options", [{}, {"verify": False}, {"transfer": milepost.Transfer(3, 1 << 20)}])
def test_small_strided_and_large_tensors_arrive_on_the_device(tmp_path, options):
    state = {f"small.{i}": torch.randn(64, 8, device="cuda") for i in range(3000)}
    state |= {"large": torch.randn(9 << 20, device="cuda"), "rows": torch.randn(3000, 1000, device="cuda")}
    milepost.save(state, tmp_path)
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    frame = torch.zeros(3002, 1002, device="cuda")
    target["rows"] = frame[1:-1, 1:-1]
    milepost.load(target, tmp_path, **options)
    assert all(torch.equal(target[key], state[key]) for key in state)
    assert not frame[0].any()
    columns = torch.zeros(3000, 100, device="cuda")
    part = {"rows": milepost.Sharded((3000, 1000), {(0, 200): columns}), "large": torch.zeros(9 << 20).double().cuda()}
    milepost.load(part, tmp_path, allow_unexpected=True, convert_dtype=True, **options)
    assert torch.equal(columns, state["rows"][:, 200:300])
    assert torch.equal(part["large"], state["large"].double())


def test_load_overwrites_what_was_launched_before_it(tmp_path):
    state = {"w": torch.randn(40 << 20, device="cuda")}
    milepost.save(state, tmp_path)
    target = {"w": torch.zeros_like(state["w"])}
    for _ in range(3):
        torch.cuda._sleep(200_000_000)
        target["w"].fill_(7)
        milepost.load(target, tmp_path)
        assert torch.equal(target["w"], state["w"])


def test_damage_in_a_load_into_device_memory_is_told(tmp_path):
    state = {"w": torch.randn(20 << 20, device="cuda")}
    milepost.save(state, tmp_path)
    [path] = tmp_path.glob("data/*/*")
    whole = path.read_bytes()
    path.write_bytes(whole[: 50 << 20] + bytes([whole[50 << 20] ^ 1]) + whole[(50 << 20) + 1 :])
    target = {"w": torch.zeros_like(state["w"])}
    with pytest.raises(milepost.CheckpointDamaged, match="'w'"):
        milepost.load(target, tmp_path)
    path.write_bytes(whole)
    milepost.load(target, tmp_path)
    assert torch.equal(target["w"], state["w"])


@pytest.mark.parametrize("base", [False, True])
def test_save_in_another_stream_saves_what_was_launched_there(tmp_path, base):
    state = {"w": torch.zeros(30 << 20, device="cuda"), "columns": torch.zeros(2000, 2000, device="cuda").t()}
    options = {"base": tmp_path / "base"} if base else {}
    milepost.save(state, tmp_path / "base", base=tmp_path / "none")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        state["w"].fill_(3)
        state["columns"].fill_(4)
        milepost.save(state, tmp_path / "saved", **options)
    found = milepost.open(tmp_path / "saved").state()
    assert (found["w"] == 3).all()
    assert (found["columns"] == 4).all()


def test_load_in_another_stream_comes_after_what_was_launched_there(tmp_path):
    state = {"w": torch.randn(30 << 20, device="cuda")}
    milepost.save(state, tmp_path)
    target = {"w": torch.zeros_like(state["w"])}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        torch.cuda._sleep(500_000_000)
        target["w"].fill_(3)
        milepost.load(target, tmp_path)
    assert torch.equal(target["w"], state["w"])
