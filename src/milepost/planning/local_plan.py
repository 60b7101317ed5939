"""Saves by the local plans of the ranks: what a planner says of its own rank, written by the usual path."""

import io
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import torch

from milepost.comm import Comm
from milepost.core.box import Box
from milepost.core.layout import Boxes, Grid, Held
from milepost.core.manifest import Value
from milepost.core.ranks import unpack_ranks
from milepost.core.table import Table, TensorRow
from milepost.core.tree import Leaf, Path, nodes_of
from milepost.core.versions import Versions, versions_of
from milepost.data.late import LateTensor
from milepost.errors import CheckpointError, InvalidState
from milepost.planning.default import DefaultSavePlanner
from milepost.planning.items import box_of
from milepost.planning.manifest_bridge import paths_of
from milepost.planning.protocol_run import MakeState, is_of, set_up
from milepost.planning.records import SavePlan, WriteItem
from milepost.planning.route import LocalPlanner, NoPlanner
from milepost.planning.storage import bytes_tensor, resolved_tensor
from milepost.planning.value_bytes import ValueIO
from milepost.saving.describe import Described
from milepost.saving.options import SaveOptions
from milepost.saving.pipeline import Receipt, save_state
from milepost.state.tensors import Describer, LocalTensor, Part, dtype_name


class OwnPlannerData(CheckpointError):
    """Inside a save: a local plan carries data of the planner's own. Only the global plan can merge such data."""


def save_by_local_plans(
    state: MakeState, chosen: NoPlanner | LocalPlanner, comm: Comm, options: SaveOptions
) -> Receipt | None:
    """Save what each rank's planner planned for it, under the keys that the planner spells.

    Gives None on every rank, and saves nothing, if a planner has data of its own: that save needs the global plan.
    Raises the same error on every rank.
    """
    planner, writer, options = chosen.planner, chosen.writer, chosen.options(options)

    def describing() -> Described:
        is_coordinator = comm.rank == comm.coordinator
        set_up(planner.set_up_planner, state(), storage_meta=writer.storage_meta(), is_coordinator=is_coordinator)
        return _describe_planned(planner, comm, options, dict(_versions_in(state())))

    try:
        return chosen.note(save_state(None, writer.store, comm, options, describing))
    except CheckpointError as error:
        if not is_of(error, OwnPlannerData):
            raise
        return None


def _versions_in(state: Any, path: Path = ()) -> Iterator[tuple[Path, Versions]]:
    """The versions of modules that the dicts of a state carry, by path."""
    if isinstance(state, Mapping):
        known = versions_of(state)
        if known is not None:
            yield path, known
        for key, value in state.items():
            yield from _versions_in(value, (*path, str(key)))


def _describe_planned(
    planner: DefaultSavePlanner, comm: Comm, options: SaveOptions, versions: Mapping[Path, Versions]
) -> Described:
    """What a planner's local plan says of this rank, as the usual path describes states."""
    plan = _whole_local_plan(planner)
    describer = Describer(comm, options.reduce_partial)
    items: dict[str, list[WriteItem]] = {}
    for item in plan.items:
        items.setdefault(item.index.fqn, []).append(item)
    tensors: dict[str, LocalTensor] = {}
    values: list[Value] = []
    for fqn, found in items.items():
        if found[0].tensor_data is not None:
            tensors[fqn] = _planned_tensor(fqn, found, planner, describer, comm)
            continue
        data = planner.resolve_data(found[0])
        if isinstance(data, ValueIO):
            values.append(Value(fqn, data.encoded))
        else:
            tensors[fqn] = _planned_bytes(fqn, data)
    kinds: dict[str, Leaf] = {key: "tensor" if key in tensors else "value" for key in items}
    paths, own_data = paths_of(plan.planner_data, kinds)
    if own_data is not None:
        raise OwnPlannerData("the planner has data of its own")
    rows = tuple(TensorRow(k, t.dtype, t.shape, t.kind, t.layout) for k, t in tensors.items())
    table = Table(rows, nodes_of(paths, kinds, versions), tuple(values), ())
    return Described(table, table.digest(), tensors, [], options.codec.encode(dict(options.metadata), "metadata"))


def _whole_local_plan(planner: DefaultSavePlanner) -> SavePlan:
    """The local plan with all of its items, also where the planner would send nothing because nothing changed."""
    caching, planner.enable_plan_caching = planner.enable_plan_caching, False
    try:
        return planner.create_local_plan()
    finally:
        planner.enable_plan_caching = caching


def _planned_bytes(fqn: str, data: Any) -> LocalTensor:
    if not isinstance(data, io.BytesIO):
        raise InvalidState(f"{fqn!r}: a planner gives bytes for what is not a tensor, not {type(data).__name__}")
    raw = bytes_tensor(data)
    return LocalTensor("uint8", (len(raw),), "bytes", None, (Part(Box.whole((len(raw),)), raw),))


def _planned_tensor(
    fqn: str, items: list[WriteItem], planner: DefaultSavePlanner, describer: Describer, comm: Comm
) -> LocalTensor:
    """The items of one tensor, with the layout of the object that they were made from if they are still its boxes."""
    planned = [item.tensor_data for item in items if item.tensor_data is not None]
    if len(planned) != len(items):
        raise InvalidState(f"{fqn!r} is planned as a tensor and as bytes")
    boxes, shape, dtype = [box_of(t.chunk) for t in planned], tuple(planned[0].size), planned[0].properties.dtype
    late: list[Any] = [LateTensor(partial(resolved_tensor, planner, item)) for item in items]
    parts = tuple(Part(box, data) for box, data in zip(boxes, late, strict=True))
    layout = None
    if items[0].type.name == "SHARD":
        held = _described(planner.state_dict.get(fqn), fqn, describer)
        same = held is not None and held.shape == shape and [p.box for p in held.parts] == boxes
        if held is not None and isinstance(held.layout, Grid):
            same = same and _all_hold(held.layout, shape)
        layout = held.layout if held is not None and same else Boxes(tuple(Held(b, str(comm.rank)) for b in boxes))
    return LocalTensor(dtype_name(dtype, fqn), shape, "tensor", layout, parts)


def _described(value: Any, fqn: str, describer: Describer) -> LocalTensor | None:
    """The description of the object behind a key, if it is a tensor and all ranks that hold it take part."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return describer.describe(value, fqn)
    except InvalidState:  # some of its ranks take no part: its boxes are still those of the plan
        return None


@lru_cache(maxsize=1000)
def _all_hold(layout: Grid, shape: tuple[int, ...]) -> bool:
    """Whether every rank of the mesh has elements. One that has none plans nothing, so its table lacks the tensor."""
    ranks = unpack_ranks(layout.mesh.ranks)
    return all(any(held.box.elements for held in layout.held_by(shape, rank)) for rank in ranks)
