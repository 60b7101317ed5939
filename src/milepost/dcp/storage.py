"""The two storage roles."""

from milepost.planning.protocol import StorageReader, StorageWriter
from milepost.planning.records import WriteResult

__all__ = ["StorageReader", "StorageWriter", "WriteResult"]
