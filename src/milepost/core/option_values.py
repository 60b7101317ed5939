"""What the values of options look like: one table for all calls. Pure."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

from milepost.errors import InvalidRequest

_LONGEST_S = 1e9
"""About 30 years. Clocks overflow at some longer time."""


class _Permitted(NamedTuple):
    """What a value is, and in words."""

    holds: Callable[[Any], bool]
    words: str


def _or_none(rule: _Permitted) -> _Permitted:
    return _Permitted(lambda value: value is None or rule.holds(value), f"{rule.words}, or None")


_PLAIN = {bool, int, float, str, type(None)}


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or _is_numpy(value, "bool_")


def _is_number(value: Any) -> bool:
    known = isinstance(value, (int, float)) or _is_numpy(value, "integer", "floating")
    return known and not _is_flag(value) and math.isfinite(value)


def _is_numpy(value: Any, *kinds: str) -> bool:
    """Whether a value is a scalar of numpy of one of these kinds. Does not import numpy to find that it is none."""
    if type(value) in _PLAIN or not any(base.__module__ == "numpy" for base in type(value).__mro__):
        return False
    import numpy as np  # noqa: PLC0415  # it takes as long to import as a command of the command line runs

    return isinstance(value, tuple(getattr(np, kind) for kind in kinds))


def _whole(least: int | None = None) -> _Permitted:
    """A whole number. Without `least`, those who use it check its range, and say why."""

    def holds(value: Any) -> bool:
        if not (isinstance(value, int) or _is_numpy(value, "integer")) or _is_flag(value):
            return False
        return least is None or bool(value >= least)

    return _Permitted(holds, "a whole number" if least is None else f"a whole number from {least} on")


def _with(method: str, words: str) -> _Permitted:
    """An object that has a method, and not its class."""
    return _or_none(
        _Permitted(lambda value: not isinstance(value, type) and callable(getattr(value, method, None)), words)
    )


def _is_optimizer(value: Any) -> bool:
    many = value if isinstance(value, Sequence) else [value]
    return all(hasattr(one, "param_groups") and hasattr(one, "register_step_pre_hook") for one in many)


def _is_rule(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


_FLAG = _Permitted(_is_flag, "True or False")
_SECONDS = _Permitted(lambda value: _is_number(value) and 0 < value <= _LONGEST_S, "a number of seconds, more than 0")
_FUNCTION = _or_none(_Permitted(callable, "a function"))
_MAPPING = _or_none(_Permitted(lambda value: isinstance(value, Mapping), "a dict"))
_TEXT = _or_none(_Permitted(lambda value: isinstance(value, str) and bool(value), "a name"))
_FILE_NAME = _Permitted(
    lambda value: isinstance(value, str) and re.fullmatch(r"[^/\\\0.][^/\\\0]*\.safetensors", value) is not None,
    "the name of a file that ends in .safetensors",
)
_RENAME = _or_none(_Permitted(lambda value: callable(value) or isinstance(value, Mapping), "a function or a dict"))

_RULES: dict[str, _Permitted] = {
    **dict.fromkeys(("overwrite", "compare_replicas", "reduce_partial", "allow_pickle", "drop_values"), _FLAG),
    **dict.fromkeys(
        (
            "allow_missing",
            "allow_unexpected",
            "allow_unhealthy",
            "verify",
            "direct",
            "no_dist",
            "values",
            "newest",
            "incremental",
        ),
        _FLAG,
    ),
    **dict.fromkeys(("share_reads", "verify_first"), _or_none(_FLAG)),
    **dict.fromkeys(("host_memory_bytes", "threads", "block_bytes"), _whole()),
    **dict.fromkeys(("max_shard_bytes", "size", "max_depth"), _whole(1)),
    "max_waste": _Permitted(lambda value: _is_number(value) and 0 <= value <= 1, "a share from 0 to 1"),
    **dict.fromkeys(("keep_last", "keep_every", "keep_best"), _or_none(_whole(1))),
    "statistics": _Permitted(lambda value: _is_flag(value) or value == "histogram", 'True, False or "histogram"'),
    "healthy": _Permitted(lambda value: _is_flag(value) or _is_rule(value), "True, False or a function"),
    "convert_dtype": _Permitted(lambda value: _is_flag(value) or value == "lossy", 'True, False or "lossy"'),
    "coordinator_rank": _whole(0),
    "staging_bytes": _or_none(_whole(0)),
    **dict.fromkeys(("timeout_s", "grace_s"), _SECONDS),
    **dict.fromkeys(("progress", "then"), _FUNCTION),
    **dict.fromkeys(("metadata", "metrics"), _MAPPING),
    **dict.fromkeys(("planner", "save_planner", "load_planner"), _with("set_up_planner", "a planner object")),
    **dict.fromkeys(("storage_writer", "storage_reader"), _with("reset", "an object that writes or reads a storage")),
    "optimizer": _or_none(_Permitted(_is_optimizer, "an optimizer or a list of them")),
    "rename": _RENAME,
    "file_name": _FILE_NAME,
    "best": _TEXT,
    "keys": _Permitted(lambda value: isinstance(value, str), "a pattern, as text"),
}


_DEFAULTS = {
    **dict.fromkeys(("overwrite", "compare_replicas", "verify", "allow_unhealthy"), True),
    **dict.fromkeys(("reduce_partial", "allow_pickle", "allow_missing", "allow_unexpected", "convert_dtype"), False),
    **dict.fromkeys(("statistics", "healthy"), False),
    "max_depth": 100,
    "max_waste": 0.5,
    "on_difference": "error",
}
"""The defaults of options that are not None or empty by default."""


def check_values(given: Mapping[str, Any]) -> None:
    """Raise InvalidRequest, with all that is wrong, if an option has a value that it cannot have.

    Options that need more than their own value to be checked are left to those who know it.
    """
    wrong = [
        f"{name} is {_RULES[name].words}, not {value!r}"
        for name, value in given.items()
        if name in _RULES and not _RULES[name].holds(value)
    ]
    if wrong:
        raise InvalidRequest("; ".join(wrong))


def items_of(name: str, value: Any) -> tuple[Any, ...]:
    """The items of an option that is a list of something. Raises InvalidRequest for what has no items, and for text."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} is a list, not {value!r}")
    return tuple(value)


def name_ignored(given: Mapping[str, Any], ignored: Iterable[str], why: str) -> InvalidRequest | None:
    """What is wrong with options that a call would ignore; None if none was given. `why` says what decides instead.

    An option that has its default value changes nothing, and may be given.
    """
    names = sorted(name for name in ignored if name in given and not _is_default(name, given[name]))
    return InvalidRequest(f"{', '.join(names)}: {why}") if names else None


def _is_default(name: str, value: Any) -> bool:
    if value is None or (isinstance(value, Sized) and not len(value)):
        return True
    return name in _DEFAULTS and type(value) is type(_DEFAULTS[name]) and bool(value == _DEFAULTS[name])
