"""The one path by which every function of this package saves and loads."""

import pickle
import warnings
from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Any

from milepost.comm import TIMEOUT_S, Comm, Phase, told
from milepost.comm.base import Solo
from milepost.comm.distributed import ranks_of
from milepost.commit.find import parse, read_manifest
from milepost.core.agreement import Plans
from milepost.dcp.api import raising_checkpoint_exceptions
from milepost.errors import CheckpointError, CheckpointNotFound, RanksDisagree
from milepost.planning.default import DefaultLoadPlanner, DefaultSavePlanner
from milepost.planning.manifest_bridge import expand
from milepost.planning.protocol import SavePlanner, StorageWriter
from milepost.planning.protocol_run import MakeState, load_planned, place_of, save_planned
from milepost.planning.records import Metadata, StorageMeta
from milepost.planning.route import has_own_data, is_local, save_locally_planned
from milepost.planning.torch_adapters import adapted_load_planner, adapted_reader, adapted_save_planner, adapted_writer
from milepost.saving.pipeline import SaveOptions
from milepost.store import Store


def comm_of(process_group: Any, no_dist: bool, coordinator_rank: int = 0) -> Comm:
    """The ranks of a call: this process alone with `no_dist`, or where there is no process group."""
    return Solo() if no_dist else ranks_of(process_group, TIMEOUT_S, coordinator_rank)


def save_with(state: MakeState, storage_writer: Any, planner: Any, comm: Comm) -> Metadata:
    """Save by plans, with planners and storage of either side. Raises CheckpointException, the same on every rank."""
    state = cache(state)
    with raising_checkpoint_exceptions("save", comm):
        writer, own = adapted_writer(storage_writer), adapted_save_planner(planner) or DefaultSavePlanner()
        if not isinstance(own, DefaultSavePlanner) or not is_local(writer, own):
            return _save_planned(state, writer, own, comm)
        try:
            options = SaveOptions(metadata=writer.metadata, codec=own.codec, plans=Plans())
            receipt = save_locally_planned(state, writer, own, comm, options)
        except CheckpointError as error:
            if has_own_data(error):
                return _save_planned(state, writer, own, comm)
            if not isinstance(error, RanksDisagree):
                raise
            # DCP takes one rank's and is silent. So does the global plan, or it says what cannot be saved at all.
            metadata = _save_of_the_lowest(state, writer, own, comm)
            if comm.rank == comm.coordinator:
                found = str(error).partition("\nWrap ")[0]
                warnings.warn(
                    f"{found}\nThe lowest rank's was saved; milepost.save with PerRank keeps all.", stacklevel=3
                )
            return metadata
        return SavedMetadata(partial(metadata_at, writer.store, receipt.generation))


def _save_of_the_lowest(state: MakeState, writer: StorageWriter, planner: DefaultSavePlanner, comm: Comm) -> Metadata:
    """Save what ranks have in common from the lowest rank that has it."""
    kept, planner.dedup_save_to_lowest_rank = planner.dedup_save_to_lowest_rank, True
    try:
        return _save_planned(state, writer, planner, comm)
    finally:
        planner.dedup_save_to_lowest_rank = kept


def _save_planned(state: MakeState, writer: StorageWriter, planner: SavePlanner, comm: Comm) -> Metadata:
    made = save_planned(state, writer, planner, comm)
    packed = told(comm, Phase("saving to", place_of(writer), "telling"), lambda: pickle.dumps(made))
    metadata: Metadata = pickle.loads(packed)  # noqa: S301  # from a rank of this job
    return metadata if made is None else made


def metadata_at(store: Store, generation: int) -> Metadata:
    """The metadata of a committed generation."""
    data = read_manifest(store, generation)
    if data is None:
        raise CheckpointNotFound(f"the checkpoint that was saved to {store.url} is not there any more")
    metadata = expand(parse(store.url, generation, data))
    metadata.storage_meta = StorageMeta(checkpoint_id=store.url)
    return metadata


_FIELDS = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")


class SavedMetadata(Metadata):
    """What a save committed, read from the manifest when somebody looks at it: most callers do not."""

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


def load_with(
    state: MakeState, storage_reader: Any, planner: Any, comm: Comm, apply: Callable[[], None] = lambda: None
) -> None:
    """Load by plans, into the state, and then `apply`. Raises CheckpointException, the same on every rank."""
    with raising_checkpoint_exceptions("load", comm):
        reader, own = adapted_reader(storage_reader), adapted_load_planner(planner) or DefaultLoadPlanner()
        load_planned(cache(state), apply, reader, own, comm)
