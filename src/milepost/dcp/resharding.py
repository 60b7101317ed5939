"""How saved boxes and wanted boxes meet."""

from milepost.planning.items import box_of
from milepost.planning.records import ChunkStorageMetadata

__all__: list[str] = []


def _check_shard_metadata_pair_overlap(shard1: ChunkStorageMetadata, shard2: ChunkStorageMetadata) -> bool:
    return box_of(shard1).intersect(box_of(shard2)) is not None


def _shards_get_overlap_region_wrt_saved_tensor(
    saved_shard: ChunkStorageMetadata, current_shard: ChunkStorageMetadata
) -> list[tuple[int, int, int, int]]:
    """(dimension, start in the saved box, start in the current box, length) for each dimension, of boxes that meet."""
    saved, current = box_of(saved_shard), box_of(current_shard)
    both = saved.intersect(current)
    if both is None:
        raise ValueError(f"{saved.text} and {current.text} do not meet")
    starts = zip(both.within(saved).offset, both.within(current).offset, both.shape, strict=True)
    return [(dim, *numbers) for dim, numbers in enumerate(starts)]
