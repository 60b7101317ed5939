"""Small files that ask for much: what they name again and again is counted, and what a sum covers is checked."""

import json
import os
import pickle
import struct
import time
import warnings
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import milepost

MANY = 100_000
PER_BOMB_S = 5.0


def text(letters):
    return b"X" + struct.pack("<I", len(letters)) + letters


def name(module, what):
    return f"c{module}\n{what}\n".encode()


def integer(number):
    raw = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


COLLIDING = [integer(i * (2**61 - 1)) for i in range(1, MANY)]
NUMBERS = b"".join(b"J" + struct.pack("<i", i) for i in range(MANY))
BYTES = b"B" + struct.pack("<I", MANY) + b"a" * MANY
AGAIN = b"]q\2(" + b"h\1h\0\x85R" * MANY + b"e."
BOMBS = {
    "tuples_of_the_same_tuple_as_a_key": b"Nq\0" + (b"(" + b"h\0" * 300 + b"tq\0") * 5 + b"}h\0Ns.",
    "one_long_tuple_as_many_keys": b"(" + b"N" * MANY + b"tq\0}(" + b"h\0N" * MANY + b"u.",
    "keys_that_hash_alike": b"}(" + b"N".join(COLLIDING) + b"Nu.",
    "keys_that_hash_alike_one_by_one": b"}" + b"Ns".join(COLLIDING) + b"Ns.",
    "members_that_hash_alike": b"\x8f(" + b"".join(COLLIDING) + b"\x90.",
    "frozen_members_that_hash_alike": b"(" + b"".join(COLLIDING) + b"\x91.",
    "a_set_of_what_hashes_alike": name("builtins", "set") + b"](" + b"".join(COLLIDING) + b"e\x85R.",
    "many_copies_of_a_size": b"(" + NUMBERS + b"tq\x000" + name("torch", "Size") + b"q\x010" + AGAIN,
    "many_copies_of_a_set": b"](" + NUMBERS + b"eq\x000" + name("builtins", "set") + b"q\x010" + AGAIN,
    "many_copies_of_bytes": BYTES + b"q\x000" + name("builtins", "bytearray") + b"q\x010" + AGAIN,
    "many_copies_of_fields": (
        b"}(" + b"".join(b"J" + struct.pack("<i", i) + b"N" for i in range(MANY)) + b"uq\x000" + name("numpy", "dtype")
        + text(b"f4") + b"\x85R" + b"h\0b" * MANY + b"."
    ),
    "the_same_bytes_everywhere": BYTES + b"q\x000}" + text(b"a") + b"](" + b"h\0" * MANY + b"es.",
    "the_same_set_everywhere": b"\x8f(" + NUMBERS + b"\x90q\x000}" + text(b"a") + b"](" + b"h\0" * MANY + b"es.",
    "a_long_name_above_many": (
        b"}" + text(b"a" * MANY) + b"}(" + b"".join(text(b"%d" % i) + b"N" for i in range(MANY // 10)) + b"us."
    ),
}  # fmt: skip


def with_pickle(path, data):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\4" + data)
        archive.writestr("archive/version", b"3\n")


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_pickle_cannot_ask_for_more_work_than_it_has_bytes(tmp_path, bomb):
    with_pickle(tmp_path / "bomb.pt", BOMBS[bomb])
    began = time.monotonic()
    with pytest.raises(milepost.UnsafeCheckpoint, match=r"bomb\.pt"):
        milepost.open(tmp_path / "bomb.pt")
    assert time.monotonic() - began < PER_BOMB_S


@pytest.mark.slow
def test_what_people_save_is_far_from_the_limits(tmp_path):
    shared = (1, 2, 3)
    state = {
        "tuples": {(i, j): i for i in range(100) for j in range(100)},
        "sets": [{shared, (i, 2)} for i in range(1000)],
        "frozen": [frozenset([shared, i]) for i in range(1000)],
        "dicts": [{shared: 1, 2.5: 2, None: 3} for _ in range(5000)],
        "large": {2**70 + i: i for i in range(1000)},
        "text": ["ünï" * 20] * 10_000,
    }
    torch.save(state, tmp_path / "a.pt")
    with milepost.open(tmp_path / "a.pt") as checkpoint:
        assert checkpoint.state() == state


def save_dcp(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)


def forged(tmp_path, state, change):
    save_dcp(state, tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    change(metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    began = time.monotonic()
    try:
        return milepost.open(tmp_path).state()
    finally:
        assert time.monotonic() - began < PER_BOMB_S


def test_dcp_values_share_one_allowance(tmp_path):
    laughs = []
    for _ in range(15):
        laughs = [laughs, laughs]
    with pytest.raises(milepost.UnsafeCheckpoint, match="again and again"):
        forged(tmp_path, {f"k{i}": (laughs,) for i in range(100)}, lambda _: None)


def test_a_tensor_in_a_dcp_value_is_in_proportion_to_its_file(tmp_path):
    with pytest.raises(milepost.UnsafeCheckpoint, match="far more than"):
        forged(tmp_path, {"a": (torch.zeros(1).expand(2**33),)}, lambda _: None)


def test_dcp_paths_of_one_long_name_are_refused(tmp_path):
    def change(metadata):
        long = "g" * 1_000_000
        metadata.planner_data = {key: (long, key) for key in metadata.state_dict_metadata}

    with pytest.raises(milepost.UnsafeCheckpoint, match="metadata"):
        forged(tmp_path, {f"k{i}": i for i in range(500)}, change)


def test_dcp_tensors_with_one_list_of_chunks_are_refused(tmp_path):
    def change(metadata):
        entry = metadata.state_dict_metadata["t"]
        entry.chunks = [entry.chunks[0]] * 20_000
        metadata.state_dict_metadata = {f"t{i}": entry for i in range(20_000)}

    with pytest.raises(milepost.UnsafeCheckpoint, match="chunks"):
        forged(tmp_path, {"t": torch.zeros(8)}, change)


def test_one_item_is_not_taken_for_many_chunks(tmp_path):
    def change(metadata):
        entry = metadata.state_dict_metadata["t"]
        entry.chunks = [ChunkStorageMetadata(torch.Size([i * 8]), torch.Size([8])) for i in range(100)]
        entry.size = torch.Size([800])
        metadata.storage_data = {MetadataIndex("t"): next(iter(metadata.storage_data.values()))}

    with pytest.raises(milepost.CheckpointDamaged, match="does not say where 't' is"):
        forged(tmp_path, {"t": torch.zeros(8)}, change)


def test_a_parameter_with_a_number_of_thousands_of_digits_is_just_a_name(tmp_path):
    def change(metadata):
        first, second = metadata.state_dict_metadata
        metadata.planner_data = {first: ("optim", "state", "1" * 5000), second: ("optim", "param_groups")}

    assert forged(tmp_path, {"a": 1, "b": 2}, change) == {"optim": {"state": {"1" * 5000: 1}, "param_groups": 2}}


VIEWS = {
    "rows": lambda t: t[10:50],
    "strided": lambda t: t[::3, ::2],
    "expanded": lambda t: t[:, :1].expand(100, 7),
    "conjugate": lambda t: torch.complex(t, t).conj(),
}


@pytest.mark.parametrize("kind", ["torch", "dcp"])
@pytest.mark.parametrize("view", VIEWS)
def test_damage_below_a_view_is_noticed_by_load_and_by_verify(tmp_path, view, kind):
    state, path = {"a": VIEWS[view](torch.randn(100, 40))}, tmp_path / "a"
    if kind == "torch":
        torch.save(state, path)
    else:
        save_dcp({"a": (state["a"],)}, path)
    file = path if kind == "torch" else path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.index(torch.empty(0, dtype=torch.uint8).set_(state["a"].untyped_storage()).numpy().tobytes())
    data[at + 8008] ^= 1
    file.write_bytes(data)
    with milepost.open(path) as checkpoint:
        assert not checkpoint.verify().ok
        for _ in range(2):
            with pytest.raises(milepost.CheckpointDamaged, match="CRC-32"):
                checkpoint.state()


@pytest.mark.parametrize("byte", [-4, 7], ids=["the length of its name, which moves the data", "its name"])
def test_a_local_header_that_names_another_record_is_damage(tmp_path, byte):
    torch.save({"a": torch.randn(100, 40)[::3]}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    at = data.index(b"a/data/0")
    data[at + byte] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(milepost.CheckpointDamaged, match="not where it should be"):
        milepost.open(tmp_path / "a.pt").state()


def test_an_expanded_view_with_wide_gaps_is_read_once(tmp_path):
    wide = torch.arange(64 * 16384, dtype=torch.float32)[::16384]
    torch.save({"a": wide.expand(200_000, 64)}, tmp_path / "a.pt")
    began = time.monotonic()
    with milepost.open(tmp_path / "a.pt") as checkpoint:
        assert torch.equal(checkpoint["a"].read(), wide.expand(200_000, 64))
    assert time.monotonic() - began < PER_BOMB_S


@pytest.mark.parametrize(
    ("to", "modules", "others"),
    [("torch", ("read.archive", "write.zip"), 6), ("safetensors", ("read.huggingface", "write.huggingface"), 1)],
)
def test_writers_and_readers_have_one_limit_on_the_entries_of_a_file(tmp_path, monkeypatch, to, modules, others):
    state = {f"k{i}": torch.full((3,), i) for i in range(5)}
    milepost.save(state, tmp_path / "source")
    for limit in (len(state) + others, len(state) + others - 1):
        for module in modules:
            monkeypatch.setattr(f"milepost.formats.{module}.MAX_ENTRIES", limit)
        if limit == len(state) + others:
            milepost.convert(tmp_path / "source", tmp_path / "most", to)
            assert all(
                torch.equal(tensor, state[key]) for key, tensor in milepost.open(tmp_path / "most").state().items()
            )
    with pytest.raises(milepost.InvalidRequest, match=f"{limit + 1} (records|entries)"):
        milepost.convert(tmp_path / "source", tmp_path / "more", to)
    with pytest.raises(milepost.UnsafeCheckpoint, match=f"most.* {limit + 1} (records|entries), over {limit}"):
        milepost.open(tmp_path / "most")


def test_extra_fields_of_an_archive_are_not_walked_through_one_by_one(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt", "a") as archive:
        for i in range(200):
            more = zipfile.ZipInfo(f"a/data/more-{i}")
            more.extra = b"\2\0\0\0" * 16_000
            archive.writestr(more, b"")
    start = time.process_time()
    assert torch.equal(milepost.open(tmp_path / "a.pt").state()["a"], torch.ones(3))
    assert time.process_time() - start < 0.3


def safetensors_file(path, entries, data_bytes):
    head = ("{" + ",".join(f"{json.dumps(key)}:{json.dumps(entry)}" for key, entry in entries) + "}").encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + os.urandom(data_bytes))


def entry(start, stop):
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("entries", "size"),
    [
        ([("a", entry(0, 8)), ("b", entry(4, 12))], 16),
        ([("a", entry(0, 8)), ("b", entry(12, 16))], 16),
        ([("a", entry(0, 8)), ("a", entry(8, 16))], 16),
        ([("a", entry(0, 8))], 16),
    ],
    ids=["overlap", "hole", "a key twice", "more behind"],
)
def test_entries_of_safetensors_that_do_not_fill_the_file_are_refused(tmp_path, entries, size):
    safetensors_file(tmp_path / "a.safetensors", entries, size)
    with pytest.raises((milepost.CheckpointDamaged, milepost.UnsafeCheckpoint), match=r"a\.safetensors"):
        milepost.open(tmp_path / "a.safetensors")


@pytest.mark.parametrize("lost", [0, 1])
def test_numbered_shards_without_their_index_are_no_checkpoint(tmp_path, lost):
    torch.save({key: torch.randn(100) for key in "abc"}, tmp_path / "a.pt")
    milepost.convert(tmp_path / "a.pt", tmp_path / "hf", "safetensors", max_shard_bytes=400)
    (tmp_path / "hf" / "model.safetensors.index.json").unlink()
    for shard in sorted((tmp_path / "hf").iterdir())[:lost]:
        shard.unlink()
    with pytest.raises(milepost.CheckpointNotFound, match="index"):
        milepost.open(tmp_path / "hf")


def test_a_target_below_a_file_says_what_is_wrong_first(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    (tmp_path / "b").write_text("a file")
    with pytest.raises(milepost.StorageError, match="cannot create"):
        milepost.convert(tmp_path / "a.pt", tmp_path / "b" / "below")
    with pytest.raises(milepost.InvalidRequest, match="Convert to another folder"):
        milepost.convert(tmp_path / "a.pt", tmp_path / "a.pt" / "below")
