"""Values as bytes: what planners pass to storage for an object that is not a tensor.

The bytes are JSON of the closed codec, not a pickle. Checkpoints of torch hold files of `torch.save` instead: torch's
restricted loader reads those. Other pickles are read only with `allow_pickle`.
"""

import io
import pickle
from typing import Any

import msgspec
import torch

from milepost.errors import InvalidState, UnsafeCheckpoint
from milepost.state.values import Codec

_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"


class ValueIO(io.BytesIO):
    """The bytes of a value, together with the value as it stands in the manifest."""

    def __init__(self, encoded: Any) -> None:
        super().__init__(msgspec.json.encode(encoded))
        self.encoded = encoded


def pack_value(value: Any, codec: Codec, key: str) -> io.BytesIO:
    """The bytes of a value. Raises InvalidState, naming the key, for a value that the codec does not know."""
    if isinstance(value, io.BytesIO):
        return io.BytesIO(value.getvalue())
    return ValueIO(codec.encode(value, key))


def unpack_value(data: io.BytesIO, codec: Codec, key: str) -> Any:
    """The value that the bytes encode. Raises InvalidState for bytes that are not a value."""
    if isinstance(data, ValueIO):
        return codec.decode(data.encoded, key)
    raw = data.getvalue()
    if raw.startswith((_ZIP, _PICKLE)):
        return _unpickled(raw, codec, key)
    try:
        return codec.decode(msgspec.json.decode(raw), key)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidState(f"{key!r}: these {len(raw)} bytes are not a value: {str(error)[:300]}") from None


def _unpickled(raw: bytes, codec: Codec, key: str) -> Any:
    try:
        return torch.load(io.BytesIO(raw), weights_only=not codec.allow_pickle)
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InvalidState(f"{key!r}: these {len(raw)} bytes are not a value: {str(error)[:300]}") from None
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpoint(
            f"{key!r} is a pickle that names more than plain values: {str(error).splitlines()[0][:300]}. If you trust "
            "its author, pass allow_pickle=True."
        ) from None
