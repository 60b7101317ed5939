"""Joining the files of torch's Hugging Face storage: torch's own; `milepost.convert` makes whole files at once."""

from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)

__all__ = ["consolidate_safetensors_files", "consolidate_safetensors_files_on_every_rank"]
