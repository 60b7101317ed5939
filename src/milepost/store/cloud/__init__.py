"""Object stores: Amazon S3, Google Cloud Storage, Azure Blob Storage."""

from milepost.store.cloud.options import CloudOptions
from milepost.store.cloud.store import CloudStore

__all__ = ["CloudOptions", "CloudStore"]
