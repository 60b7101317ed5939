"""Transforms of what is written."""

from milepost.data.transforms import Extension, ExtensionRegistry, StreamTransformExtension, ZStandard

__all__ = ["Extension", "ExtensionRegistry", "StreamTransformExtension", "ZStandard"]
