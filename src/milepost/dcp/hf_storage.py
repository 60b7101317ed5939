"""Storage of Hugging Face's format: torch's own, which `save` and `load` of this package take."""

from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

__all__ = ["HuggingFaceStorageReader", "HuggingFaceStorageWriter"]
