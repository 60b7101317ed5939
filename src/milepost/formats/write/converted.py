"""The result of a conversion."""

import msgspec


class Converted(msgspec.Struct, frozen=True):
    """The result of a conversion: where, in which format, how many tensors, and how many bytes of data."""

    url: str
    format: str
    tensors: int
    data_bytes: int
