"""Records as bytes and back."""

import msgspec
import pytest

from milepost.core.wire import Wire


class Point(msgspec.Struct, frozen=True):
    x: int
    name: str


@pytest.mark.parametrize("make", [Wire, Wire.json])
def test_value_comes_back_with_its_type(make):
    assert make(Point).unpack(make(Point).pack(Point(3, "a"))) == Point(3, "a")
    assert make(tuple[int, str]).unpack(make(tuple[int, str]).pack((1, "b"))) == (1, "b")
    assert make(dict[str, bytes]).unpack(make(dict[str, bytes]).pack({"k": b"\0\xff"})) == {"k": b"\0\xff"}


def test_union_with_none():
    wire: Wire[Point | None] = Wire(Point | None)
    assert wire.unpack(wire.pack(None)) is None
    assert wire.unpack(wire.pack(Point(1, ""))) == Point(1, "")


def test_encodings_differ():
    assert Wire.json(Point).pack(Point(3, "a")) == b'{"x":3,"name":"a"}'
    assert Wire(Point).pack(Point(3, "a")) == msgspec.msgpack.encode(Point(3, "a"))


@pytest.mark.parametrize("make", [Wire, Wire.json])
@pytest.mark.parametrize("data", [b"", b"{", b"\xc1", b"[1, 2]", b"nonsense"])
def test_other_bytes_raise_value_error(make, data):
    with pytest.raises(ValueError):
        make(Point).unpack(data)


def test_views_can_be_unpacked():
    assert Wire(Point).unpack(memoryview(b"--" + Wire(Point).pack(Point(3, "a")))[2:]) == Point(3, "a")
