"""Items that DCP compressed as a whole, with a stream extension."""

import importlib
from typing import Any

from milepost.core.limits import MIB
from milepost.errors import CheckpointDamaged, UnsafeCheckpoint, UnsupportedFormat

_SLACK_BYTES = MIB
"""What an archive may have besides its tensor."""


def unpack(data: bytes, transforms: tuple[str, ...], expected_bytes: int, what: str) -> bytes:
    """The item itself. Raises UnsupportedFormat for what we cannot undo, UnsafeCheckpoint where it grows beyond reason."""
    for transform in transforms:
        if transform.partition("/")[0] != "stream.zstd":
            raise UnsupportedFormat(
                f"{what} was written with the extension {transform[:80]!r}, which is not known here"
            )
        data = _unpack_zstd(data, expected_bytes + _SLACK_BYTES, what)
    return data


def _unpack_zstd(data: bytes, most_bytes: int, what: str) -> bytes:
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ImportError:
        raise UnsupportedFormat(f"{what} is compressed with Zstandard: pip install zstandard") from None
    try:
        found: bytes = zstandard.ZstdDecompressor().stream_reader(data).read(most_bytes + 1)
    except zstandard.ZstdError as error:
        raise CheckpointDamaged(f"{what} cannot be decompressed: {error}") from None
    if len(found) > most_bytes:
        raise UnsafeCheckpoint(f"{what} would decompress to more than {most_bytes} bytes")
    return found
