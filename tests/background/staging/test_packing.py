"""Packing: every tensor has its own place, aligned, in the order of the file, and within the limit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milepost.background.staging.packing import Slot, in_place_of, pack
from milepost.comm import Solo
from milepost.core.dtypes import DTYPES
from milepost.saving.describe import describe
from milepost.state.take_apart import PerRank
from milepost.state.tensors import Sharded
from milepost.state.values import Codec
from tests.strategies import examples, shapes

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")
DTYPE_NAMES = [name for name in DTYPES if hasattr(torch, name)]


def described(state):
    return describe(state, Solo(), Codec(), {})


def new(dtype, shape):
    count = torch.Size(shape).numel() * DTYPES[dtype].size_bytes
    return torch.zeros(count, dtype=torch.uint8).view(getattr(torch, dtype)).view(shape)


def held(it):
    """All that a description holds, in its own order."""
    parts = [(part.data, local.dtype) for local in it.tensors.values() for part in local.parts]
    return parts + [(entry.data, entry.header.dtype) for entry in it.private]


@st.composite
def states(draw):
    kinds = draw(st.lists(st.tuples(st.sampled_from(DTYPE_NAMES), shapes(3, 5)), max_size=12))
    tensors = [new(dtype, shape) for dtype, shape in kinds]
    state = {f"t{i}": tensor for i, tensor in enumerate(tensors)}
    for i, tensor in enumerate(tensors):
        match draw(st.sampled_from(["", "", "again", "private", "turned", "sharded"])):
            case "again":
                state[f"again{i}"] = tensor
            case "private":
                state[f"private{i}"] = PerRank({"t": tensor, "own": tensor.clone()})
            case "turned":
                state[f"turned{i}"] = tensor.t() if tensor.dim() == 2 else tensor[..., :2] if tensor.dim() else tensor
            case "sharded" if tensor.dim() and len(tensor) > 1:
                rest = tensor.shape[1:]
                parts = {(0, *[0] * len(rest)): tensor[:1], (1, *[0] * len(rest)): tensor[1:]}
                state[f"sharded{i}"] = Sharded(tuple(tensor.shape), parts)
    return state


@examples(150)
@given(states(), st.one_of(st.just(1 << 40), st.integers(0, 400)))
def test_all_that_fits_has_a_place_of_its_own(state, limit):
    it = described(state)
    packed = pack(it, limit)
    slots = [slot for _, slot in packed.sources]
    for (data, slot), previous in zip(packed.sources, [None, *slots], strict=False):
        assert (tuple(data.shape), str(data.dtype)) == (slot.shape, f"torch.{slot.dtype}")
        assert slot.offset % DTYPES[slot.dtype].size_bytes == 0
        assert slot.size_bytes == data.numel() * data.element_size() > 0
        assert previous is None or slot.offset >= previous.offset + previous.size_bytes, "none lies over another"
    assert packed.size_bytes == (slots[-1].offset + slots[-1].size_bytes if slots else 0) <= limit
    # Everything is somewhere, once.
    for data, dtype in held(it):
        out = any(data is other for other in packed.left_out)
        if data.numel() == 0:
            assert not out
            assert id(data) not in packed.slots
        else:
            assert out != (id(data) in packed.slots)
            assert out or packed.slots[id(data)].dtype == dtype
    assert not packed.left_out or packed.size_bytes + max(d.nbytes for d in packed.left_out) + 16 > limit or limit < 400


@examples(100)
@given(states())
def test_without_a_limit_the_order_is_that_of_the_file_without_gaps(state):
    """So that the writer finds in one run what it writes in one run."""
    it = described(state)
    packed = pack(it, 1 << 40)
    assert not packed.left_out
    sizes = [DTYPES[slot.dtype].size_bytes for _, slot in packed.sources]
    assert sizes == sorted(sizes, reverse=True)
    assert packed.size_bytes == sum(slot.size_bytes for _, slot in packed.sources)
    firsts = [id(data) for data, _ in sorted(held(it), key=lambda one: -DTYPES[one[1]].size_bytes)]
    order = [id(data) for data, _ in packed.sources]
    assert order == [one for one in dict.fromkeys(firsts) if one in set(order)]


def test_the_same_memory_has_one_place_and_other_views_of_it_their_own():
    whole = torch.randn(4, 6, dtype=torch.complex64)
    same = {"a": whole, "b": whole, "c": whole.view(4, 6), "d": torch.nn.Parameter(whole)}
    assert len(pack(described(same), 1 << 30).sources) == 1
    other = {
        "plain": whole,
        "other shape": whole.view(6, 4),
        "other strides": whole.t(),
        "other type": torch.view_as_real(whole),
        "other start": whole[1:],
        "shorter": whole[:3],
        "conj": whole.conj(),
        "neg": torch._neg_view(whole),
        "both": torch._neg_view(whole.conj()),
        "imag": whole.imag,
        "imag of conj": whole.conj().imag,
    }
    assert len(pack(described(other), 1 << 30).sources) == len(other)


def test_what_is_smaller_still_fits_where_something_large_did_not():
    state = {
        "large": torch.zeros(100, dtype=torch.float64),
        "small": torch.zeros(9),
        "tiny": torch.zeros(1, dtype=torch.int8),
    }
    packed = pack(described(state), 50)
    assert [data.numel() for data in packed.left_out] == [100]
    assert packed.size_bytes == 37
    assert packed.slots.keys() == {id(data) for data, _ in packed.sources}


@examples(50)
@given(states())
def test_second_description_asks_once_for_each_part(state):
    it = described(state)
    asked = []

    def change(data, dtype, shape):
        asked.append(id(data))
        assert tuple(data.shape) == shape
        return Slot(len(asked), dtype, shape)

    changed = in_place_of(it, change)
    assert asked == [id(data) for data, _ in held(it)]
    assert [data.offset for data, _ in held(changed)] == list(range(1, len(asked) + 1))
    assert (changed.table, changed.digest, changed.metadata) == (it.table, it.digest, it.metadata)
    assert [entry.header for entry in changed.private] == [entry.header for entry in it.private]


def test_a_slot_is_a_view_of_its_memory():
    memory = torch.zeros(64, dtype=torch.uint8)
    Slot(16, "float32", (2, 3)).within(memory).fill_(1.5)
    assert memory[16:40].view(torch.float32).tolist() == [1.5] * 6
    assert not memory[:16].any()
    assert not memory[40:].any()
    assert Slot(0, "complex128", (0, 3)).within(memory[:0]).shape == (0, 3)
    assert Slot(8, "float64", ()).within(memory).shape == ()
