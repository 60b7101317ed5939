"""Comparing the values that each rank keeps for itself."""

from collections.abc import Sequence
from typing import Any

import msgspec

from milepost.core.private_record import Private, read_private
from milepost.core.ranks import pack_ranks, unpack_ranks
from milepost.core.shardfile import PRIVATE, private_name
from milepost.core.tree import Branch, grow
from milepost.data.read import Files, VerifiedFile
from milepost.errors import CheckpointDamaged
from milepost.inspection.tables import ChangeTally, TableComparison


class PerRankDifference(msgspec.Struct, frozen=True):
    """A key under which each rank keeps a value of its own. `ranks`: those that differ, or that only one has: `0-3`."""

    key: str
    ranks: str


def compare_private(
    left: Files, right: Files, tables: TableComparison, keys: Sequence[str]
) -> tuple[PerRankDifference, ...]:
    """Those of these keys, under which both have values of ranks, whose values are not the same on all ranks."""
    mine, theirs = _holders(left), _holders(right)
    keys = [key for key in keys if key in mine and key in theirs]
    differing = {key: set(mine[key]) ^ set(theirs[key]) for key in keys}
    for rank in sorted({rank for key in keys for rank in mine[key] & theirs[key]}):
        for key in _compare_rank(left, right, rank, tables):
            if key in differing and rank in mine[key] & theirs[key]:
                differing[key].add(rank)
    return tuple(PerRankDifference(key, pack_ranks(sorted(ranks))) for key, ranks in differing.items() if ranks)


def _holders(files: Files) -> dict[str, set[int]]:
    return {one.key: set(unpack_ranks(one.ranks)) for one in files.manifest.per_rank}


def _compare_rank(left: Files, right: Files, rank: int, tables: TableComparison) -> list[str]:
    """The keys whose values differ between the files of one rank."""
    first, second = _record(left.of(rank)), _record(right.of(rank))
    mine, theirs = _by_key(first), _by_key(second)
    differing = [key for key in mine if key in theirs and mine[key][0] != theirs[key][0]]
    for key in mine.keys() & theirs.keys() - set(differing):
        tally = ChangeTally()
        for tensor in mine[key][1]:  # they have the same keys, types and shapes in both
            name = private_name(tensor)
            one, other = left.holding(rank, name), right.holding(rank, name)
            found, known = (file.header.entries.get(name) for file in (one, other))
            if one.id == other.id:
                continue  # one and the same entry
            if found is not None and known is not None:
                tables.compare(one, found, other, known, tally)
            elif found is not known:
                raise CheckpointDamaged(f"{one.where} or {other.where} lacks the private tensor {tensor[:200]!r}")
        differing.extend([key] if tally.changed else [])
    return differing


def _record(file: VerifiedFile) -> Private:
    entry = file.header.entries.get(PRIVATE)
    if entry is None:
        raise CheckpointDamaged(f"{file.where} holds no private values")
    try:
        return read_private(file.data(*entry.data_offsets))
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{file.where}: its private values are not valid: {str(error)[:1000]}") from error


def _by_key(record: Private) -> dict[str, tuple[bytes, list[str]]]:
    """For each key: all that the record says about its value, as bytes, and the keys of its tensors."""
    values = {value.key: value.value for value in record.values}
    tensors = {tensor.key: tensor for tensor in record.tensors}
    found = {}
    for child in grow(record.tree).children:
        nodes = list(_below(child))
        said: list[Any] = [[node, values.get(node.key), tensors.get(node.key)] for node in nodes]
        name = child.node.name
        key = name if isinstance(name, str) else msgspec.json.encode(name).decode()
        found[key] = (msgspec.json.encode(said), [node.key for node in nodes if node.key in tensors])
    return found


def _below(branch: Branch) -> Any:
    pending = [branch]
    while pending:
        here = pending.pop()
        yield here.node
        pending.extend(reversed(here.children))
