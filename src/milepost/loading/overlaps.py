"""Targets that share memory: tied weights, and views of one tensor under several keys.

What shares memory can hold one value only. A tied tensor is read once. Where two saved tensors go into the same memory,
the second one is compared with what is there: if they differ, the load fails and names both keys.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from milepost.core.division import read_plan
from milepost.core.limits import MIB
from milepost.core.manifest import Manifest, Tensor
from milepost.data.memory import as_bits
from milepost.data.pieces import placement_of
from milepost.data.place import place_all
from milepost.data.read import Files
from milepost.data.transfer import Transfer
from milepost.errors import InvalidState
from milepost.state.tensors import LocalTensor, Part

_AT_ONCE_BYTES = 4 * MIB
_SHOWN = 20


class Double(NamedTuple):
    """A saved tensor whose target shares memory with the target of another."""

    key: str
    other: str
    saved: Tensor
    local: LocalTensor


def find_doubles(found: Mapping[str, tuple[Tensor, LocalTensor]], tied: Mapping[str, str]) -> Iterator[Double]:
    """What must be compared once everything is read. `tied`: keys of tensors that are another one, and its key."""
    spans: list[tuple[str, int, int, str]] = []
    for key, (saved, local) in found.items():
        if key in tied:
            other = tied[key]
            if other in found and found[other][0].stored_key != saved.stored_key:
                yield Double(key, other, saved, local)
            continue
        spans += [(*_span(part.data), key) for part in local.parts if part.data.numel()]
    spans.sort()
    yield from _overlapping(spans, found)


def _span(data: torch.Tensor) -> tuple[str, int, int]:
    """The device of a tensor, its first byte, and the one after its last."""
    where, start = "cpu" if data.is_cpu else str(data.device), data.data_ptr()
    if data.is_contiguous():
        return where, start, start + data.nbytes
    reach = sum((n - 1) * step for n, step in zip(data.shape, data.stride(), strict=True)) + 1
    return where, start, start + reach * data.element_size()


def _overlapping(
    spans: list[tuple[str, int, int, str]], found: Mapping[str, tuple[Tensor, LocalTensor]]
) -> Iterator[Double]:
    """Both of each two neighbours whose spans overlap. They may still lie between each other's elements."""
    told: set[str] = set()
    device, reach, holder = None, 0, ""
    for where, start, stop, key in spans:
        if where == device and start < reach and key != holder:
            for one, other in ((holder, key), (key, holder)):
                if one not in told:
                    told.add(one)
                    yield Double(one, other, *found[one])
        if where != device or stop > reach:
            device, reach, holder = where, stop, key


def check_doubles(doubles: Iterable[Double], manifest: Manifest, files: Files, transfer: Transfer) -> None:
    """Read each of these tensors again, in pieces, and compare it with what is in its target.

    Raises InvalidState, listing the pairs of keys that were saved with different values.
    """
    differing = [
        f"{double.key!r} and {double.other!r}" for double in doubles if not _is_there(double, manifest, files, transfer)
    ]
    if differing:
        more = f"\n  and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        listed = "\n  ".join(differing[:_SHOWN])
        raise InvalidState(
            f"these keys were saved with different values, and share memory in the state:\n  {listed}{more}\n"
            "Untie them (give each a tensor of its own), or leave one of them out "
            "of the state and pass allow_unexpected=True; then load again."
        )


def _is_there(double: Double, manifest: Manifest, files: Files, transfer: Transfer) -> bool:
    return all(_part_is_there(part, double.saved, manifest, files, transfer) for part in double.local.parts)


def _part_is_there(part: Part, saved: Tensor, manifest: Manifest, files: Files, transfer: Transfer) -> bool:
    for box in part.box.slabs(max(_AT_ONCE_BYTES // part.data.element_size(), 1)):
        target = part.data[box.within(part.box).slices]
        again = torch.empty(box.shape, dtype=target.dtype, device=target.device)
        place_all(
            files,
            [
                placement_of(item, saved.dtype, again[item.box.within(box).slices])
                for item in read_plan(manifest, saved, box)
            ],
            transfer,
        )
        if not torch.equal(as_bits(again), as_bits(target.resolve_conj().resolve_neg())):
            return False
    return True
