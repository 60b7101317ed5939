"""`convert_dtype`: what means the same in another type is converted; every other value is an error, not another one."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import milepost
import milepost.dcp
from milepost.core.dtypes import COMPLEX, DTYPES, FLOATS, INTEGERS, conversion, may_convert
from milepost.data.conversion import copy_checked
from milepost.testing import run_ranks
from tests.strategies import examples

NAMES = [name for name in DTYPES if hasattr(torch, name)]
PACKED = "float4_e2m1fn_x2"


def of_type(name):
    return getattr(torch, name)


def small(name):
    """Numbers that every type has, as this type."""
    data = torch.tensor([1.0, 0.0, 1.0, 1.0]) if name == "bool" else torch.tensor([1.0, 2.0, 4.0, 8.0])
    return data.view(torch.uint8)[:4].clone().view(of_type(name)) if name == PACKED else data.to(of_type(name))


def meaning(saved, target):
    """What the permission `True` says of a pair, from the definition: the kind of number stays."""
    kinds = [set(INTEGERS), {*FLOATS, "float8_e8m0fnu"} if target != "float8_e8m0fnu" else set(FLOATS), set(COMPLEX)]
    return saved == target or any(saved in kind and target in kind for kind in kinds)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:Casting complex")
def test_every_pair_of_types_is_converted_or_refused_before_reading(tmp_path):
    milepost.save({name: small(name) for name in NAMES}, tmp_path)
    for saved, target in itertools.permutations(NAMES, 2):
        state = {saved: small(target).view(torch.uint8).zero_().view(of_type(target))}
        allowed = meaning(saved, target)
        fits = allowed and (target != "bool" or saved == "bool")  # 2 is no bool, which only reading tells
        report = milepost.explain(state, tmp_path)
        assert report.fits(allow_unexpected=True, convert_dtype=True) == allowed, (saved, target)
        if fits:
            milepost.load(state, tmp_path, allow_unexpected=True, convert_dtype=True)
            expected = small(saved).to(of_type(target))
            assert torch.equal(state[saved].view(torch.uint8), expected.view(torch.uint8)), (saved, target)
            continue
        with pytest.raises(milepost.StateMismatch, match=f"'{saved}'.*saved as {saved} and the target is {target}"):
            milepost.load(state, tmp_path, allow_unexpected=True, convert_dtype=True)
        assert not state[saved].view(torch.uint8).any(), "nothing is half done"
        possible = PACKED not in (saved, target)
        assert report.fits(allow_unexpected=True, convert_dtype="lossy") == possible
        if possible:
            milepost.load(state, tmp_path, allow_unexpected=True, convert_dtype="lossy")
            assert torch.equal(state[saved].view(torch.uint8), small(saved).to(of_type(target)).view(torch.uint8))


EDGES = [
    ("int64", "int8", [0, 127, -128], 128, 3),
    ("int64", "int32", [2**31 - 1], -(2**31) - 1, 1),
    ("int8", "uint64", [0, 127], -1, 2),
    ("uint64", "int64", [2**63 - 1], 2**63, 1),
    ("uint16", "int16", [32767], 65535, 1),
    ("int32", "bool", [0, 1], 2, 2),
    ("float64", "float32", [3.4e38, math.inf, -math.inf, math.nan, 1e-300], 1e39, 5),
    ("float64", "float16", [65504.0, 65519.0, math.nan, math.inf], -65520.0, 4),
    ("float32", "bfloat16", [3.38e38, math.inf, 1e-45], 3.4e38, 3),
    ("float16", "float8_e4m3fn", [448.0, math.nan, -448.0], 500.0, 3),
    ("float16", "float8_e4m3fn", [448.0], math.inf, 1),
    ("float32", "float8_e5m2", [57344.0, math.inf], 70000.0, 2),
    ("float32", "float8_e4m3fnuz", [240.0], -256.0, 1),
    ("complex128", "complex64", [1 + 1j, complex(math.inf, 0)], 1 + 1e300j, 2),
]


@pytest.mark.parametrize(("saved", "target", "fit", "beyond", "index"), EDGES)
def test_the_first_value_that_does_not_fit_is_named(tmp_path, saved, target, fit, beyond, index):
    def tensor(values):
        if saved == "uint64":
            return torch.from_numpy(np.array(values, dtype=np.uint64))
        return torch.tensor(values, dtype=of_type(saved))

    milepost.save({"a": {"w": tensor(fit)}}, tmp_path)
    state = {"a": {"w": torch.zeros(len(fit), dtype=of_type(target))}}
    milepost.load(state, tmp_path, convert_dtype=True)
    assert torch.equal(state["a"]["w"].view(torch.uint8), tensor(fit).to(of_type(target)).view(torch.uint8))
    milepost.save({"a": {"w": tensor([*fit, beyond, beyond])}}, tmp_path)
    state = {"a": {"w": torch.zeros(len(fit) + 2, dtype=of_type(target))}}
    says = rf"(?s)'a\.w' was saved as {saved} and the target is {target}.* at index \({index},\).*lossy"
    with pytest.raises(milepost.StateMismatch, match=says):
        milepost.load(state, tmp_path, convert_dtype=True)
    milepost.load(state, tmp_path, convert_dtype="lossy")


class Elsewhere(torch.Tensor):
    """Plays a tensor on a device: numpy does not see its memory."""

    def numpy(self):
        raise TypeError("can't convert a device tensor to numpy")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize(
    ("saved", "target", "beyond"),
    [
        ("int64", "int8", 128),
        ("float32", "float16", 7e4),
        ("complex128", "complex64", 1e39),
        ("uint16", "int16", 40000),
    ],
)
def test_values_on_a_device_are_looked_at(saved, target, beyond):
    source = torch.ones(3, 400, dtype=of_type(saved))
    room = torch.zeros_like(source, dtype=of_type(target))
    assert copy_checked(source.as_subclass(Elsewhere), room, saved, target) is None
    assert torch.equal(room, source.to(of_type(target)))
    source.view(-1)[700] = beyond
    source.view(-1)[900] = beyond
    assert copy_checked(source.as_subclass(Elsewhere), room, saved, target) == (1, 300)


NARROWING = [
    (saved, target)
    for saved, target in itertools.product(["float16", "bfloat16", "float32", "float64"], FLOATS)
    if conversion(saved, target) == "checked"
]


@examples(100)
@given(st.data(), st.sampled_from(NARROWING), st.sampled_from([(7,), (3, 5), (70_000,), (300, 301)]), st.booleans())
def test_floats_are_looked_at_as_one_by_one(data, pair, shape, turned):
    """Each value by itself, in float64, says the same as the quick look at many."""
    saved, target = pair
    reach = FLOATS[target]
    edge = reach.largest + reach.half_step
    source = torch.linspace(-1, 1, math.prod(shape)).reshape(shape).to(of_type(saved))
    edges = torch.tensor([edge, math.nextafter(edge, 0), math.inf, math.nan, reach.largest, 1e-40], dtype=torch.float64)
    values = torch.cat([edges, -edges]).to(of_type(saved))
    for at in data.draw(st.lists(st.integers(0, source.numel() - 1), max_size=3)):
        source.view(-1)[at] = values[data.draw(st.integers(0, len(values) - 1))]
    source = source.t() if turned and source.ndim == 2 else source
    size = np.abs(source.double().numpy())
    wrong = (size >= edge) & ((size != math.inf) | (not reach.has_infinity))
    room = torch.zeros(source.shape, dtype=of_type(target))
    if wrong.any():
        expected = tuple(int(i) for i in np.unravel_index(wrong.argmax(), wrong.shape))
        assert copy_checked(source, room, saved, target) == expected
    else:
        assert copy_checked(source, room, saved, target) is None
        # Not bit by bit: torch makes other NaNs of those in strided tensors.
        assert np.array_equal(room.double().numpy(), source.to(of_type(target)).double().numpy(), equal_nan=True)


@pytest.mark.parametrize("way", ["rows", "columns", "ranks", "numpy", "zstd", "torch file", "unverified"])
def test_the_index_is_that_of_the_whole_tensor(tmp_path, way):
    data = torch.arange(600 * 400).view(600, 400) % 100
    data[577, 301] = 300
    place = tmp_path / "file.pt"
    if way == "torch file":
        torch.save({"w": data.t().contiguous().t()}, place)
    elif way == "zstd":
        place = tmp_path / "packed"
        writer = milepost.planning.CheckpointWriter(place, transforms=[milepost.planning.ZStandard()])
        milepost.save({"w": data}, storage_writer=writer)
    else:
        milepost.save({"w": data}, place)
    targets = {
        "columns": lambda: torch.zeros(400, 600, dtype=torch.int8).t(),
        "numpy": lambda: np.zeros((600, 400), dtype=np.int8),
    }
    make = targets.get(way, lambda: torch.zeros(600, 400, dtype=torch.int8))
    options = {"convert_dtype": True, "verify": way != "unverified"}

    def load():
        if way == "ranks":
            run_ranks(2, lambda comm: milepost.load(half(comm), place, process_group=comm, **options))
        else:
            milepost.load({"w": make()}, place, **options)

    with pytest.raises(milepost.StateMismatch, match=r"value 300 at index \(577, 301\)"):
        load()
    state = milepost.load({"w": make()}, place, convert_dtype="lossy")
    assert np.array_equal(np.asarray(state["w"]), data.to(torch.int8).numpy())


def half(comm):
    return {"w": milepost.Sharded((600, 400), {(300 * comm.rank, 0): torch.zeros(300, 400, dtype=torch.int8)})}


def test_a_wrong_permission_is_refused(tmp_path):
    milepost.save({"w": torch.ones(1)}, tmp_path)
    with pytest.raises(milepost.InvalidRequest, match='convert_dtype is True, False or "lossy"'):
        milepost.load({"w": torch.ones(1)}, tmp_path, convert_dtype="yes")


def test_the_rule_is_one():
    for saved, target in itertools.product(DTYPES, DTYPES):
        kind = conversion(saved, target)
        assert may_convert(saved, target, False) == (saved == target)
        assert may_convert(saved, target, True) == (saved == target or kind in ("fits", "checked"))
        assert may_convert(saved, target, "lossy") == (saved == target or kind != "impossible")
    for name, reach in FLOATS.items():
        assert torch.finfo(of_type(name)).max == reach.largest, name
    for name, (low, high) in INTEGERS.items():
        assert name == "bool" or (torch.iinfo(of_type(name)).min, torch.iinfo(of_type(name)).max) == (low, high)
