"""The metadata that a save gives, read from the committed manifest when it is first looked at."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from milepost.commit.find import parse, read_manifest
from milepost.errors import CheckpointNotFound
from milepost.planning.manifest_bridge import expand
from milepost.planning.records import Metadata, StorageMeta
from milepost.store import Store

_FIELDS = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")


def metadata_at(store: Store, generation: int) -> Metadata:
    """The metadata of a committed generation. Raises CheckpointNotFound if it was removed since."""
    data = read_manifest(store, generation)
    if data is None:
        raise CheckpointNotFound(f"the checkpoint that was saved to {store.url} is not there any more")
    metadata = expand(parse(store.url, generation, data))
    metadata.storage_meta = StorageMeta(checkpoint_id=store.url)
    return metadata


class SavedMetadata(Metadata):
    """What a save committed. Most callers never look at it, so it is looked up on first use."""

    def __init__(self, look_up: Callable[[], Metadata] | None = None, **fields: Any) -> None:
        self._look_up = look_up or partial(Metadata, **fields)

    @cached_property
    def _whole(self) -> Metadata:
        return self._look_up()

    def __getattribute__(self, name: str) -> Any:
        return getattr(self._whole, name) if name in _FIELDS else super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIELDS:
            setattr(self._whole, name, value)
        else:
            super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        return self._whole == (other._whole if isinstance(other, SavedMetadata) else other)

    __hash__ = None  # type: ignore[assignment]  # like Metadata

    def __reduce__(self) -> tuple[Any, ...]:
        return Metadata, tuple(getattr(self, name) for name in _FIELDS)
