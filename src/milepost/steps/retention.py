"""Retention: which steps are kept. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from milepost.core.option_values import check_values
from milepost.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Rule:
    """Which steps are kept; `Checkpointer` explains each field. With no field set: all."""

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    best: str | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        check_values({name: getattr(self, name) for name in ("keep_last", "keep_every", "keep_best", "best")})
        if self.mode not in ("min", "max"):
            raise InvalidRequest(f'mode is "min" or "max", not {self.mode!r}')
        if self.keep_best is not None and not self.best:
            raise InvalidRequest('keep_best needs the name of a metric: best="loss", for example')

    def kept(self, scores: Mapping[int, float | None]) -> set[int]:
        """The steps to keep, given each step's metric. Pure. The newest is always among them."""
        newest = sorted(scores, reverse=True)
        if self.keep_last is None and self.keep_every is None and self.keep_best is None:
            return set(newest)
        chosen = set(newest[: self.keep_last or 1])
        if self.keep_every is not None:
            chosen.update(step for step in newest if step % self.keep_every == 0)
        return chosen.union(self.ranked(scores)[: self.keep_best or 0])

    def counted(self, scores: Mapping[int, float | None]) -> set[int]:
        """The kept steps that hold a place which another step would get if they were gone. Pure."""
        newest = sorted(scores, reverse=True)
        return {*newest[: self.keep_last or 1], *self.ranked(scores)[: self.keep_best or 0]}

    def ranked(self, scores: Mapping[int, float | None]) -> list[int]:
        """The steps that have a metric, best first; of equal ones the newer first. NaN is no metric."""
        known = {step: value for step, value in scores.items() if value is not None and not math.isnan(value)}
        sign = 1 if self.mode == "min" else -1
        return sorted(known, key=lambda step: (sign * known[step], -step))
