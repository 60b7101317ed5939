"""Tensors that list their own boxes: saved and loaded as such, in any cut, by planners and without."""

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import milepost
import milepost.dcp as dcp
from milepost.errors import InvalidState
from tests.ranks import spawn

WHOLE = torch.arange(16 * 6, dtype=torch.float64).view(16, 6)
SAVED = {0: [(0, 0, 4, 2), (0, 2, 4, 4)], 1: [(4, 0, 3, 6)], 2: [(7, 0, 9, 1), (7, 1, 9, 5)], 3: []}
"""The boxes of each rank: row, column, rows, columns. Uneven, several on a rank, none on the last."""
WANTED = {0: [(0, 0, 16, 3)], 1: [(0, 3, 5, 3), (5, 3, 11, 3)]}


class Described(torch.Tensor):
    """A tensor that no operation works on, but which can say where its memory belongs."""

    @staticmethod
    def __new__(cls, name, shape, parts):
        kind = next(iter(parts.values())).dtype if parts else torch.float32
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=kind)
        made.fqn, made.parts = name, parts
        return made

    def __init__(self, *args):
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)

    def _chunks(self):
        return [ChunkStorageMetadata(torch.Size(at), part.size()) for at, part in self.parts.items()]

    def __create_chunk_list__(self):
        return self._chunks()

    def __create_write_items__(self, fqn, value):
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(self.dtype), self.size()),
            )
            for chunk in self._chunks()
        ]

    def __get_tensor_shard__(self, index):
        assert index.fqn == self.fqn
        return self.parts[tuple(index.offset)]


def parts_of(boxes, whole):
    return {(r, c): whole[r : r + n, c : c + m].clone() for r, c, n, m in boxes}


def state_of(boxes, whole, mesh):
    """The same boxes, in a tensor of its own class and as the local part of a DTensor."""
    own, wrapped = parts_of(boxes, whole), parts_of(boxes, whole)
    local = LocalShardsWrapper(list(wrapped.values()), list(wrapped))
    sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    return {"own": Described("own", whole.shape, own), "wrapped": sharded, "n": 7}, (own, wrapped)


def save_job(rank, folder):
    state, _ = state_of(SAVED[rank], WHOLE, init_device_mesh("cpu", (4,)))
    milepost.save(state, folder / "milepost")
    dcp.save(state, checkpoint_id=folder / "local plans")
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    dcp.save(state, checkpoint_id=folder / "global plan", planner=planner)
    milepost.async_save(state, folder / "async").result()


def load_job(rank, folder):
    found = {}
    for place in ("milepost", "local plans", "global plan", "async"):
        for name, load in {"milepost": milepost.load, "dcp": lambda s, p: dcp.load(s, checkpoint_id=p)}.items():
            state, parts = state_of(WANTED[rank], torch.zeros_like(WHOLE), init_device_mesh("cpu", (2,)))
            load(state, folder / place)
            expected = parts_of(WANTED[rank], WHOLE)
            found[place, name] = all(torch.equal(mine[at], expected[at]) for mine in parts for at in expected)
    return found


@pytest.mark.slow
def test_uneven_boxes_are_saved_by_four_ranks_and_loaded_by_two(tmp_path):
    spawn(4, save_job, tmp_path)
    for place in ("milepost", "local plans", "global plan", "async"):
        checkpoint = milepost.open(tmp_path / place)
        for key in ("own", "wrapped"):
            assert torch.equal(checkpoint[key][...], WHOLE), (place, key)
    for found in spawn(2, load_job, tmp_path):
        assert set(found.values()) == {True}, found


def test_a_plain_tensor_is_loaded_from_described_boxes_and_back(tmp_path):
    boxes = [(0, 0, 16, 5), (0, 5, 16, 1)]
    milepost.save({"w": Described("w", WHOLE.shape, parts_of(boxes, WHOLE))}, tmp_path)
    plain = {"w": torch.zeros_like(WHOLE)}
    milepost.load(plain, tmp_path)
    assert torch.equal(plain["w"], WHOLE)
    parts = parts_of([(3, 1, 2, 2)], torch.zeros_like(WHOLE))
    milepost.load({"w": Described("w", WHOLE.shape, parts)}, tmp_path)
    assert torch.equal(parts[3, 1], WHOLE[3:5, 1:3])


def test_a_tensor_that_contradicts_itself_is_refused(tmp_path):
    outside = Described("w", (4, 6), {(3, 0): torch.ones(2, 6)})
    with pytest.raises(InvalidState, match=r"'w' lists the box .* which leaves its shape \(4, 6\)"):
        milepost.save({"w": outside}, tmp_path)
    lying = Described("w", (4, 6), {(0, 0): torch.ones(4, 6)})
    lying.__get_tensor_shard__ = lambda index: torch.ones(3, 6)
    with pytest.raises(InvalidState, match=r"'w' gives a tensor of shape \(3, 6\) for its box"):
        milepost.save({"w": lying}, tmp_path)
    with pytest.raises(milepost.CheckpointError, match="w"):  # rows 2 and 3 are missing
        milepost.save({"w": Described("w", (4, 6), {(0, 0): torch.ones(2, 6)})}, tmp_path)
