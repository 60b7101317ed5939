"""Copies of a state for saves in the background: torch's own stagers, which `async_save` of this package takes."""

from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions

from milepost.dcp._engine.lent import lend

__all__ = ["AsyncStager", "BlockingAsyncStager", "DefaultStager", "StagingOptions"]

lend(__name__)
