"""Retention: which steps are kept. Pure."""

import math
from collections.abc import Collection, Mapping
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

    @property
    def is_set(self) -> bool:
        """Whether there is a rule that removes steps."""
        return self.keep_last is not None or self.keep_every is not None or self.keep_best is not None

    def spelled(self) -> dict[str, int | str]:
        """The fields that are set, to be kept with each step."""
        fields = {"keep_last": self.keep_last, "keep_every": self.keep_every, "keep_best": self.keep_best}
        named = {"best": self.best, "mode": self.mode} if self.best is not None else {}
        return {name: value for name, value in {**fields, **named}.items() if value is not None}

    def kept(self, scores: Mapping[int, float | None], unhealthy: Collection[int] = ()) -> set[int]:
        """The steps to keep, given each step's metric. Pure. The newest, and the newest healthy one, are among them.

        Unhealthy steps hold no place of a healthy one. The newest of them are kept, as many as `keep_last`, else one,
        and the multiples of `keep_every`.
        """
        if not self.is_set:
            return set(scores)
        chosen = self.counted(scores, unhealthy)
        if self.keep_every is not None:
            chosen.update(step for step in scores if step % self.keep_every == 0)
        return chosen

    def counted(self, scores: Mapping[int, float | None], unhealthy: Collection[int] = ()) -> set[int]:
        """The kept steps that hold a place which another step would get if they were gone. Pure."""
        last = self.keep_last or 1
        healthy = {step: score for step, score in scores.items() if step not in unhealthy}
        newest, marked = sorted(healthy, reverse=True), sorted(scores.keys() - healthy.keys(), reverse=True)
        return {*newest[:last], *marked[:last], *self.ranked(healthy)[: self.keep_best or 0]}

    def ranked(self, scores: Mapping[int, float | None]) -> list[int]:
        """The steps that have a metric, best first; of equal ones the newer first. NaN is no metric."""
        known = {step: value for step, value in scores.items() if value is not None and not math.isnan(value)}
        sign = 1 if self.mode == "min" else -1
        return sorted(known, key=lambda step: (sign * known[step], -step))
