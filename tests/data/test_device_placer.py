"""The worker for tensors on a GPU, on tensors of the CPU: the same blocks, lanes and copies, without streams."""

import pytest
import torch

import milepost
from milepost import CheckpointDamaged, Sharded, StateMismatch, Transfer
from milepost.core.limits import BLOCK_BYTES, MIB
from milepost.data import device_placer
from milepost.data.device_placer import DevicePlacer
from milepost.store.base import FILES
from milepost.testing import run_ranks
from tests.data.states import assert_same, blank, random_tensor


@pytest.fixture(autouse=True)
def played(monkeypatch):
    """Play a GPU. Gives what was sent by which way, and what was waited for."""
    seen = []
    monkeypatch.setattr("milepost.data.place.gpus_of", lambda tensors: {tensor.device for tensor in tensors})
    monkeypatch.setattr("milepost.data.place.address_of", lambda tensor: 0)
    wait, over = DevicePlacer.wait, device_placer._DeviceSide._on_device
    monkeypatch.setattr(DevicePlacer, "wait", lambda self: seen.append("waited") or wait(self))
    monkeypatch.setattr(
        device_placer._DeviceSide, "_on_device", lambda self, *block: seen.append("over") or over(self, *block)
    )
    return seen


def mixed():
    return {
        "large": random_tensor("float32", 1100, 1024),
        "odd": random_tensor("bfloat16", 333, 777, seed=1),
        **{f"small.{i}": random_tensor("float16", 64, 8, seed=i) for i in range(300)},
        "scalar": torch.tensor(3.5),
        "bytes": random_tensor("uint8", 70_001, seed=2),
        "complex": torch.randn(30, 40, dtype=torch.complex64),
    }


def blanks(state):
    return {key: blank(one) for key, one in state.items()}


WAYS = [{}, {"transfer": Transfer(1, BLOCK_BYTES)}, {"transfer": Transfer(3, MIB)}, {"verify": False}]


@pytest.mark.parametrize("way", WAYS)
def test_large_and_small_tensors_arrive(tmp_path, played, way):
    state = mixed()
    milepost.save(state, tmp_path)
    target = blanks(state)
    milepost.load(target, tmp_path, **way)
    assert_same(target, state)
    assert "over" in played, "many small tensors go over as one block"
    assert played[-1] == "waited"


def test_large_tensors_go_straight_into_place(tmp_path, played):
    state = {f"{i}": random_tensor("float32", 1024, 1024, seed=i) for i in range(3)}
    milepost.save(state, tmp_path)
    target = blanks(state)
    milepost.load(target, tmp_path)
    assert_same(target, state)
    assert "over" not in played


@pytest.mark.parametrize("verify", [True, False])
def test_columns_strides_and_slices_arrive(tmp_path, verify):
    whole = torch.randn(900, 700)
    milepost.save({"a": whole, "b": whole.t(), "c": whole}, tmp_path)
    part = torch.zeros(900, 100)
    frame = torch.zeros(902, 702)
    target = {
        "a": Sharded((900, 700), {(0, 300): part}),
        "b": blank(whole).t(),
        "c": frame[1:-1, 1:-1],
    }
    milepost.load(target, tmp_path, verify=verify)
    assert torch.equal(part, whole[:, 300:400])
    assert torch.equal(target["b"], whole.t())
    assert torch.equal(frame[1:-1, 1:-1], whole)
    assert not frame[0].any()
    assert not frame[:, -1].any()


