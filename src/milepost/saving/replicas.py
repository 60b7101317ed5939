"""Replicas that should be equal: each rank hashes what others hold too; the hashes are compared before the commit."""

import msgspec
import xxhash

from milepost.comm import Call, Comm, Meeting, meet
from milepost.core.agreement import GroupPlan
from milepost.core.box import Box, Shape
from milepost.core.division import written_by
from milepost.core.limits import MIB
from milepost.core.manifest import Tensor
from milepost.core.ranks import pack_ranks, show_ranks
from milepost.core.wire import Wire
from milepost.data.late import ready
from milepost.state.tensors import LocalTensor, bytes_of

_SHOWN = 50
_AT_ONCE_BYTES = 16 * MIB
Digests = dict[bytes, dict[str, bytes]]
"""For each group of holders, the digest of each key."""
Versions = dict[bytes, dict[str, tuple[bytes, bool]]]
"""The same, and whether this rank alone writes the key."""
_COMPARING = Meeting("comparing replicas", Wire(Versions), Wire(str), "comparing")


class ReplicaCheck:
    """One rank's part in the comparison. One digest for each group of holders travels, more only if they differ."""

    def __init__(self, plan: GroupPlan | None, rank: int, local: dict[str, LocalTensor], memory_bytes: int) -> None:
        """`memory_bytes`: the most that hashing may copy at once; 0 leaves the comparison out."""
        self._plan, self._rank, self._local = plan, rank, local
        self._at_once_bytes = min(memory_bytes, _AT_ONCE_BYTES)
        self._keys: Digests = {}

    def digests(self) -> dict[bytes, bytes]:
        """For each group of ranks that hold the same as this one: a digest over all of it, in one order."""
        if not self._at_once_bytes or self._plan is None:
            return {}
        for tensor in self._plan.tensors:
            self._hash(tensor)
        return {
            group: xxhash.xxh3_64(msgspec.msgpack.encode(sorted(keys.items()))).digest()
            for group, keys in self._keys.items()
        }

    def _hash(self, tensor: Tensor) -> None:
        assert self._plan is not None
        layout = self._plan.layouts[tensor.layout]
        parts = {part.box: part.data for part in self._local[tensor.key].parts}
        for held in layout.held_by(tensor.shape, self._rank):
            if len(held.holders) < 2 or held.box not in parts:
                continue
            hasher = xxhash.xxh3_64()
            for view in bytes_of(ready(parts[held.box]), self._at_once_bytes):
                hasher.update(view)
            self._keys.setdefault(_group_id(held.holders), {})[_name(tensor.key, held.box, tensor.shape)] = (
                hasher.digest()
            )

    def explain(self, comm: Comm, call: Call, differing: set[bytes], *, kept: bool) -> str:
        """Which replicas differ, by key and ranks, as text on every rank. `kept`: also whose are saved."""
        written = self._written() if kept else frozenset()
        mine = {
            group: {name: (digest, name in written) for name, digest in keys.items()}
            for group, keys in self._keys.items()
            if group in differing
        }
        return meet(comm, call, _COMPARING, lambda: mine, _name_differences)

    def _written(self) -> frozenset[str]:
        """The names of what this rank writes."""
        if self._plan is None:
            return frozenset()
        plan = self._plan
        items = (item for t in plan.tensors for item in written_by(t, plan.layouts[t.layout], self._rank))
        shapes = {tensor.key: tensor.shape for tensor in plan.tensors}
        return frozenset(_name(item.key, item.box, shapes[item.key]) for item in items)


def _name(key: str, box: Box, shape: Shape) -> str:
    return key if box.shape == shape else f"{key}{box.text}"


def _group_id(holders: tuple[int, ...]) -> bytes:
    return xxhash.xxh3_64(pack_ranks(sorted(holders)).encode()).digest()


def compare(digests: list[dict[bytes, bytes]]) -> list[bytes]:
    """The groups whose members do not all have the same digest. Pure."""
    versions: dict[bytes, set[bytes]] = {}
    for theirs in digests:
        for group, digest in theirs.items():
            versions.setdefault(group, set()).add(digest)
    return [group for group, seen in versions.items() if len(seen) > 1]


def _name_differences(details: list[Versions]) -> str:
    seen: dict[tuple[bytes, str], dict[bytes, list[int]]] = {}
    writers: dict[tuple[bytes, str], int] = {}
    for rank, groups in enumerate(details):
        for group, keys in groups.items():
            for key, (digest, writes) in keys.items():
                seen.setdefault((group, key), {}).setdefault(digest, []).append(rank)
                if writes:
                    writers[group, key] = rank
    lines = [
        _name_difference(which[1], list(versions.values()), writers.get(which))
        for which, versions in seen.items()
        if len(versions) > 1
    ]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "tensors that should be equal on their ranks are not:\n  " + "\n  ".join([*lines[:_SHOWN], *more])


def _name_difference(key: str, versions: list[list[int]], writer: int | None) -> str:
    kept = "" if writer is None else f"; that of {show_ranks([writer])} was saved"
    return f"{key!r}: " + " differ from ".join(map(show_ranks, versions[:4])) + kept
