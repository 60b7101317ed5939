"""`save` and `load` with planners or storage of the caller's. Planners that leave the global plan alone take the usual path."""

import io
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any, TypeGuard

import msgspec
import torch

from milepost.comm import Comm, Phase, told
from milepost.core.agreement import Plans
from milepost.core.box import Box
from milepost.core.layout import Boxes, Grid, Held
from milepost.core.manifest import Value
from milepost.core.ranks import unpack_ranks
from milepost.core.table import Table, TensorRow
from milepost.core.tree import Leaf, nodes_of
from milepost.data.late import LateTensor
from milepost.errors import CheckpointError, InvalidRequest, InvalidState
from milepost.planning.default import DefaultLoadPlanner, DefaultSavePlanner
from milepost.planning.items import box_of
from milepost.planning.manifest_bridge import paths_of
from milepost.planning.protocol import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from milepost.planning.protocol_run import MakeState, load_planned, place_of, save_planned, set_up
from milepost.planning.records import Metadata, TensorStorageMetadata, WriteItem
from milepost.planning.storage import CheckpointWriter, bytes_tensor, resolved_tensor
from milepost.planning.value_bytes import ValueIO
from milepost.saving.describe import Described
from milepost.saving.pipeline import Receipt, SaveOptions, save_state
from milepost.state.take_apart import is_stateful
from milepost.state.tensors import Describer, LocalTensor, Part, dtype_name

# Made once, when the module is imported: two threads that are the first to decode a type can crash msgspec.
_SUMMARIES = msgspec.msgpack.Decoder(tuple[int, str, int])
_plans: "weakref.WeakKeyDictionary[DefaultSavePlanner, Plans]" = weakref.WeakKeyDictionary()


class OwnPlannerData(CheckpointError):
    """Inside a save: a local plan carries data of the planner's own, which only the global plan brings together."""


def save_by_plans(
    state: Any, writer: StorageWriter, planner: SavePlanner | None, comm: Comm, options: SaveOptions
) -> Receipt:
    """Save with a planner, a storage writer, or both; those of torch's own classes are adapted."""
    from milepost.planning.torch_adapters import adapted_save_planner, adapted_writer  # noqa: PLC0415  # slow to import

    opening = cache(partial(opened, state))
    writer, planner = adapted_writer(writer), adapted_save_planner(planner) or DefaultSavePlanner()
    if isinstance(planner, DefaultSavePlanner) and is_local(writer, planner):
        if is_plain(writer, planner):
            return noted(writer, save_state(state, writer.store, comm, options_with(options, planner, writer)))
        try:
            return save_locally_planned(opening, writer, planner, comm, options)
        except CheckpointError as error:
            if not has_own_data(error):
                raise
    metadata = save_planned(opening, writer, planner, comm)
    packed = told(comm, Phase("saving to", place_of(writer), "telling"), lambda: _summary(writer, metadata))
    generation, save_id, size = _SUMMARIES.decode(packed)
    return Receipt(place_of(writer), generation, save_id, comm.size, size)


def is_plain(writer: StorageWriter, planner: SavePlanner) -> TypeGuard[CheckpointWriter]:
    """Whether these do what a save does without them: then not even the keys need to be spelled."""
    return type(planner) is DefaultSavePlanner and planner.flatten_state_dict and is_local(writer, planner)


def has_own_data(error: CheckpointError) -> bool:
    """Whether a save by local plans ended because some rank's planner has data of its own. The same on every rank."""
    met = {failure.kind for failure in error.failures.values()}
    return isinstance(error, OwnPlannerData) or OwnPlannerData.__name__ in met


def _summary(writer: StorageWriter, metadata: Metadata | None) -> bytes:
    """On the coordinator: the generation, the id of the save, and the bytes of all tensors."""
    tensors = [
        t for t in (metadata.state_dict_metadata.values() if metadata else ()) if isinstance(t, TensorStorageMetadata)
    ]
    size = sum(tensor.size.numel() * tensor.properties.dtype.itemsize for tensor in tensors)
    if isinstance(writer, CheckpointWriter):
        return msgspec.msgpack.encode((writer.generation, writer.save_id, size))
    return msgspec.msgpack.encode((0, "", size))


