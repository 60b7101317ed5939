"""Replicas that should be equal: each rank hashes what it shares with others, and the hashes are compared before the commit."""

from dataclasses import dataclass, field

import msgspec
import xxhash

from milepost.comm import Comm, together
from milepost.core.layout import Boxes, Layout
from milepost.core.manifest import Tensor
from milepost.core.ranks import show_ranks, unpack_ranks
from milepost.tensors import LocalTensor, bytes_of, replica_ranks
from milepost.write import AT_ONCE_BYTES


@dataclass
class ReplicaCheck:
    """One rank's part in the comparison. Only one small digest for each group of ranks travels, unless they differ."""

    tensors: tuple[Tensor, ...]
    layouts: tuple[Layout, ...]
    rank: int
    local: dict[str, LocalTensor]
    enabled: bool = True
    _keys: dict[str, dict[str, str]] = field(default_factory=dict)

    def digests(self) -> dict[str, str]:
        """For each group of ranks that hold the same as this one: a digest over all of it, in the same order on each."""
        if not self.enabled:
            return {}
        for tensor in self.tensors:
            local = self.local.get(tensor.key)
            if local is None:
                continue
            for group, index in self._groups(tensor):
                hasher = xxhash.xxh3_128()
                for part in local.parts if index is None else local.parts[index : index + 1]:
                    for view in bytes_of(part.data, AT_ONCE_BYTES):
                        hasher.update(view)
                self._keys.setdefault(group, {})[
                    tensor.key if index is None else f"{tensor.key}{local.parts[index].box.text}"
                ] = hasher.hexdigest()
        return {
            group: str(xxhash.xxh3_128(msgspec.json.encode(list(keys.items()))).hexdigest())
            for group, keys in self._keys.items()
        }

    def _groups(self, tensor: Tensor) -> list[tuple[str, int | None]]:
        """The groups of ranks that share this rank's pieces of a tensor; the index names a piece of an explicit list."""
        layout = self.layouts[tensor.layout]
        if isinstance(layout, Boxes):
            pieces = [part.box for part in self.local[tensor.key].parts]
            shared = {h.box: h.holders for h in layout.held if self.rank in h.holders and len(h.holders) > 1}
            return [(replica_ranks(shared[box]), i) for i, box in enumerate(pieces) if box in shared]
        rows = layout.replicas()
        if rows.shape[1] < 2:
            return []
        found = (rows == self.rank).any(axis=1).nonzero()[0]
        return [(replica_ranks(tuple(int(r) for r in rows[found[0]])), None)] if len(found) else []

    def compare(self, comm: Comm, digests: list[dict[str, str]], where: str) -> str:
        """Which replicas differ, by key and ranks, as text; empty where all are equal. Runs alike on all ranks."""
        versions: dict[str, set[str]] = {}
        for theirs in digests:
            for group, digest in theirs.items():
                versions.setdefault(group, set()).add(digest)
        differing = {group for group, seen in versions.items() if len(seen) > 1}
        if not differing:
            return ""
        mine = {group: keys for group, keys in self._keys.items() if group in differing}
        packed = together(comm, f"{where}: comparing replicas", lambda: msgspec.msgpack.encode(mine))
        details = [msgspec.msgpack.decode(data, type=dict[str, dict[str, str]]) for data in packed]
        lines = [line for group in sorted(differing) for line in _differences(group, details)]
        more = [f"and {len(lines) - 50} more"] if len(lines) > 50 else []
        return "tensors that should be equal on their ranks are not:\n  " + "\n  ".join([*lines[:50], *more])


def _differences(group: str, details: list[dict[str, dict[str, str]]]) -> list[str]:
    ranks = unpack_ranks(group)
    lines = []
    for key in details[ranks[0]][group]:
        versions: dict[str, list[int]] = {}
        for rank in ranks:
            versions.setdefault(details[rank][group].get(key, ""), []).append(rank)
        if len(versions) > 1:
            lines.append(f"{key!r}: " + " differ from ".join(show_ranks(r) for r in list(versions.values())[:4]))
    return lines
