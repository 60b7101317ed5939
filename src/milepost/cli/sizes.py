"""Sizes and times as people write them on the command line: `256M`, `1.5GiB`."""

import re
from typing import Any

import click

_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,3})?) ?([KMGT]?)(?:i?B)?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class Size(click.ParamType[int]):
    """A number of bytes, with K, M, G or T behind it for powers of 1,024."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes."""
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(str(value).strip())
        size = int(float(found[1]) * 1024 ** _POWERS[found[2].upper()]) if found is not None else 0
        if size < 1:
            self.fail(f"{value!r} is not a size: 256M, 1G, for example", param, ctx)
        return size


SIZE = Size()
"""For options."""
