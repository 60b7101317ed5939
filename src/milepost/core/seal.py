"""The end of a manifest: a checksum over all that comes before it. Told from the bytes, without parsing them. Pure."""

import re

import xxhash

_SEAL = re.compile(rb',\n"checksum": "([0-9a-f]{16})"\n}\n')
SEAL_BYTES = len(b',\n"checksum": "0123456789abcdef"\n}\n')
"""How long it is."""


def is_sealed(data: bytes) -> bool:
    """Whether the bytes of a manifest end in the checksum of what comes before it."""
    match = _SEAL.fullmatch(data[-SEAL_BYTES:])
    return match is not None and xxhash.xxh3_64(memoryview(data)[:-SEAL_BYTES]).hexdigest().encode() == match[1]


def may_be_unhealthy(data: bytes) -> bool:
    """Whether the bytes of a manifest can have a verdict that is not good, without parsing them."""
    # A field has a line of its own, and no text has a raw newline in it.
    return b'\n"health": ' in data and b'\n"health": {"ok":true' not in data
