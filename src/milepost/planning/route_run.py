"""Saves and loads with a planner, a storage writer or reader, or both, as `route` decides."""

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from milepost.comm import Announcement, Call, Comm, broadcast, calling, operating_on
from milepost.core.wire import Wire
from milepost.planning.default import DefaultLoadPlanner
from milepost.planning.local_plan import save_by_local_plans
from milepost.planning.protocol import StorageWriter
from milepost.planning.protocol_run import MakeState, load_planned, place_of, save_planned
from milepost.planning.records import Metadata, TensorStorageMetadata
from milepost.planning.route import GlobalPlanner, LocalPlanner
from milepost.planning.storage import CheckpointWriter
from milepost.saving.options import SaveOptions
from milepost.saving.pipeline import Receipt
from milepost.store import Location

_ENDING = Announcement("ending", Wire(tuple[int, str, int]))


def writer_at(path: Location, options: SaveOptions) -> CheckpointWriter:
    """Milepost's own storage writer, for a save that has a planner and no writer."""
    return CheckpointWriter(
        path,
        overwrite=options.overwrite,
        metadata=options.metadata,
        transfer=options.transfer,
        progress=options.progress,
    )


def save_with_planner(
    state: MakeState, chosen: LocalPlanner | GlobalPlanner, comm: Comm, options: SaveOptions
) -> Receipt:
    """Save by the local plans of the ranks, or by the global plan. Raises the same error on every rank."""
    state, place = cache(state), place_of(chosen.writer)
    with calling(comm, Call("saving to", place)), operating_on(comm, "save", place, wraps=True):
        match chosen:
            case LocalPlanner():
                by_all = GlobalPlanner(chosen.writer, chosen.planner)
                receipt = save_by_local_plans(state, chosen, comm, options)
                return receipt or _save_by_global_plan(state, by_all, comm, options)
            case GlobalPlanner():
                return _save_by_global_plan(state, chosen, comm, options)


def _save_by_global_plan(state: MakeState, chosen: GlobalPlanner, comm: Comm, options: SaveOptions) -> Receipt:
    writer = chosen.writer
    with _with_options(writer, options):
        metadata = save_planned(state, writer, chosen.planner, comm)
    call = Call("saving to", place_of(writer))
    generation, save_id, size = broadcast(comm, call, _ENDING, lambda: _summary(chosen, metadata))
    return Receipt(place_of(writer), generation, save_id, comm.size, size)


@contextlib.contextmanager
def _with_options(writer: StorageWriter, options: SaveOptions) -> Iterator[None]:
    """Give Milepost's own writer the options of the call that it has too, for this save. Storage of others has none."""
    if not isinstance(writer, CheckpointWriter):
        yield
        return
    kept = writer.overwrite, writer.metadata
    writer.overwrite = writer.overwrite and options.overwrite
    writer.metadata = dict(options.metadata or writer.metadata)
    try:
        yield
    finally:
        writer.overwrite, writer.metadata = kept


def _summary(chosen: GlobalPlanner, metadata: Metadata | None) -> tuple[int, str, int]:
    """On the coordinator: the generation, the id of the save, and the bytes of all tensors."""
    entries = metadata.state_dict_metadata.values() if metadata else ()
    tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    size = sum(tensor.size.numel() * tensor.properties.dtype.itemsize for tensor in tensors)
    writer = chosen.writer
    if isinstance(writer, CheckpointWriter):
        return writer.generation, writer.save_id, size
    return 0, "", size


def load_with_planner(state: MakeState, apply: Callable[[], None], reader: Any, planner: Any, comm: Comm) -> None:
    """Load with a planner, a storage reader, or both, and then `apply`; those made for torch's own classes are adapted.

    Raises the same error on every rank.
    """
    from milepost.planning.torch_adapters import adapted_load_planner, adapted_reader  # noqa: PLC0415  # slow to import

    own_planner = adapted_load_planner(planner)
    if own_planner is None:
        own_planner = DefaultLoadPlanner()
    load_planned(cache(state), apply, adapted_reader(reader), own_planner, comm)
