"""Bytes between tensors and stores."""
