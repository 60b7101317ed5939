"""Transforms of what is written."""

from milepost.data.transforms import Extension, ExtensionRegistry, StreamTransformExtension, ZStandard
from milepost.dcp._engine.lent import lend

__all__ = ["Extension", "ExtensionRegistry", "StreamTransformExtension", "ZStandard"]

lend(__name__, "pyzstd pyzstd_module_name zstandard_module_name")
