"""Element types by torch's name, and how a shard file stores each. Pure."""

import math

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
