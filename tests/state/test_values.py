"""The codec for values: everything comes back exactly, nothing runs, and what cannot be saved is refused by name."""

import contextlib
import datetime as dt
import decimal
import enum
import fractions
import math
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from milepost import CheckpointError, InvalidRequest, InvalidState, UnsupportedFormat
from milepost.core.dtypes import DTYPES
from milepost.core.limits import MAX_DEPTH
from milepost.core.tree import FACTORIES
from milepost.state.values import Codec
from tests.strategies import examples


class Colour(enum.Enum):
    RED = 1
    ALSO_RED = 1  # noqa: PIE796  # an alias, for the test of aliases
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass
class Plain:
    a: Any
    b: Any = 3


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    derived: Any = field(default=None, init=False)


class Pair(NamedTuple):
    first: Any
    second: Any


TYPES = [Colour, Level, Access, Plain, Frozen]
NUMPY = [name for name in DTYPES if name in np.sctypeDict]


def sent(value: Any, codec: Codec | None = None) -> Any:
    """The value after it was written to JSON and read again."""
    codec = codec or Codec(TYPES)
    return codec.decode(msgspec.json.decode(msgspec.json.encode(codec.encode(value, "key"))), "key")


def same(one: Any, two: Any) -> bool:
    """Whether two values have the same types and bits, all the way down; sets compare by content, NaN equals NaN."""
    if isinstance(one, Pair):
        return type(two).__name__ == "Pair" and two._fields == one._fields and same(tuple(one), tuple(two))
    if type(one) is not type(two):
        return False
    match one:
        case float():
            return one.hex() == two.hex() if not isinstance(one, np.generic) else one.tobytes() == two.tobytes()
        case np.generic():
            return one.tobytes() == two.tobytes()
        case complex():
            return same((one.real, one.imag), (two.real, two.imag))
        case list() | tuple():
            return len(one) == len(two) and all(map(same, one, two))
        case dict():
            factories = getattr(one, "default_factory", 0), getattr(two, "default_factory", 0)
            return factories[0] is factories[1] and same(list(one.items()), list(two.items()))
        case set() | frozenset():
            return len(one) == len(two) and all(any(same(a, b) for b in two) for a in one)
        case Plain() | Frozen():
            return all(same(getattr(one, name), getattr(two, name)) for name in one.__dataclass_fields__)
    return bool(one == two)


def spelled(value: Any) -> str:
    return f"{type(value)} {value!r}"


