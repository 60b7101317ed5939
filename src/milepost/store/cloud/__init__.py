"""Object stores: Amazon S3, Google Cloud Storage, Azure Blob Storage."""
