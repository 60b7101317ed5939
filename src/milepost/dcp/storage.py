"""The two storage roles."""

from milepost.dcp._engine.lent import lend
from milepost.planning.protocol import StorageReader, StorageWriter
from milepost.planning.records import WriteResult

__all__ = ["StorageReader", "StorageWriter", "WriteResult"]

lend(__name__)