@st.composite
def numpy_scalars(draw: st.DrawFn) -> Any:
    dtype = np.dtype(draw(st.sampled_from(NUMPY)))
    raw = draw(st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize))
    return np.bool_(raw[0] % 2) if dtype.name == "bool" else np.frombuffer(raw, dtype)[0]


ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.sampled_from([2**53, 2**53 + 1, -(2**53), -(2**53) - 1, 2**63, 2**64, 10**300]),
    st.floats(),
    st.sampled_from([-0.0, math.nan, math.inf, -math.inf, 5e-324, 1e308, 1.0, 1e16, 1e22]),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=()), max_size=8),  # lone surrogates too
    st.binary(max_size=8),
    numpy_scalars(),
    st.sampled_from([torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")]),
    st.lists(st.integers(0, 2**62), max_size=3).map(torch.Size),
    st.sampled_from([*Colour, *Level, *Access]),
)
HASHABLE = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3), st.builds(Pair, inner, inner)
    ),
    max_leaves=4,
)
VALUES = st.recursive(
    HASHABLE | st.binary(max_size=5).map(bytearray),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(HASHABLE, inner, max_size=3),
        st.dictionaries(HASHABLE, inner, max_size=3).map(OrderedDict),
        st.dictionaries(HASHABLE, inner, max_size=3).map(Counter),
        st.builds(defaultdict, st.sampled_from(list(FACTORIES.values())), st.dictionaries(HASHABLE, inner, max_size=3)),
        st.sets(HASHABLE, max_size=3),
        st.builds(Plain, inner, inner),
        st.builds(Frozen, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


# ---- what comes back


@examples(400)
@given(VALUES)
@example([True, 1, 1.0, np.float64(1), np.int8(1), "1", b"1", bytearray(b"1"), 1 + 0j, np.bool_(True)])
@example([-0.0, 0.0, complex(-0.0, 0.0), complex(math.nan, -math.inf)])
@example({(1, (2, "x")): 1, 1: 2, "1": 3, None: 4, (): 5, frozenset({1}): 6, b"": 7, math.inf: 8})
@example(["\ud800", "\udfff x", "\x00", "\U0001f600"])
def test_a_value_comes_back_with_exactly_its_types_and_bits(value):
    assert same(value, sent(value))


@examples(100)
@given(st.lists(HASHABLE, max_size=6), st.randoms(use_true_random=False))
def test_equal_sets_are_spelled_alike_whatever_the_order_of_their_making(items, random):
    shuffled = random.sample(items, len(items))
    codec = Codec(TYPES)
    one, two = set(items), set(shuffled)
    if sorted(map(spelled, one)) == sorted(
        map(spelled, two)
    ):  # 1 and True are one element, kept as whichever came first
        assert repr(codec.encode(one, "k")) == repr(codec.encode(two, "k"))


@examples(100)
@given(st.integers() | st.integers(2**53 - 3, 2**53 + 3).flatmap(lambda n: st.sampled_from([n, -n])))
def test_numbers_in_the_json_are_exact_for_every_reader(value):
    spelled_out = Codec().encode(value, "k")
    assert sent(value) == value
    assert isinstance(spelled_out, dict) == (abs(value) > 2**53)


def test_every_dtype_of_torch_comes_back_or_is_refused_when_it_is_saved():
    lost = []
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        with contextlib.suppress(InvalidState):
            data = Codec().encode(dtype, "k")
            try:
                assert Codec().decode(data, "k") is dtype
            except ValueError:
                lost.append(dtype)
    assert lost == []


@pytest.mark.parametrize("value", [Access.READ | Access.WRITE, Access(0)])
def test_a_combination_of_flags_comes_back(value):
    assert sent(value) is value


@pytest.mark.parametrize("key", ["a{", "{}", "{x}"])
def test_a_key_with_braces_is_a_key_like_any_other(key):
    codec = Codec()
    assert codec.decode(codec.encode({1: {key: {2: [3]}}}, key), key) == {1: {key: {2: [3]}}}


def test_an_alias_of_an_enum_member_is_the_member():
    assert sent(Colour.ALSO_RED) is Colour.RED


def test_a_dataclass_with_a_field_twice_is_refused():
    codec = Codec(types=[Plain])
    ((kind, (name, fields)),) = codec.encode(Plain(1), "key").items()
    with pytest.raises(ValueError, match="was saved with the fields"):
        codec.decode({kind: [name, [*fields, fields[0]]]}, "key")


def test_reading_a_dataclass_runs_nothing_of_it():
    @dataclass
    class Loud:
        a: int

        def __post_init__(self) -> None:
            raise AssertionError("this must not run")

    quiet = object.__new__(Loud)
    quiet.a = 5
    codec = Codec([Loud])
    assert codec.decode(codec.encode(quiet, "k"), "k").a == 5


# ---- what is refused when saving


class Own:
    """A class that the codec knows nothing of."""


class Words(str):
    __slots__ = ()


REFUSED = {
    "an object": Own(),
    "a class": Own,
    "a function": len,
    "a lambda": lambda: None,
    "a module": math,
    "an ellipsis": ...,
    "a slice": slice(1),
    "a range": range(3),
    "a path": PurePosixPath("a"),
    "a date": dt.date(2026, 1, 1),
    "a decimal": decimal.Decimal(1),
    "a fraction": fractions.Fraction(1, 2),
    "a deque": deque([1]),
    "an ordered dict of its own": type("Ordered", (OrderedDict,), {})(a=1),
    "a counter of its own": type("Tally", (Counter,), {})("aa"),
    "a factory of its own": defaultdict(lambda: 1),
    "a subclass of str": Words("a"),
    "an enum that was not passed": Colour.RED,
    "an int enum that was not passed": Level.LOW,
    "a dataclass that was not passed": Plain(1),
    "a memoryview": memoryview(b"a"),
    "a generator": (i for i in ()),
    "a numpy date": np.datetime64("2026-01-01"),
    "a numpy text": np.str_("a"),
    "a long double": np.longdouble(1),
    "an array inside a value": np.zeros(2),
    "a tensor inside a value": torch.zeros(2),
    "a torch layout": torch.strided,
    "a torch generator": torch.Generator(),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("around", [lambda v: v, lambda v: [1, v], lambda v: {"k": (v,)}, lambda v: Pair(1, v)])
def test_anything_else_is_refused_with_its_key_and_type(kind, around):
    value = REFUSED[kind]
    with pytest.raises(InvalidState) as caught:
        Codec().encode(around(value), "model.extra")
    assert "model.extra" in str(caught.value)
    assert type(value).__qualname__ in str(caught.value)


def test_a_value_inside_a_dataclass_is_refused_with_the_name_of_its_field():
    with pytest.raises(InvalidState, match=r"k\.b"):
        Codec(TYPES).encode(Plain(1, Own()), "k")


@pytest.mark.parametrize("kind", [list, dict])
def test_a_value_that_contains_itself_is_refused(kind):
    value: Any = kind()
    value.append(value) if kind is list else value.update(a=value)
    with pytest.raises(InvalidState, match="contain itself"):
        Codec().encode(value, "k")


def test_a_value_may_be_as_deep_as_the_limit_and_comes_back():
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    assert sent(value) == value


@pytest.mark.parametrize("types", [[int], [Own], [Pair], [dict]])
def test_only_enums_and_dataclasses_can_be_passed_as_types(types):
    with pytest.raises(InvalidRequest):
        Codec(types)


def test_two_classes_of_one_name_cannot_both_be_passed():
    def make() -> type:
        @dataclass
        class Twin:
            a: int

        return Twin

    with pytest.raises(InvalidRequest, match="Twin"):
        Codec([make(), make()])


# ---- opt-ins


def test_pickle_needs_an_opt_in_on_both_sides():
    value = fractions.Fraction(1, 3)
    with pytest.raises(InvalidState, match="allow_pickle"):
        Codec().encode(value, "k")
    data = Codec(allow_pickle=True).encode([value], "k")
    assert Codec(allow_pickle=True).decode(data, "k") == [value]
    with pytest.raises(UnsupportedFormat, match="allow_pickle"):
        Codec().decode(data, "k")


class Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("code of the checkpoint was run",))


def test_a_pickle_that_runs_code_is_not_even_looked_at_without_the_opt_in():
    data = Codec(allow_pickle=True).encode(Bomb(), "k")
    with pytest.raises(UnsupportedFormat):
        Codec(TYPES).decode(data, "k")
    with pytest.raises(pytest.fail.Exception):
        pickle.loads(pickle.dumps(Bomb()))  # the bomb is live


def test_a_value_that_pickle_cannot_take_is_refused_with_its_key():
    with pytest.raises(InvalidState, match="model"):
        Codec(allow_pickle=True).encode(lambda: None, "model")


@pytest.mark.parametrize("value", [Colour.RED, Plain(1), Frozen(2)])
def test_an_enum_or_dataclass_is_read_only_by_those_who_pass_its_class(value):
    data = Codec(TYPES).encode(value, "k")
    with pytest.raises(UnsupportedFormat, match=type(value).__qualname__):
        Codec().decode(data, "k")


def test_a_dataclass_whose_fields_changed_is_refused():
    data = Codec(TYPES).encode(Plain(1, 2), "k")
    data["dataclass"][1].append(["c", 3])
    with pytest.raises(ValueError, match="fields"):
        Codec(TYPES).decode(data, "k")


def test_a_class_that_is_an_enum_now_and_was_a_dataclass_is_refused():
    for data in ({"enum": ["Plain", "a"]}, {"dataclass": ["Colour", []]}):
        with pytest.raises(ValueError, match="another kind"):
            Codec(TYPES).decode(data, "k")


# ---- hostile data

WORDS = ["int", "float", "str", "complex", "bytes", "bytearray", "list", "tuple", "set", "frozenset", "dict", "numpy"]
WORDS += ["namedtuple", "enum", "dataclass", "pickle", "torch.dtype", "torch.Size", "torch.device", "eval"]
TEXTS = [
    "",
    "nan",
    "0x1f",
    "-0x" + "f" * 300,
    "AAAA",
    "AAA",
    "gA==",
    "float32",
    "bfloat16",
    "cpu",
    "cuda:99",
    "cuda:-1",
]
TEXTS += [
    "Colour",
    "RED",
    "Plain",
    "Access",
    "class",
    "a b",
    "__class__",
    "\U0001f600",
    "1+2j",
    "inf",
    "float31",
    "x:1",
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(TEXTS)
    | st.text(max_size=3),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(WORDS), inner, min_size=1, max_size=1),
        st.dictionaries(st.sampled_from(WORDS), st.lists(inner, min_size=2, max_size=2), min_size=1, max_size=1),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
    ),
    max_leaves=8,
)


