"""CRC-32 of bytes that lie one behind the other, from the CRC-32 of each part. Pure."""

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two runs of bytes, one behind the other, from the CRC of each (as zlib's `crc32_combine`)."""
    return _times(_power(second_bytes), first) ^ second


def _times(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo that of CRC-32, with bits in reverse."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


@lru_cache(maxsize=1024)
def _power(length: int) -> int:
    """The power of x to eight times `length`, modulo the polynomial."""
    result, square, exponent = 1 << 31, 1 << 30, 8 * length
    while exponent:
        if exponent & 1:
            result = _times(square, result)
        square = _times(square, square)
        exponent >>= 1
    return result
