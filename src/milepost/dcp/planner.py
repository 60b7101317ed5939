"""Plans, their items, and the two planner roles."""

from milepost.dcp._engine.lent import lend
from milepost.planning.protocol import LoadPlanner, SavePlanner
from milepost.planning.records import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

__all__ = [
    "BytesIOWriteData",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
]

lend(__name__)
