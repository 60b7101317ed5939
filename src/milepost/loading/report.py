"""What fits and what does not between a checkpoint and a target state, on all ranks, readable at any size."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from milepost.core.box import Shape
from milepost.core.dtypes import Convert, conversion, may_convert
from milepost.core.ranks import show_ranks
from milepost.core.wrapper_names import without_wrappers
from milepost.loading.rank_match import RankMatch
from milepost.loading.way import Way, choose_way

_NUMBER = re.compile(r"\d+")
_SHOWN = 10
_KEY_LETTERS = 1000


@dataclass(frozen=True, slots=True)
class LoadReport:
    """All differences between a checkpoint and a target state on all ranks, and what a load would read.

    `milepost.explain` makes it; print it to read it. `missing` maps keys to the ranks that miss them. `shapes` and
    `dtypes` hold pairs (saved, target), `kinds` a text, `read_bytes` what each rank wants. `reasons` says why some of
    the missing keys are missing. `way`: how the ranks would read: each for itself ("apart"), with about `extra_bytes`
    beside what they want; one for all "replicas"; or each a part for all, by a "swap".

    >>> _ = milepost.save({"w": torch.ones(2, 2)}, "memory://report")
    >>> report = milepost.explain({"w": torch.ones(3)}, "memory://report")
    >>> report.fits(), report.shapes
    (False, {'w': ((2, 2), (3,))})
    """

    url: str
    missing: Mapping[str, tuple[int, ...]]
    unexpected: tuple[str, ...]
    shapes: Mapping[str, tuple[Shape, Shape]]
    dtypes: Mapping[str, tuple[str, str]]
    kinds: Mapping[str, str]
    read_bytes: tuple[int, ...]
    reasons: Mapping[str, str] = field(default_factory=dict)
    way: Way = "apart"
    extra_bytes: int = 0

    def fits(self, allow_missing: bool = False, allow_unexpected: bool = False, convert_dtype: Convert = False) -> bool:
        """Whether a load with these permissions would read: its values may still not fit the types of the targets."""
        return not (
            self.shapes
            or self.kinds
            or (self.missing and not allow_missing)
            or (self.unexpected and not allow_unexpected)
            or not all(may_convert(*pair, convert_dtype) for pair in self.dtypes.values())
        )

    def __str__(self) -> str:
        head = f"{self.url}: " + ("everything fits" if self.fits() else "the state does not fit")
        return "\n".join([head, *self.problems(False, False, False), self._reads()])

    def _reads(self) -> str:
        most = f", at most {max(self.read_bytes):,} on one" if len(self.read_bytes) > 1 else ""
        ranks = f"{len(self.read_bytes)} rank" + ("s" if len(self.read_bytes) != 1 else "")
        if self.way != "apart":
            return f"{ranks} would get {sum(self.read_bytes):,} bytes{most}: {_WAYS[self.way]}"
        extra = f", and about {self.extra_bytes:,} that lie beside them" if self.extra_bytes else ""
        return f"{ranks} would read {sum(self.read_bytes):,} bytes{most}{extra}"

    def problems(self, allow_missing: bool, allow_unexpected: bool, convert_dtype: Convert) -> list[str]:
        """One block of text for each kind of difference that is not allowed, with what to do."""
        blocks = []
        if self.missing and not allow_missing:
            lines = grouped(self.missing, self._where_missing)
            blocks.append(
                _block(
                    len(self.missing),
                    "missing from the checkpoint",
                    lines,
                    "allow_missing=True leaves them as they are",
                )
            )
        if self.unexpected and not allow_unexpected:
            lines = grouped(self.unexpected, lambda _: "")
            blocks.append(
                _block(
                    len(self.unexpected),
                    "in the checkpoint but not in the state",
                    lines,
                    "allow_unexpected=True leaves them unread",
                )
            )
        if not (allow_missing or allow_unexpected):
            blocks += self._wrapped()
        if self.shapes:
            lines = grouped(self.shapes, lambda key: "saved as {} and the target is {}".format(*self.shapes[key]))
            blocks.append(
                _block(
                    len(self.shapes),
                    "of another shape",
                    lines,
                    "if a target is one shard, pass the DTensor itself, not its local part",
                )
            )
        blocks += self._dtype_problems(convert_dtype)
        if self.kinds:
            lines = grouped(self.kinds, lambda key: self.kinds[key])
            blocks.append(_block(len(self.kinds), "of another kind", lines, "give the target what was saved"))
        return blocks

    def _where_missing(self, key: str) -> str:
        where = f"on {show_ranks(self.missing[key])}"
        return f"{where}: {self.reasons[key]}" if key in self.reasons else where

    def _wrapped(self) -> list[str]:
        """A hint where missing and unexpected keys differ only by the names of wrappers: torch.compile, DDP."""
        there = {without_wrappers(key): key for key in self.unexpected}
        pairs = [(key, there[without_wrappers(key)]) for key in self.missing if without_wrappers(key) in there]
        if not pairs:
            return []
        mine, saved = pairs[0]
        lines = [
            f"  {len(pairs)} of these keys differ only by what torch.compile, DDP or FSDP adds to names, such as",
            f"    {_quoted(saved)} in the checkpoint and {_quoted(mine)} in the state.",
            "    Pass a module itself, not its state_dict(): its wrappers are then left out of the names. To load this",
            "    checkpoint, pass a dict with its names: {'_orig_mod.' + name: t for name, t in state_dict.items()}",
        ]
        return ["\n".join(lines)]

    def _dtype_problems(self, convert_dtype: Convert) -> list[str]:
        blocks = []
        refused = {key: pair for key, pair in self.dtypes.items() if not may_convert(*pair, convert_dtype)}
        for kinds, what, hint in _CONVERSIONS:
            found = [key for key, pair in refused.items() if conversion(*pair) in kinds]
            if found:
                lines = grouped(found, lambda key: "saved as {} and the target is {}".format(*refused[key]))
                blocks.append(_block(len(found), what, lines, hint))
        return blocks


_WAYS: dict[Way, str] = {
    "replicas": "what several want, one of them reads, and sends it to the others",
    "swap": "each byte is read once, by one of them, and sent to those that want it",
}
_CONVERSIONS = [
    (("fits", "checked"), "of another dtype", "convert_dtype=True converts them"),
    (("lossy",), "of another kind of number", 'convert_dtype="lossy" converts them'),
    (("impossible",), "of a dtype that torch does not convert", "give the target the saved dtype"),
]


def _block(count: int, what: str, lines: list[str], hint: str) -> str:
    more = [f"    and {len(lines) - _SHOWN} more patterns"] if len(lines) > _SHOWN else []
    return "\n".join([f"  {count} {'key' if count == 1 else 'keys'} {what} ({hint}):", *lines[:_SHOWN], *more])


def grouped(keys: Iterable[str], detail: Callable[[str], str]) -> list[str]:
    """A line for each pattern of keys: numbers become `*`, so a thousand layers take one line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for key in keys:
        groups.setdefault((_NUMBER.sub("*", key), detail(key)), []).append(key)
    lines = []
    for (pattern, text), members in groups.items():
        tail = f": {text}" if text else ""
        if len(members) == 1:
            lines.append(f"    {_quoted(members[0])}{tail}")
        else:
            lines.append(f"    {len(members)} x {_quoted(pattern)} (first {_quoted(members[0])}){tail}")
    return lines


