"""Storage of Hugging Face's format, quantized: torch's own, which `load` of this package takes."""

from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

__all__ = ["QuantizedHuggingFaceStorageReader"]
