"""Storage of Hugging Face's format with quantized tensors, which become ordinary ones as they are read."""

from milepost.dcp._engine.hf_quantized import QuantizedHuggingFaceStorageReader
from milepost.dcp._engine.lent import lend

__all__ = ["QuantizedHuggingFaceStorageReader"]

lend(__name__, "logger")
