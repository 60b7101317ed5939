"""Checkpoints of more files than may be open at once: each is opened once or so, not once for each entry."""

import pytest
import torch

import milepost
from milepost import Sharded
from milepost.data.read import Files
from milepost.testing import run_ranks


@pytest.fixture
def opened(monkeypatch):
    """The numbers of the files that are opened, while four may be open."""
    numbers = []
    make = Files.make
    monkeypatch.setattr("milepost.data.read.MAX_OPEN", 4)
    monkeypatch.setattr(Files, "make", lambda self, number: numbers.append(number) or make(self, number))
    return numbers


def test_incremental_save_opens_each_older_file_once(tmp_path, opened):
    tensors = {f"t{n:03}": torch.full((20_000,), float(n)) for n in range(120)}
    for step in range(12):
        for n in range(step, 120, 12):
            tensors[f"t{n:03}"] += 1
        opened.clear()
        milepost.save(tensors, tmp_path / f"{step}", base=tmp_path / f"{step - 1}", max_waste=1)
    assert 11 <= len(opened) <= 12 + 4
    opened.clear()
    with milepost.open(tmp_path / "11") as checkpoint:
        assert len(checkpoint.manifest.older) == 11
        assert checkpoint.verify().ok
    assert len(opened) <= 3 * 12
    target = milepost.load({key: torch.zeros(20_000) for key in tensors}, tmp_path / "11")
    assert all(torch.equal(target[key], tensor) for key, tensor in tensors.items())


def test_verify_opens_the_files_of_many_ranks_twice(tmp_path, opened):
    def save_cut(comm):
        cut = {f"t{n}": Sharded((80,), {(comm.rank * 8,): torch.full((8,), float(n))}) for n in range(30)}
        milepost.save(cut, tmp_path, process_group=comm)

    run_ranks(10, save_cut)
    opened.clear()
    assert milepost.open(tmp_path).verify().ok
    assert len(opened) <= 2 * 10
