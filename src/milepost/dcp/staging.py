"""Copies of a state for saves in the background."""

from milepost.dcp._engine.lent import lend
from milepost.dcp._engine.replication import ReplicationStager
from milepost.dcp._engine.stagers import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions

__all__ = ["AsyncStager", "BlockingAsyncStager", "DefaultStager", "StagingOptions"]

_ReplicationStager = ReplicationStager

lend(__name__)
