"""The health gate: what a rule is told about a checkpoint before it is committed, and what its answer means."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from milepost.core.partial_statistics import Summary
from milepost.core.statistics import Health, TensorStatistics

_log = logging.getLogger("milepost")
_LONGEST = 1000
_KEYS_SHOWN = 4


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """What a rule for `healthy` is told, on the coordinator, when all data is written and nothing is committed yet.

    `statistics`: by key; empty where there are too many tensors (docs/reference/limits.md). `nan`, `inf`: how many
    numbers of all tensors are NaN or infinite. `keys`: the first tensors that have such numbers. `step`, `metrics`:
    those of the save, if a `Checkpointer` makes it.

    >>> def no_explosion(check):
    ...     largest = max(numbers.rms or 0.0 for numbers in check.statistics.values())
    ...     return largest < 100 or f"a tensor has grown to an rms of {largest:.0f}"
    >>> keeper = milepost.Checkpointer("memory://checked", healthy=no_explosion)
    >>> keeper.save({"w": torch.full((4,), 1e4)}, 1).health.reason
    'a tensor has grown to an rms of 10000'
    """

    statistics: Mapping[str, TensorStatistics]
    nan: int = 0
    inf: int = 0
    keys: tuple[str, ...] = ()
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


HealthRule = Callable[[HealthCheck], bool | str]
"""Says whether a checkpoint is healthy: True; or False; or, in words, why it is not."""


def judge(healthy: "bool | HealthRule", found: Summary) -> Health | None:
    """The verdict; None without a rule."""
    if healthy is False:
        return None
    if healthy is True:
        return all_finite(*_totals(found))
    return verdict_of(healthy, HealthCheck({row.key: row for row in found.statistics}, *_totals(found)))


def verdict_of(rule: HealthRule, check: HealthCheck) -> Health:
    """What a rule says. Never raises: a rule that fails finds the checkpoint unhealthy."""
    try:
        answer: Any = rule(check)
    except Exception as error:  # noqa: BLE001  # the checkpoint must not be lost
        _log.warning("the rule for healthy checkpoints failed", exc_info=True)
        return _unhealthy(f"the rule for healthy checkpoints failed: {type(error).__name__}: {error}")
    if isinstance(answer, str) and answer:
        return _unhealthy(answer)
    if isinstance(answer, (bool, np.bool_)):
        return Health(ok=True) if answer else _unhealthy("the rule for healthy checkpoints said no")
    return _unhealthy(f"the rule for healthy checkpoints gave {answer!r}, not True, False or a reason")


def all_finite(nan: int, inf: int, keys: tuple[str, ...]) -> Health:
    """The verdict of the default rule on these totals."""
    if not nan and not inf:
        return Health(ok=True)
    counts = [f"{count} {what}" for count, what in ((nan, "NaN"), (inf, "infinite")) if count]
    more = ", ..." if len(keys) > _KEYS_SHOWN else ""
    return _unhealthy(f"{' and '.join(counts)} in {', '.join(map(repr, keys[:_KEYS_SHOWN]))}{more}")


def _totals(found: Summary) -> tuple[int, int, tuple[str, ...]]:
    return found.nan, found.inf, found.keys


def _unhealthy(reason: str) -> Health:
    return Health(ok=False, reason=reason[:_LONGEST].encode("utf-8", "replace").decode())