@examples(700)
@given(JSON)
@example({"torch.device": "nonsense"})
@example({"torch.device": 5})
@example({"torch.device": "cuda:99999999999999999999"})
@example({"complex": [{"int": hex(10**400)}, 0]})
@example({"complex": [10**400, 0]})
@example({"torch.Size": [10**30]})
@example({"torch.Size": [1e308]})
@example({"torch.Size": [-1]})
@example({"numpy": ["bfloat16", "AAA="]})
@example({"numpy": ["float64", "AAA="]})
@example({"namedtuple": ["class", []]})
@example({"namedtuple": ["P", [["a", 1], ["a", 2]]]})
@example({"set": [{"list": []}]})
@example({"dict": [[{"dict": []}, 1]]})
@example({"enum": ["Access", None]})
@example({"enum": [["Colour"], "RED"]})
def test_any_json_is_a_value_or_refused_with_a_value_error_or_our_own(data):
    with contextlib.suppress(ValueError, CheckpointError):
        Codec(TYPES).decode(data, "k")


@pytest.mark.parametrize(
    "data",
    [
        {"int": "0x1_0"},
        {"int": " 0x10"},
        {"int": "10"},
        {"int": "0X10"},
        {"int": "0x٣"},
        {"int": "+0x10"},
        {"int": "0x00"},
        {"int": b"0x10"},
        {"flag": ["Access", "1"]},
        {"flag": ["Access", 1.9]},
        {"torch.Size": "12"},
        {"torch.Size": ["1_0", " 2"]},
        {"torch.Size": [1.9]},
    ],
)
def test_numbers_that_are_spelled_as_nobody_writes_them_are_refused(data):
    with pytest.raises(ValueError, match=r"'k' holds a damaged (int|flag|torch.Size)"):
        Codec(TYPES).decode(data, "k")