def _quoted(key: str) -> str:
    """A key for a message; one of very many letters is cut."""
    return repr(key) if len(key) <= _KEY_LETTERS else f"{key[:_KEY_LETTERS]!r}... ({len(key)} letters)"


def merge_reports(url: str, keys: list[str], found: list[RankMatch]) -> LoadReport:
    """One report for all ranks. A key is unexpected only if no rank wants it."""
    missing: dict[str, list[int]] = {}
    for rank, one in enumerate(found):
        for key in one.missing:
            missing.setdefault(key, []).append(rank)
    wanted = np.zeros(-(-len(keys) // 8), dtype=np.uint8)
    for one in found:
        wanted |= np.frombuffer(one.wanted, dtype=np.uint8)
    unexpected = tuple(compress(keys, np.unpackbits(wanted, count=len(keys)) == 0))
    shapes: dict[str, tuple[Shape, Shape]] = {}
    dtypes: dict[str, tuple[str, str]] = {}
    kinds: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for one in found:
        reasons.update(one.reasons)
        shapes.update(one.shapes)
        dtypes.update(one.dtypes)
        kinds.update(one.kinds)
    ranks = {key: tuple(where) for key, where in missing.items()}
    read, extra = tuple(f.read_bytes for f in found), sum(f.extra_bytes for f in found)
    return LoadReport(url, ranks, unexpected, shapes, dtypes, kinds, read, reasons, choose_way(found, None), extra)


def bits_of(keys: list[str], wanted: set[str]) -> bytes:
    """One bit for each key, in order."""
    return np.packbits(np.array([key in wanted for key in keys], dtype=bool)).tobytes()