def load_by_plans(state: Any, reader: StorageReader, planner: LoadPlanner | None, comm: Comm) -> Any:
    """Load with a planner, a storage reader, or both; those of torch's own classes are adapted. Gives the state back."""
    from milepost.planning.torch_adapters import adapted_load_planner, adapted_reader  # noqa: PLC0415  # slow to import

    load_planned(
        *opening_and_closing(state), adapted_reader(reader), adapted_load_planner(planner) or DefaultLoadPlanner(), comm
    )
    return state


def opened(state: Any) -> dict[str, Any]:
    """The state with the state dicts of stateful objects in their places."""
    if not isinstance(state, Mapping):
        raise InvalidRequest(f"planners work on a dict; put this {type(state).__name__} into one")
    dicts = {key: state[key].state_dict() for key in _stateful_keys(state)}
    return {key: dicts.get(key, value) for key, value in state.items()}


def _stateful_keys(state: Mapping[str, Any]) -> list[str]:
    """The keys of stateful objects, in one order on every rank: what those do may be a collective."""
    return sorted((key for key, value in state.items() if is_stateful(value)), key=str)


def opening_and_closing(state: dict[str, Any]) -> tuple[MakeState, Callable[[], None]]:
    """What gives the opened state, and what puts it back once it is filled."""
    opening = cache(partial(opened, state))

    def close() -> None:
        filled, stateful = opening(), _stateful_keys(state)
        for key in stateful:
            state[key].load_state_dict(filled[key])
        state.update((key, value) for key, value in filled.items() if key not in stateful)

    return opening, close


def is_local(writer: StorageWriter, planner: DefaultSavePlanner) -> TypeGuard[CheckpointWriter]:
    """Whether nothing about the plans of all ranks was changed: neither by the classes nor by options."""
    default = _keeps(planner, DefaultSavePlanner, "create_global_plan", "finish_plan", "unless_unchanged")
    steps = ("set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish", "abort")
    plain = isinstance(writer, CheckpointWriter) and _keeps(writer, CheckpointWriter, *steps) and not writer.transforms
    return default and plain and not planner.dedup_save_to_lowest_rank


def _keeps(value: object, base: type, *names: str) -> bool:
    """Whether the class of a value has these methods as its base has them."""
    return all(getattr(type(value), name) is getattr(base, name) for name in names)


def save_locally_planned(
    state: MakeState, writer: CheckpointWriter, planner: DefaultSavePlanner, comm: Comm, options: SaveOptions
) -> Receipt:
    """Save by the usual path what the planner's local plan says, with the keys that it spells.

    Raises an error that `has_own_data` knows, on every rank, where that would lose what a planner wants to keep.
    """

    def describing() -> Described:
        is_coordinator = comm.rank == comm.coordinator
        set_up(planner.set_up_planner, state(), storage_meta=writer.storage_meta(), is_coordinator=is_coordinator)
        return describe_planned(planner, comm, options)

    return noted(writer, save_state(None, writer.store, comm, options_with(options, planner, writer), describing))


def noted(writer: CheckpointWriter, receipt: Receipt) -> Receipt:
    """The receipt, of which the writer knows too."""
    writer.generation, writer.save_id = receipt.generation, receipt.save_id
    return receipt


def options_with(options: SaveOptions, planner: DefaultSavePlanner, writer: CheckpointWriter) -> SaveOptions:
    """The options of the call, with what planner and writer were made with."""
    options = replace(
        options,
        overwrite=options.overwrite and writer.overwrite,
        metadata=options.metadata or writer.metadata,
        transfer=writer.transfer,
        progress=writer.progress,
        codec=planner.codec,
    )
    return replace(options, plans=_plans.setdefault(planner, Plans())) if planner.enable_plan_caching else options


