"""The planner protocol, played on simulated ranks with a dict as storage."""

import dataclasses
import io
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch

from milepost.planning.records import LoadItemType, Metadata
from milepost.state.tensors import Sharded


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Saved:
    """What a save left behind: the data by index, the metadata, and the plans that travelled."""

    data: dict
    metadata: Metadata
    sent: list
    final: list


def travelled(record):
    return pickle.loads(pickle.dumps(record))


def save(planners, states, goal=None):
    """Play a save on as many ranks as there are planners; each item goes into a dict by its index."""
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, None, rank == 0)
    sent = [travelled(planner.unless_unchanged(planner.create_local_plan())) for planner in planners]
    plans, metadata = planners[0].create_global_plan(sent)
    plans = planners[0].whole_plans(plans, sent)
    assert metadata.storage_data is None
    plans = [dataclasses.replace(plan, storage_data=goal) for plan in plans]  # as storage does
    final = [planner.finish_plan(travelled(plan)) for planner, plan in zip(planners, plans, strict=True)]
    data = {}
    for planner, plan in zip(planners, final, strict=True):
        assert plan.usable
        assert plan.storage_data == goal
        for item in plan.items:
            assert item.index not in data, "written twice"
            found = planner.resolve_data(item)
            if item.tensor_data is not None:
                assert (found.shape, found.dtype) == (item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype)
            data[item.index] = found.getvalue() if isinstance(found, io.BytesIO) else found.detach().clone()
    metadata.storage_data = goal  # as storage does
    return Saved(data, travelled(metadata), sent, final)


def load(planners, states, saved):
    """Play a load: each item is cut out of the dict."""
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, saved.metadata, rank == 0)
    plans = planners[0].create_global_plan([travelled(planner.create_local_plan()) for planner in planners])
    for planner, plan in zip(planners, plans, strict=True):
        for item in planner.finish_plan(travelled(plan)).items:
            source = saved.data[item.storage_index]
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(source))
                continue
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            assert target.shape == source.shape
            target.copy_(source)
            planner.commit_tensor(item, target)


def rows(rank, world, whole):
    """Row blocks of a tensor, one for each rank."""
    part = torch.tensor_split(whole, world)[rank].clone()
    start = sum(len(block) for block in torch.tensor_split(whole, world)[:rank])
    return Sharded(tuple(whole.shape), {(start, *(0,) * (whole.dim() - 1)): part})


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def nested(fill):
    """A state with everything in it; `fill` 0 is the empty form of it."""
    return {
        "model": {"w": torch.full((4, 2), float(fill)), "scalar": torch.tensor(fill)},
        "optim": {"state": {0: {"step": fill, "m": torch.full((3,), fill)}, 7: {"step": fill + 1}}, "groups": [fill]},
        "tuple": (torch.full((2,), fill), fill, (torch.full((1,), -fill),)),
        "pair": Pair(torch.full((2,), fill), f"text {fill}"),
        "list": [fill, [torch.full((2,), fill)], {"deep": {"value": (fill, "x")}}],
        "array": np.full((2, 2), fill),
        "ordered": OrderedDict(b=fill, a=torch.full((1,), fill)),
        "values": {"none": None, "flag": bool(fill), "size": torch.Size([fill]), "type": torch.bfloat16, "raw": b"1"},
        5: fill,
    }
