"""Files of torch.save: what torch.load gives is what was saved, and the file is laid out as torch itself does."""

import io
import os
import warnings
import zipfile
from collections import namedtuple

import pytest
import torch

import milepost
from milepost.core.box import Box
from milepost.core.dtypes import DTYPES
from milepost.data.late import LateBox
from milepost.formats.write.zip import ArchiveLayout
from tests.formats.write.conversions import random_bits, same, training_state


def test_containers_values_and_bytes_come_back_through_torch_load(tmp_path):
    state = training_state()
    milepost.save(state, tmp_path / "source")
    done = milepost.convert(tmp_path / "source", tmp_path / "a.pt", "torch")
    same(torch.load(tmp_path / "a.pt", weights_only=True), state)
    assert (done.format, done.tensors) == ("torch", sum(1 for _ in tensors_in(state)))


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def test_the_file_is_the_one_that_torch_save_writes_but_for_its_id(tmp_path):
    state = training_state() | {"new": random_bits("uint16", 9)}
    milepost.save(state, tmp_path / "source")
    milepost.convert(tmp_path / "source", tmp_path / "a.pt", "torch")
    buffer = io.BytesIO()
    torch.save(milepost.open(tmp_path / "source").state(), buffer)
    ours, theirs = (tmp_path / "a.pt").read_bytes(), buffer.getvalue()
    assert len(ours) == len(theirs)
    differ = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    # The 40 digits, and their CRC in the descriptor and in the directory.
    assert len(differ) <= 48
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None
        last = archive.getinfo("archive/.data/serialization_id").header_offset
    assert min(differ) > last


@pytest.mark.parametrize("dtype", [name for name in DTYPES if hasattr(torch, name)])
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    state = {"a": random_bits(dtype, 5, 6), "b": random_bits(dtype, 1)[0], "c": random_bits(dtype, 0, 2)}
    milepost.save(state, tmp_path / "source")
    milepost.convert(tmp_path / "source", tmp_path / "a.pt", "torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        loaded = torch.load(tmp_path / "a.pt", weights_only=True)
        same(loaded, state)


def test_torch_can_map_the_file_and_work_out_the_offsets_by_itself(tmp_path):
    state = {f"t{i}": random_bits("float32", i * 100) for i in range(6)}
    milepost.save(state, tmp_path / "source")
    milepost.convert(tmp_path / "source", tmp_path / "a.pt", "torch")
    from torch.utils.serialization import config

    before = config.load.calculate_storage_offsets
    config.load.calculate_storage_offsets = True
    try:
        same(torch.load(tmp_path / "a.pt", weights_only=True, mmap=True), state)
    finally:
        config.load.calculate_storage_offsets = before


def test_files_over_four_gib_are_laid_out_as_torch_does(tmp_path):
    sizes = [12, 5 << 30, 28, 0, 8]
    with torch.serialization.skip_data():
        tensors = {str(i): torch.empty(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
        torch.save(tensors, tmp_path / "archive.pt")  # with holes where the data would be
    with zipfile.ZipFile(tmp_path / "archive.pt") as theirs:
        pickled = theirs.read("archive/data.pkl")
        ours = ArchiveLayout(0, pickled, [LateBox(None, "", "uint8", Box.whole((size,))) for size in sizes])
        assert ours.size_bytes == (tmp_path / "archive.pt").stat().st_size
        starts = {piece.start: 0 for piece in ours.pieces if isinstance(piece.data, LateBox)}
        with (tmp_path / "archive.pt").open("r+b") as file:
            for start in starts:
                at, data = ours.descriptor(start, 0)
                file.seek(at)
                assert file.read(len(data)) == data
            at, data = ours.directory(starts)
            file.seek(at)
            file.write(data)
            for piece in ours.pieces:
                if isinstance(piece.data, bytes):
                    file.seek(piece.start)
                    file.write(piece.data)
    with zipfile.ZipFile(tmp_path / "archive.pt") as mixed:
        assert [i.file_size for i in mixed.infolist() if "/data/" in i.filename] == sizes
        assert mixed.read("archive/version") == b"3\n"
    loaded = torch.load(tmp_path / "archive.pt", weights_only=True, mmap=True)
    assert [len(tensor) for tensor in loaded.values()] == sizes
    os.unlink(tmp_path / "archive.pt")


def test_what_torch_load_would_not_read_is_listed_and_can_be_left_out(tmp_path):
    milepost.save(
        {"a": torch.ones(3), "odd": range(3), "odder": {"x": slice(1, 2)}}, tmp_path / "source", allow_pickle=True
    )
    with pytest.raises(milepost.InvalidRequest, match=r"(?s)2 values.*'odd'.*'odder.x'"):
        milepost.convert(tmp_path / "source", tmp_path / "a.pt", "torch", allow_pickle=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]
    milepost.convert(tmp_path / "source", tmp_path / "a.pt", "torch", rename={"odd": None, "odder.x": None})
    same(torch.load(tmp_path / "a.pt", weights_only=True), {"a": torch.ones(3), "odder": {}})


def test_types_that_other_programs_do_not_know_become_plain_ones(tmp_path):
    import numpy as np

    point = namedtuple("point", "x y")  # noqa: PYI024
    state = {
        "point": point(torch.ones(1), 2),
        "array": np.arange(3.0),
        "number": np.float32(1.5),
        "long": b"ab" * 50_000,
        "private": milepost.PerRank({"seed": torch.arange(2)}),
    }
    milepost.save(state, tmp_path / "source")
    milepost.convert(tmp_path / "source", tmp_path / "a.pt", "torch")
    expected = {
        "point": (torch.ones(1), 2),
        "array": torch.arange(3.0, dtype=torch.float64),
        "number": 1.5,
        "long": b"ab" * 50_000,
        "private": {0: {"seed": torch.arange(2)}},
    }
    same(torch.load(tmp_path / "a.pt", weights_only=True), expected)
