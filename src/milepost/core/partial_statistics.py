"""Sums that statistics are made of: added up over pieces, parts and ranks, in columns of numpy. Pure.

Each row belongs to a tensor, which a number stands for: first its place in a rank's plan, then a digest of its key.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from milepost.core.manifest import Tensor
from milepost.core.statistics import MAX_BINS, MAX_TENSORS, TensorStatistics
from milepost.core.wire import Wire

Rows = npt.NDArray[np.void]
MAX_ROWS = 4_000_000
"""How many rows all ranks may send together; beyond that they send totals only. The same for bins of histograms."""
_KEYS_SENT = 16
_ROW = np.dtype(
    [
        ("tensor", "<u8"),
        ("nan", "<i8"),
        ("inf", "<i8"),
        ("min", "<f8"),
        ("max", "<f8"),
        ("total", "<f8"),
        ("squares", "<f8"),
        ("scale", "<i4"),
    ]
)
"""`total` and `squares` are those of the finite elements, each times 2**-scale."""
_BIN = np.dtype([("tensor", "<u8"), ("bin", "<i2"), ("count", "<i8")])
_SENT = np.dtype([(name, _ROW[name]) for name in ("tensor", "min", "max", "total", "squares")])
_ODD = np.dtype([("row", "<u4"), ("nan", "<i8"), ("inf", "<i8"), ("scale", "<i4")])
"""What few rows have: numbers that are not finite, or a scale."""


class _SentStatistics(msgspec.Struct, frozen=True, array_like=True):
    """What a rank sends. `whole`: with all rows, not only totals; `binned`: with all bins of histograms."""

    nan: int
    inf: int
    unhealthy: tuple[bytes, ...]
    whole: bool
    binned: bool
    rows: bytes
    odd: bytes
    bins: bytes


_PACKED = Wire(_SentStatistics)


def new_rows(tensors: "npt.ArrayLike", **columns: "npt.ArrayLike") -> Rows:
    """Rows of these tensors, with these columns; the others are zero."""
    rows = np.zeros(np.shape(tensors), _ROW)
    rows["tensor"] = tensors
    for name, values in columns.items():
        rows[name] = values
    return rows


def new_bins(tensor: int, bins: "npt.ArrayLike", counts: "npt.ArrayLike") -> Rows:
    """Bins of one tensor."""
    found = np.zeros(np.shape(bins), _BIN)
    found["tensor"], found["bin"], found["count"] = tensor, bins, counts
    return found


@dataclass(frozen=True, slots=True)
class PartialStatistics:
    """Rows and bins, at most one for each tensor, and for each tensor and bin."""

    rows: Rows
    bins: Rows

    @classmethod
    def sum_of(cls, rows: Sequence[Rows], bins: Sequence[Rows]) -> "PartialStatistics":
        """Add up what belongs together."""
        return cls(_add_up(_joined(rows, _ROW)), _add_up_bins(_joined(bins, _BIN)))

    def named(self, keys: Sequence[str]) -> "PartialStatistics":
        """The same, with a digest of its key in place of each tensor's number."""
        digests = _digests(keys)
        rows, bins = self.rows.copy(), self.bins.copy()
        rows["tensor"], bins["tensor"] = digests[rows["tensor"]], digests[bins["tensor"]]
        return PartialStatistics(rows, bins)

    def pack(self, ranks: int) -> bytes:
        """The bytes that a rank sends to the coordinator, where this many ranks do."""
        rows = self.rows
        whole = len(rows) * ranks <= MAX_ROWS
        binned = whole and len(self.bins) * ranks <= MAX_ROWS
        unhealthy = rows["tensor"][(rows["nan"] > 0) | (rows["inf"] > 0)]
        first = tuple(int(digest).to_bytes(8, "little") for digest in unhealthy[:_KEYS_SENT])
        nan, inf = int(rows["nan"].sum()), int(rows["inf"].sum())
        if not whole:
            return _PACKED.pack(_SentStatistics(nan, inf, first, whole, binned, b"", b"", b""))
        sent = np.empty(len(rows), _SENT)
        for name in _SENT.names or ():
            sent[name] = rows[name]
        at = np.flatnonzero((rows["nan"] > 0) | (rows["inf"] > 0) | (rows["scale"] != 0))
        odd = np.empty(len(at), _ODD)
        odd["row"] = at
        for name in ("nan", "inf", "scale"):
            odd[name] = rows[name][at]
        bins = self.bins.tobytes() if binned else b""
        return _PACKED.pack(_SentStatistics(nan, inf, first, whole, binned, sent.tobytes(), odd.tobytes(), bins))


@dataclass(frozen=True, slots=True)
class Summary:
    """What is known of all tensors: statistics of each (empty where there are too many), and totals.

    `keys`: the first tensors with numbers that are not finite.
    """

    statistics: tuple[TensorStatistics, ...]
    nan: int
    inf: int
    keys: tuple[str, ...]


