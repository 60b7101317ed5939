"""Transforms of what is written."""

from milepost.extension import Extension, ExtensionRegistry, StreamTransformExtension, ZStandard

__all__ = ["Extension", "ExtensionRegistry", "StreamTransformExtension", "ZStandard"]
