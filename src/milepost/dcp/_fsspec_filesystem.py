"""Storage by fsspec, in torch's format: torch's own, which `save` and `load` of this package take. Needs fsspec."""

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

__all__ = ["FsspecReader", "FsspecWriter"]
