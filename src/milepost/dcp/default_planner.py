"""The planners that are used unless you bring your own, and the functions that they are made of."""

import sys
from types import ModuleType
from typing import Any

import torch

from milepost.core.box import Box
from milepost.dcp._engine.lent import lend
from milepost.planning import global_plan
from milepost.planning.default import DefaultLoadPlanner, DefaultSavePlanner, EmptyStateDictLoadPlanner
from milepost.planning.global_plan import (
    create_default_global_load_plan,
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from milepost.planning.items import box_of
from milepost.planning.records import ChunkStorageMetadata

__all__ = [
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
]

_EmptyStateDictLoadPlanner = EmptyStateDictLoadPlanner
_create_default_local_metadata = global_plan.create_default_local_metadata
_validate_global_plan = global_plan.validate_global_plan


def _check_box_overlap(box0: ChunkStorageMetadata, box1: ChunkStorageMetadata) -> bool:
    return box_of(box0).intersect(box_of(box1)) is not None


def _check_box_bounds(outer_box_size: torch.Size, inner_box: ChunkStorageMetadata) -> bool:
    if any(n < 0 for n in (*inner_box.offsets, *inner_box.sizes)):
        return False
    return Box.whole(tuple(outer_box_size)).contains(box_of(inner_box))


class _PlannerModule(ModuleType):
    """A module whose `_validate_global_plan` is the planners' own: to replace it changes what they do, as in DCP."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_validate_global_plan":
            DefaultSavePlanner.validate = staticmethod(value)


sys.modules[__name__].__class__ = _PlannerModule

lend(__name__, "logger")
