"""Every shard file is a valid safetensors file: the safetensors library opens it and reads the same numbers."""

import re

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

import milepost
from milepost.core.dtypes import DTYPES
from milepost.core.layout import Cut, Grid, Mesh
from milepost.core.limits import BLOCK_BYTES, PAGE_BYTES
from milepost.testing import run_ranks

STORED = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def sample(dtype, shape, seed=0):
    """Any bits at all, NaNs of every kind included; booleans are 0 or 1."""
    size = torch.Size(shape).numel() * DTYPES[dtype].size_bytes
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 2 if dtype == "bool" else 256, (size,), dtype=torch.uint8, generator=generator)
    return data.view(getattr(torch, dtype)).reshape(shape)


def raw(tensor):
    """The bytes of a tensor, whatever its dtype."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def shards(folder):
    return sorted(folder.glob("data/*/*.safetensors"))


def read_all(path):
    """Everything in a file, by both ways that the library offers, which must agree."""
    loaded = load_file(path)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(loaded)
        for name in file.keys():  # noqa: SIM118
            assert raw(file.get_tensor(name)) == raw(loaded[name])
    return loaded


def split_name(name):
    """A name as `format.md` spells it: the key, and the bounds of the box, or None for a whole tensor."""
    name = name.removeprefix("@@")
    match = re.fullmatch(r"(.*)\[([\d:,]*)\]", name)
    if not match:
        return name, None
    bounds = [tuple(map(int, part.split(":"))) for part in match[2].split(",") if part]
    return match[1], tuple(slice(a, b) for a, b in bounds)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_any_dtype_is_read_by_the_library_with_the_same_bits(tmp_path, dtype):
    state = {str(shape): sample(dtype, shape) for shape in [(), (1,), (3, 5), (2, 1, 7)]}
    milepost.save(state, tmp_path)
    (path,) = shards(tmp_path)
    found = read_all(path)
    kind = DTYPES[dtype]
    for key, tensor in state.items():
        assert found[key].dtype == STORED[kind.stored_as]
        assert tuple(found[key].shape) == (*tensor.shape, *kind.inner)
        assert raw(found[key]) == raw(tensor)


def test_all_dtypes_together_are_aligned_and_read_by_the_library(tmp_path):
    state = {dtype: sample(dtype, (3, 3), seed=i) for i, dtype in enumerate(DTYPES)}
    milepost.save(state, tmp_path)
    (path,) = shards(tmp_path)
    found = read_all(path)
    assert set(found) == {*DTYPES, "@checksums"}
    for dtype, tensor in state.items():
        assert raw(found[dtype]) == raw(tensor)
        assert found[dtype].data_ptr() % found[dtype].element_size() == 0


def test_complex_dtypes_without_a_name_are_readable_as_parts(tmp_path):
    half = torch.tensor([1, 0, 1, 0], dtype=torch.float16).view(torch.complex32)
    state = {"z": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128), "h": half}
    milepost.save(state, tmp_path)
    found = load_file(shards(tmp_path)[0])
    assert found["z"].tolist() == [[1, 2], [3, -4]]
    assert found["h"].tolist() == [[1, 0], [1, 0]]


GRID = Grid(Mesh.of((2, 2), range(4)), (Cut(0), Cut(1)))
STRIDED = Grid(Mesh.of((2, 2), range(4)), (Cut(0), Cut(0, 2)))  # rank 0 has rows 0 and 2, rank 1 has 1 and 3, ...


def parallel_state(rank):
    """Four ranks: tensors in a grid, in strided pieces, replicated (small and large), irregular, and private."""
    whole = whole_state()
    first = rank // 2 * 4 + rank % 2
    rows = [(0, 1), (1, 4), (4, 4), (4, 9)][rank]
    return {
        "grid": milepost.Sharded.on_grid((6, 10), whole["grid"][quarter(rank)].clone(), GRID, rank),
        "strided": milepost.Sharded.on_grid((8, 3), whole["strided"][[first, first + 2]], STRIDED, rank),
        "small": whole["small"],
        "large": whole["large"],
        "uneven": milepost.Sharded(
            (9,), {(rows[0],): whole["uneven"][slice(*rows)]} if rows[0] < rows[1] else {}, torch.int16
        ),
        "@odd[0]": whole["@odd[0]"],
        "mine": milepost.PerRank({"noise": torch.full((3,), rank)}),
    }


def quarter(rank):
    return slice(rank // 2 * 3, rank // 2 * 3 + 3), slice(rank % 2 * 5, rank % 2 * 5 + 5)


def whole_state():
    return {
        "grid": sample("float64", (6, 10), 1),
        "strided": sample("int32", (8, 3), 2),
        "small": sample("bfloat16", (5,), 3),
        "large": sample("uint8", (5 << 20,), 4),
        "uneven": sample("int16", (9,), 5),
        "@odd[0]": sample("bool", (2,), 6),
    }


def test_files_of_ranks_hold_every_element_once_by_box_name(tmp_path):
    run_ranks(4, lambda comm: milepost.save(parallel_state(comm.rank), tmp_path, process_group=comm))
    whole = whole_state()
    missing = {key: torch.ones(tensor.shape, dtype=torch.int32) for key, tensor in whole.items()}
    assert len(shards(tmp_path)) == 4
    for rank, path in enumerate(shards(tmp_path)):
        found = read_all(path)
        assert found.pop("@private/mine.noise").tolist() == [rank] * 3
        del found["@private"], found["@checksums"]
        for name, tensor in found.items():
            key, box = split_name(name)
            where = ... if box is None else box
            assert raw(tensor) == raw(whole[key][where]), name
            missing[key][where] -= 1
    assert all(not left.any() for left in missing.values())


def test_a_slice_of_a_tensor_is_read_by_the_library_without_the_rest(tmp_path):
    tensor = sample("float32", (100, 8))
    milepost.save({"x": tensor}, tmp_path)
    with safe_open(shards(tmp_path)[0], "pt") as file:
        assert raw(file.get_slice("x")[10:20]) == raw(tensor[10:20])


def test_data_starts_at_a_page_and_the_notes_say_whose_file_it_is(tmp_path):
    receipt = run_ranks(2, lambda comm: milepost.save(parallel_pair(comm.rank), tmp_path, process_group=comm))[0]
    for rank, path in enumerate(shards(tmp_path)):
        assert path.parent.name == receipt.save_id
        data = path.read_bytes()
        assert (8 + int.from_bytes(data[:8], "little")) % PAGE_BYTES == 0
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "milepost", "save_id": receipt.save_id, "rank": str(rank)}


def parallel_pair(rank):
    grid = Grid(Mesh.of((2,), range(2)), (Cut(0),))
    return {"x": milepost.Sharded.on_grid((2, 4), torch.full((1, 4), rank), grid, rank)}


def test_a_header_of_many_entries_still_ends_at_a_page(tmp_path):
    milepost.save({f"layer.{i}": torch.tensor(i) for i in range(500)}, tmp_path)
    (path,) = shards(tmp_path)
    found = read_all(path)
    assert [int(found[f"layer.{i}"]) for i in range(500)] == list(range(500))
    length = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert length > PAGE_BYTES
    assert length % PAGE_BYTES == 0


def test_the_table_of_checksums_is_an_entry_that_anyone_can_check(tmp_path):
    milepost.save({"x": sample("uint8", (BLOCK_BYTES * 9 + 5,))}, tmp_path)
    (path,) = shards(tmp_path)
    table = load_file(path)["@checksums"]
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    data = data[start : len(data) - 8 * len(table)]
    sums = [xxhash.xxh3_64_intdigest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    spans = [xxhash.xxh3_64_intdigest(data[at : at + 8 * BLOCK_BYTES]) for at in range(0, len(data), 8 * BLOCK_BYTES)]
    assert table.tolist() == sums + spans
    assert (len(sums), len(spans)) == (10, 2)


def test_empty_tensors_have_no_entry_and_no_file(tmp_path):
    milepost.save({"x": torch.zeros(0, 4), "y": torch.zeros(2)}, tmp_path / "a")
    assert set(load_file(shards(tmp_path / "a")[0])) == {"y", "@checksums"}
    milepost.save({"x": torch.zeros(0, 4)}, tmp_path / "b")
    assert shards(tmp_path / "b") == []
    assert milepost.open(tmp_path / "b").state()["x"].shape == (0, 4)