def describe_planned(planner: DefaultSavePlanner, comm: Comm, options: SaveOptions) -> Described:
    """What a planner's local plan says of this rank, as the usual path describes states."""
    caching, planner.enable_plan_caching = planner.enable_plan_caching, False  # the whole plan, please
    try:
        plan = planner.create_local_plan()
    finally:
        planner.enable_plan_caching = caching
    describer = Describer(comm, options.reduce_partial)
    items: dict[str, list[WriteItem]] = {}
    for item in plan.items:
        items.setdefault(item.index.fqn, []).append(item)
    tensors: dict[str, LocalTensor] = {}
    values: list[Value] = []
    for fqn, found in items.items():
        if found[0].tensor_data is not None:
            tensors[fqn] = _local(fqn, found, planner, describer, comm)
            continue
        data = planner.resolve_data(found[0])
        if isinstance(data, ValueIO):
            values.append(Value(fqn, data.encoded))
        else:
            tensors[fqn] = _bytes(fqn, data)
    kinds: dict[str, Leaf] = {key: "tensor" if key in tensors else "value" for key in items}
    paths, own_data = paths_of(plan.planner_data, kinds)
    if own_data is not None:
        raise OwnPlannerData("the planner has data of its own")
    nodes = nodes_of(paths, kinds)
    rows = tuple(TensorRow(k, t.dtype, t.shape, t.kind, t.layout) for k, t in tensors.items())
    table = Table(rows, nodes, tuple(values), ())
    return Described(table, table.digest(), tensors, [], options.codec.encode(dict(options.metadata), "metadata"))


def _bytes(fqn: str, data: Any) -> LocalTensor:
    if not isinstance(data, io.BytesIO):
        raise InvalidState(f"{fqn!r}: a planner gives bytes for what is not a tensor, not {type(data).__name__}")
    raw = bytes_tensor(data)
    return LocalTensor("uint8", (len(raw),), "bytes", None, (Part(Box.whole((len(raw),)), raw),))


def _held(value: Any, fqn: str, describer: Describer) -> LocalTensor | None:
    """What the object behind a key says of itself, if it is a tensor on ranks that all take part in the call."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return describer.describe(value, fqn)
    except InvalidState:  # on other ranks too: its boxes are still those of the plan
        return None


@lru_cache(maxsize=1000)
def _all_hold(layout: Grid, shape: tuple[int, ...]) -> bool:
    """Whether every rank of the mesh has elements. One that has none plans nothing, so its table lacks the tensor."""
    ranks = unpack_ranks(layout.mesh.ranks)
    return all(any(held.box.elements for held in layout.held_by(shape, rank)) for rank in ranks)


def _local(
    fqn: str, items: list[WriteItem], planner: DefaultSavePlanner, describer: Describer, comm: Comm
) -> LocalTensor:
    """The items of one tensor, with the layout of the object that they were made from where they still are its boxes."""
    told = [item.tensor_data for item in items if item.tensor_data is not None]
    if len(told) != len(items):
        raise InvalidState(f"{fqn!r} is planned as a tensor and as bytes")
    boxes, shape, dtype = [box_of(t.chunk) for t in told], tuple(told[0].size), told[0].properties.dtype
    late: list[Any] = [LateTensor(partial(resolved_tensor, planner, item)) for item in items]
    parts = tuple(Part(box, data) for box, data in zip(boxes, late, strict=True))
    layout = None
    if items[0].type.name == "SHARD":
        held = _held(planner.state_dict.get(fqn), fqn, describer)
        same = held is not None and held.shape == shape and [p.box for p in held.parts] == boxes
        if held is not None and isinstance(held.layout, Grid):
            same = same and _all_hold(held.layout, shape)
        layout = held.layout if held is not None and same else Boxes(tuple(Held(b, str(comm.rank)) for b in boxes))
    return LocalTensor(dtype_name(dtype, fqn), shape, "tensor", layout, parts)