def test_other_types_and_conjugates_and_inference_tensors_are_filled(tmp_path):
    state = {"a": torch.arange(300_000.0), "z": torch.randn(500, dtype=torch.complex64), "i": torch.arange(9.0)}
    milepost.save(state, tmp_path)
    with torch.inference_mode():
        inside = torch.zeros(9)
    memory = torch.zeros(500, dtype=torch.complex64)
    target = {"a": torch.zeros(300_000, dtype=torch.float64), "z": memory.conj(), "i": inside}
    milepost.load(target, tmp_path, convert_dtype=True)
    assert torch.equal(target["a"], state["a"].double())
    assert torch.equal(memory, state["z"].conj())
    assert torch.equal(inside.clone(), state["i"])
    with pytest.raises(StateMismatch, match="cannot hold"):
        milepost.load(
            {"a": torch.zeros(300_000, dtype=torch.float16)}, tmp_path, convert_dtype=True, allow_unexpected=True
        )


def test_load_in_inference_mode_fills_tensors_of_several_files(tmp_path):
    """Views that this thread makes are filled by others, which are not in that mode."""
    whole = {f"{i}": random_tensor("float32", 3000, 512, seed=i) for i in range(6)}

    def save(comm):
        first = 1500 * comm.rank
        parts = {key: Sharded((3000, 512), {(first, 0): one[first : first + 1500]}) for key, one in whole.items()}
        milepost.save(parts, tmp_path, process_group=comm)

    run_ranks(2, save)
    for _ in range(4):
        target = blanks(whole)
        with torch.inference_mode():
            milepost.load(target, tmp_path, transfer=Transfer(4, MIB))
        assert_same(target, whole)


def test_device_without_room_is_filled_from_main_memory(tmp_path, monkeypatch):
    empty = torch.empty

    def full(*size, **options):
        if "device" in options:
            raise torch.OutOfMemoryError("no room")
        return empty(*size, **options)

    state = mixed()
    milepost.save(state, tmp_path)
    target = blanks(state)
    monkeypatch.setattr(device_placer.torch, "empty", full)
    milepost.load(target, tmp_path)
    assert_same(target, state)


def test_load_goes_on_without_pinned_memory(tmp_path, monkeypatch, caplog):
    empty, tried = torch.empty, []

    def limited(*size, **options):
        if options.get("pin_memory"):
            tried.append(size)
            raise RuntimeError("CUDA error: out of memory\nmore text")
        return empty(*size, **options)

    monkeypatch.setattr("milepost.data.place.needs_pinned", lambda tensors: True)
    monkeypatch.setattr(torch, "empty", limited)
    state = mixed()
    milepost.save(state, tmp_path)
    target = blanks(state)
    milepost.load(target, tmp_path, transfer=Transfer(1, MIB))
    assert_same(target, state)
    assert len(tried) == 1, "what failed once is not tried again"
    assert "cannot pin 1048576 bytes of host memory (CUDA error: out of memory); copies" in caplog.text


def test_damage_is_raised_after_all_copies_have_ended(tmp_path, played):
    state = {"a": random_tensor("float32", 3000, 1024)}
    milepost.save(state, tmp_path)
    [path] = tmp_path.glob("data/*/*")
    data = bytearray(path.read_bytes())
    data[7_000_000] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="'a'"):
        milepost.load(blanks(state), tmp_path)
    assert played[-1] == "waited"


def test_tensors_here_and_on_a_device_are_filled_by_one_load(tmp_path, monkeypatch):
    meta = torch.device("meta")
    monkeypatch.setattr("milepost.data.place.gpus_of", lambda tensors: {meta})  # nothing of this load is there
    state = mixed()
    milepost.save(state, tmp_path)
    target = blanks(state)
    milepost.load(target, tmp_path)
    assert_same(target, state)


def test_threads_keep_to_the_memory(monkeypatch):
    monkeypatch.setattr("milepost.data.transfer.cpus_for_this_process", lambda: 64)
    for limit in (BLOCK_BYTES, 3 * MIB, 64 * MIB, 512 * MIB):
        transfer = Transfer().within(limit).to_read(FILES, to_device=True).from_cache(copies=2)
        assert 2 * transfer.threads * transfer.block_bytes <= max(limit, 2 * BLOCK_BYTES)
    assert transfer.threads == 16
