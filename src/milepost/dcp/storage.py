"""The two storage roles."""

from milepost.planning import StorageReader, StorageWriter, WriteResult

__all__ = ["StorageReader", "StorageWriter", "WriteResult"]