NESTED = {
    "list": lambda inner: {"list": [inner]},
    "tuple": lambda inner: {"tuple": [inner]},
    "dict": lambda inner: {"dict": [[1, inner]]},
    "complex": lambda inner: {"complex": [inner, 0]},
    "namedtuple": lambda inner: {"namedtuple": ["P", [["a", inner]]]},
    "dataclass": lambda inner: {"dataclass": ["Plain", [["a", inner], ["b", 1]]]},
}


@pytest.mark.parametrize("word", NESTED)
def test_json_nested_deeper_than_any_saved_value_is_refused(word):
    data: Any = 1
    for _ in range(2000):
        data = NESTED[word](data)
    with pytest.raises((ValueError, CheckpointError)):
        Codec(TYPES).decode(data, "k")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dict", "set", "frozenset"])
def test_many_keys_that_hash_alike_are_refused_at_once(kind):
    """A dict of them would take minutes. They do not occur by chance."""
    alike = [i * (2**61 - 1) for i in range(100_000)]
    spelled = [Codec().encode(key, "x") for key in alike]
    with pytest.raises(ValueError, match="the same hash"):
        Codec().decode({kind: [[key, 0] for key in spelled] if kind == "dict" else spelled}, "x")
    few = dict.fromkeys(alike[:60], 0)
    assert Codec().decode(Codec().encode(few, "x"), "x") == few
