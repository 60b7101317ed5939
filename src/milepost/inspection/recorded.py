"""What is known of the numbers in a checkpoint's tensors: recorded by the save, or computed now."""

import fnmatch
from collections.abc import Sequence
from typing import Literal

import msgspec

from milepost.core.manifest import Manifest, Tensor
from milepost.core.statistics import Health, TensorStatistics
from milepost.data.read import Files
from milepost.data.transfer import Watcher
from milepost.errors import InvalidRequest
from milepost.inspection.patterns import refuse_unmatched

Source = Literal["recorded", "computed", "both", "none"]
"""Where statistics are from: the save recorded them; or they were computed now; or some are from here, some from there.
"""


class NumbersReport(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of a checkpoint's tensors, those with NaN or Inf first, else in the order of the state.

    `source`: where they are from. `missing`: how many tensors have none: nothing was recorded and nothing computed.
    `without_numbers`: how many have no numbers: bytes, and types that hold two numbers in a byte. `tied`: how many are
    the same as another, under whose key they stand. `not_finite`: how many of the tensors hold NaN or Inf.
    `health`: what the rule of the run said when it was saved.
    """

    url: str
    format: str
    generation: int
    source: Source
    health: Health | None
    tensors: tuple[TensorStatistics, ...]
    not_finite: int
    missing: int
    without_numbers: int
    tied: int


def numbers_of(
    files: Files, keys: str = "*", *, compute: bool = False, progress: Watcher | None = None
) -> NumbersReport:
    """The statistics of the tensors of an open checkpoint whose keys match.

    `compute`: read those of which nothing was recorded, verified and in pieces. That needs torch, and as much memory as
    a load takes beside its state. Raises InvalidRequest if no key matches.
    """
    refuse_unmatched([keys], (tensor.key for tensor in files.manifest.tensors), files.url, "tensor")
    chosen = [tensor for tensor in files.manifest.tensors if fnmatch.fnmatchcase(tensor.key, keys)]
    return _report(files, chosen, compute, progress, histogram=False)


def _report(
    files: Files, chosen: Sequence[Tensor], compute: bool, progress: Watcher | None, *, histogram: bool
) -> NumbersReport:
    manifest = files.manifest
    recorded = {row.key: row for row in manifest.statistics}
    tied = [tensor for tensor in chosen if tensor.same_as]
    own = _stored(manifest, chosen)
    numeric = [tensor for tensor in own if has_numbers(tensor)]
    unknown = [tensor for tensor in numeric if tensor.key not in recorded]
    found = {tensor.key: recorded[tensor.key] for tensor in numeric if tensor.key in recorded}
    computed: dict[str, TensorStatistics] = {}
    if compute and unknown:
        from milepost.inspection.computing import compute_statistics  # noqa: PLC0415  # imports torch

        computed = compute_statistics(files, unknown, progress, histogram=histogram)
    rows = [row for tensor in numeric if (row := computed.get(tensor.key) or found.get(tensor.key)) is not None]
    return NumbersReport(
        url=files.url,
        format=manifest.format,
        generation=manifest.generation,
        source="both" if found and computed else "recorded" if found else "computed" if computed else "none",
        health=manifest.health,
        tensors=tuple(sorted(rows, key=lambda row: row.is_finite)),
        not_finite=sum(not row.is_finite for row in rows),
        missing=len(numeric) - len(rows),
        without_numbers=len(own) - len(numeric),
        tied=len(tied),
    )


def numbers_at(files: Files, key: str, *, compute: bool = False, progress: Watcher | None = None) -> NumbersReport:
    """The same for one tensor; what is computed has a histogram. Raises InvalidRequest for what has no numbers."""
    tensor = next((one for one in files.manifest.tensors if one.key == key), None)
    if tensor is None:
        why = "is no tensor" if any(node.key == key for node in files.manifest.tree) else "is not there"
        raise InvalidRequest(f"{files.url}: {key!r} {why}. `milepost show` lists the keys")
    if not has_numbers(tensor):
        raise InvalidRequest(f"{files.url}: {key!r} holds bytes, or numbers of four bits, which have no statistics")
    return _report(files, [tensor], compute, progress, histogram=True)


def has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor has numbers: not bytes, and not two of them in each byte."""
    return not tensor.is_bytes and tensor.dtype != "float4_e2m1fn_x2"


def _stored(manifest: Manifest, chosen: Sequence[Tensor]) -> list[Tensor]:
    """The chosen tensors, each once: for one that is tied to another, that other."""
    tensors = {tensor.key: tensor for tensor in manifest.tensors}
    stored = {one.key: one for one in (tensors.get(t.same_as, t) if t.same_as else t for t in chosen)}
    return list(stored.values())
