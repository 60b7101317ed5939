"""Numbers in words, for people: sizes, times, counts."""

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIMES = ((60, 1, "s"), (3600, 60, "min"), (48 * 3600, 3600, "h"))
_DAY_S = 24 * 3600


def size(size_bytes: int | None) -> str:
    """`13.1 GiB`; empty for what is not known."""
    if size_bytes is None:
        return ""
    amount = float(size_bytes)
    for unit in _SIZES:
        if amount < 1000 or unit == _SIZES[-1]:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError(unit)


def age(seconds: float | None) -> str:
    """`5 min`, `3 h`, `12 d`; empty for what is not known."""
    if seconds is None:
        return ""
    for limit, unit_s, unit in _TIMES:
        if seconds < limit:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds / _DAY_S:.0f} d"


def shape(sizes: tuple[int, ...] | None) -> str:
    """`(4096, 1024)`."""
    return "" if sizes is None else str(tuple(sizes))


def number(value: float | None) -> str:
    """Four digits, as in `0.1234`; `nan` for what is no number."""
    return "nan" if value is None else f"{value:.4g}"


def count(amount: int, noun: str, many: str = "") -> str:
    """`1 step`, `2 steps`."""
    return f"{amount:,} {noun if amount == 1 else many or noun + 's'}"