def summarise(packed: Sequence[bytes], tensors: Iterable[Tensor], *, recorded: bool) -> Summary:
    """Add up what all ranks sent about these tensors of the manifest. `recorded`: not only what is not finite."""
    sent = [_PACKED.unpack(data) for data in packed]
    nan, inf = sum(one.nan for one in sent), sum(one.inf for one in sent)
    recorded = recorded and all(one.whole for one in sent)
    if not recorded and not nan and not inf:
        return Summary((), 0, 0, ())
    counted = [tensor for tensor in tensors if tensor.has_statistics]
    found = {digest for one in sent for digest in one.unhealthy}
    keys = [t.key for t in counted if _digest(t.key).to_bytes(8, "little") in found] if found else []
    statistics: tuple[TensorStatistics, ...] = ()
    if recorded and len(counted) <= MAX_TENSORS:
        binned = all(one.binned for one in sent) and sum(len(one.bins) for one in sent) <= MAX_BINS * _BIN.itemsize
        partial = PartialStatistics.sum_of(
            [_received(one) for one in sent], [np.frombuffer(one.bins, _BIN) for one in sent if binned]
        )
        statistics = statistics_of(partial, counted)
    return Summary(statistics, nan, inf, tuple(keys[:_KEYS_SENT]))


def statistics_of(partial: PartialStatistics, tensors: Sequence[Tensor]) -> tuple[TensorStatistics, ...]:
    """The statistics of these tensors, from rows with digests of keys."""
    digests = _digests(tensor.key for tensor in tensors)
    counts = np.array([tensor.numbers for tensor in tensors], "<i8")
    rows = _rows_for(partial.rows, digests)
    finite = counts - rows["nan"] - rows["inf"]
    low, high, scale = rows["min"], rows["max"], rows["scale"]
    with np.errstate(all="ignore"):
        mean, rms = np.ldexp(rows["total"] / finite, scale), np.ldexp(np.sqrt(rows["squares"] / finite), scale)
        # Sums are rounded; no mean lies outside of what it is the mean of.
        mean, rms = np.clip(mean, low, high), np.minimum(rms, np.maximum(-low, high))
    known = [column.tolist() for column in (counts, rows["nan"], rows["inf"], low, high, mean, rms)]
    histograms = _histograms(partial.bins)
    return tuple(
        TensorStatistics(tensor.key, count, nan, inf, least, most, middle, root, histograms.get(digest, ()))
        if count > nan + inf
        else TensorStatistics(tensor.key, count, nan, inf)
        for tensor, digest, count, nan, inf, least, most, middle, root in zip(
            tensors, digests.tolist(), *known, strict=True
        )
    )


def _rows_for(rows: Rows, digests: npt.NDArray[np.uint64]) -> Rows:
    """The row of each of these digests; an empty one where there is none."""
    if not len(rows):
        return np.zeros(len(digests), _ROW)
    rows = rows[np.argsort(rows["tensor"])]
    places = np.minimum(np.searchsorted(rows["tensor"], digests), len(rows) - 1)
    found = rows[places]
    found[found["tensor"] != digests] = np.zeros((), _ROW)
    return found


def _histograms(bins: Rows) -> dict[int, tuple[tuple[int, int], ...]]:
    found: dict[int, list[tuple[int, int]]] = {}
    for digest, number, count in bins.tolist():
        found.setdefault(digest, []).append((number, count))
    return {digest: tuple(pairs) for digest, pairs in found.items()}


def _digests(keys: Iterable[str]) -> npt.NDArray[np.uint64]:
    return np.array([_digest(key) for key in keys], "<u8")


def _digest(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass"))


def _joined(many: Sequence[Rows], kind: np.dtype[Any]) -> Rows:
    return np.concatenate(many) if many else np.zeros(0, kind)


def _received(sent: _SentStatistics) -> Rows:
    found = np.frombuffer(sent.rows, _SENT)
    rows = np.zeros(len(found), _ROW)
    for name in _SENT.names or ():
        rows[name] = found[name]
    odd = np.frombuffer(sent.odd, _ODD)
    for name in ("nan", "inf", "scale"):
        rows[name][odd["row"]] = odd[name]
    return rows


def _add_up(rows: Rows) -> Rows:
    """One row for each tensor, in the order of their numbers. Equal rows in equal order give equal sums."""
    if not len(rows):
        return rows
    rows = rows[np.argsort(rows["tensor"], kind="stable")]
    starts = _starts(rows["tensor"])
    added = np.zeros(len(starts), _ROW)
    added["tensor"] = rows["tensor"][starts]
    ways: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...] = (
        (np.add.reduceat, ("nan", "inf")),
        (np.minimum.reduceat, ("min",)),
        (np.maximum.reduceat, ("max",)),
    )
    for add, names in ways:
        for name in names:
            added[name] = add(rows[name], starts)
    # What is zero has no scale: beside it, the smallest numbers must keep theirs.
    scales = np.where(rows["squares"] > 0, rows["scale"], np.iinfo("<i4").min // 4)
    largest = np.maximum.reduceat(scales, starts)
    shifts = scales - np.repeat(largest, np.diff(np.append(starts, len(rows))))
    added["total"] = np.add.reduceat(np.ldexp(rows["total"], shifts), starts)
    added["squares"] = np.add.reduceat(np.ldexp(rows["squares"], 2 * shifts), starts)
    added["scale"] = np.where(added["squares"] > 0, largest, 0)
    return added


def _add_up_bins(bins: Rows) -> Rows:
    if not len(bins):
        return bins
    bins = bins[np.lexsort((bins["bin"], bins["tensor"]))]
    starts = _starts(bins["tensor"], bins["bin"])
    added = bins[starts]
    added["count"] = np.add.reduceat(bins["count"], starts)
    return added


def _starts(*columns: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Where a row differs from the one before it in one of these columns."""
    differs = np.zeros(len(columns[0]), np.bool_)
    differs[0] = True
    for column in columns:
        differs[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(differs)
