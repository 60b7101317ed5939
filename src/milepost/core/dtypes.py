"""Element types by torch's name, and how a shard file stores each. Pure."""

import math
from typing import Literal, NamedTuple

import msgspec


class Dtype(msgspec.Struct, frozen=True):
    """One element type: its size, the safetensors type that stores it, and the extra inner dimensions when stored."""

    size_bytes: int
    stored_as: str
    inner: tuple[int, ...] = ()


DTYPES: dict[str, Dtype] = {
    "bool": Dtype(1, "BOOL"),
    "uint8": Dtype(1, "U8"),
    "int8": Dtype(1, "I8"),
    "uint16": Dtype(2, "U16"),
    "int16": Dtype(2, "I16"),
    "uint32": Dtype(4, "U32"),
    "int32": Dtype(4, "I32"),
    "uint64": Dtype(8, "U64"),
    "int64": Dtype(8, "I64"),
    "float16": Dtype(2, "F16"),
    "bfloat16": Dtype(2, "BF16"),
    "float32": Dtype(4, "F32"),
    "float64": Dtype(8, "F64"),
    "complex64": Dtype(8, "C64"),
    # safetensors has no name for these two: their real and imaginary parts are stored side by side.
    "complex32": Dtype(4, "F16", (2,)),
    "complex128": Dtype(16, "F64", (2,)),
    "float8_e4m3fn": Dtype(1, "F8_E4M3"),
    "float8_e5m2": Dtype(1, "F8_E5M2"),
    "float8_e8m0fnu": Dtype(1, "F8_E8M0"),
    # Stored as plain bytes: readers of safetensors older than these types still open the file.
    "float8_e4m3fnuz": Dtype(1, "U8"),
    "float8_e5m2fnuz": Dtype(1, "U8"),
    "float4_e2m1fn_x2": Dtype(1, "U8"),
}


def size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """How many bytes a tensor of this dtype (torch's name) and shape takes."""
    return math.prod(shape) * DTYPES[dtype].size_bytes


class Reach(NamedTuple):
    """The range of a floating type: its largest number, half the step below that, and whether it has infinities.

    A number is rounded to the largest one as long as it lies less than half a step above it.
    """

    largest: float
    half_step: float
    has_infinity: bool = True


def _reach(exponent: int, bits: int, has_infinity: bool = True) -> Reach:
    """The range of a type whose largest number has this exponent and this many bits after the first, all of them 1."""
    return Reach(math.ldexp(2 - 2.0**-bits, exponent), math.ldexp(0.5, exponent - bits), has_infinity)


INTEGERS: dict[str, tuple[int, int]] = {
    "bool": (0, 1),
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
}
"""The lowest and the highest value of each type of integers."""
FLOATS: dict[str, Reach] = {
    "float16": _reach(15, 10),
    "bfloat16": _reach(127, 7),
    "float32": _reach(127, 23),
    "float64": _reach(1023, 52),
    "float8_e5m2": _reach(15, 2),
    "float8_e5m2fnuz": _reach(15, 2, has_infinity=False),
    "float8_e4m3fnuz": _reach(7, 3, has_infinity=False),
    "float8_e4m3fn": Reach(448.0, 16.0, has_infinity=False),  # the number with all bits 1 is its NaN
}
_POWERS = Reach(2.0**127, 0.0, has_infinity=False)
"""That of float8_e8m0fnu: powers of two, without zero and signs, so that nothing converts to it without loss."""
COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
"""The type of the real and of the imaginary part."""
Conversion = Literal["fits", "checked", "lossy", "impossible"]
Convert = bool | Literal["lossy"]
"""Which conversions a load may make: none, those that keep what a number means, or all that torch can make."""


def conversion(saved: str, target: str) -> Conversion:
    """What a conversion between two types does to values.

    "fits": every value has a place in the target's type, with its precision. "checked": not every one; each is looked
    at. "lossy": the target is another kind of number. "impossible": torch has no such conversion.
    """
    if "float4_e2m1fn_x2" in (saved, target):  # two numbers in a byte
        return "impossible"
    if saved in INTEGERS and target in INTEGERS:
        (low, high), (lowest, highest) = INTEGERS[target], INTEGERS[saved]
        return "fits" if low <= lowest and highest <= high else "checked"
    if saved in COMPLEX and target in COMPLEX:
        return conversion(COMPLEX[saved], COMPLEX[target])
    old, new = FLOATS.get(saved, _POWERS if saved == "float8_e8m0fnu" else None), FLOATS.get(target)
    if old is not None and new is not None:
        fits = new.largest >= old.largest and (new.has_infinity or not old.has_infinity)
        return "fits" if fits else "checked"
    return "lossy"


def may_convert(saved: str, target: str, allowed: Convert) -> bool:
    """Whether a load with this permission converts between these types."""
    kind = conversion(saved, target)
    if saved == target or allowed is False or kind == "impossible":
        return saved == target
    return allowed == "lossy" or kind != "lossy"


STORED_SIZES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
