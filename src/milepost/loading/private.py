"""Reading rank-private values: the record in a rank's own shard file, and the tensors that it names."""

from typing import Any

from milepost.core.box import Box
from milepost.core.division import PlannedRead
from milepost.core.dtypes import DTYPES
from milepost.core.manifest import Manifest, Tensor, check_kind
from milepost.core.private_record import Private, read_private
from milepost.core.ranks import unpack_ranks
from milepost.core.shardfile import PRIVATE, private_name
from milepost.core.tree import Node, Parts, Path, build, check_leaves, grow, show_path
from milepost.data.pieces import Placement, placement_of
from milepost.data.place import place_all
from milepost.data.read import Files
from milepost.errors import CheckpointDamaged, InvalidState
from milepost.state.composite import composed_or_parts
from milepost.state.tensors import new_saved
from milepost.state.values import Codec


def read_private_values(files: Files, rank: int, codec: Codec) -> dict[str, Any]:
    """All values that `rank` kept for itself, by key. Raises CheckpointDamaged where the record is not valid."""
    file = files.of(rank)
    entry = file.header.entries.get(PRIVATE)
    if entry is None:
        raise CheckpointDamaged(f"{file.where} holds no private values")
    data = file.data(*entry.data_offsets)
    try:
        result = _build(read_private(data), files, rank, codec)
        kept = {p.key for p in files.manifest.per_rank if rank in unpack_ranks(p.ranks)}
        if not isinstance(result, dict) or set(result) != kept:
            raise ValueError("they are not the keys that the manifest lists")
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{file.where}: its private values are not valid: {str(error)[:1000]}") from error
    return result


def _build(record: Private, files: Files, rank: int, codec: Codec) -> Any:
    """The values that a record stands for. Raises ValueError where it contradicts itself."""
    check_leaves(record.tree, {"value": [v.key for v in record.values], "tensor": [t.key for t in record.tensors]})
    for tensor in record.tensors:
        check_kind(tensor)
    tensors = _read_tensors(files, rank, record.tensors)
    values = {v.key: v.value for v in record.values}

    def leaf(node: Node, path: Path) -> Any:
        del path
        return tensors[node.key] if node.kind == "tensor" else codec.decode(values[node.key], node.key)

    def compose(parts: Parts, path: Path) -> Any:
        return composed_or_parts(parts, codec, show_path(path))

    return build(grow(record.tree), lambda name: codec.decode(name, "a private key"), leaf, (), compose)


def _read_tensors(files: Files, rank: int, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    placements: list[Placement] = []
    for tensor in tensors:
        name, box = private_name(tensor.key), Box.whole(tensor.shape)
        entry = files.holding(rank, name).header.entries.get(name)
        if box.elements and (entry is None or entry.size_bytes != box.elements * DTYPES[tensor.dtype].size_bytes):
            raise CheckpointDamaged(f"{files.of(rank).where} does not hold the private tensor {tensor.key!r}")
        read[tensor.key], memory = new_saved(tensor)
        if box.elements:
            item = PlannedRead(tensor.key, rank, name, box, box)
            placements.append(placement_of(item, tensor.dtype, memory))
    place_all(files, placements)
    return read


def check_world(manifest: Manifest, key: str, rank: int, world: int) -> None:
    """Refuse to give a rank another rank's private value."""
    if manifest.world != world:
        raise InvalidState(
            f"{key!r} is rank-private and was saved by {manifest.world} ranks; this job has {world}. Give PerRank a "
            "`remap(old_values, rank, world)` that says what each new rank gets, or take the key out of the state."
        )
    if rank not in {f.rank for f in manifest.files}:
        raise CheckpointDamaged(f"rank {rank} saved no private values")
