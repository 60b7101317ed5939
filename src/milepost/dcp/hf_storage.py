"""Storage of Hugging Face's format: safetensors files of named tensors, with an index."""

from milepost.dcp._engine.hf_read import HuggingFaceStorageReader
from milepost.dcp._engine.hf_write import HuggingFaceStorageWriter
from milepost.dcp._engine.lent import lend

__all__ = ["HuggingFaceStorageReader", "HuggingFaceStorageWriter"]

lend(__name__, "logger")
