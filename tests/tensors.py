"""Tensors for tests."""

import math

import numpy as np
import torch

from milepost.core.dtypes import DTYPES


def random_tensor(dtype, *shape, seed=0):
    """Any bits; booleans are 0 or 1."""
    high = 2 if dtype == "bool" else 256
    count = math.prod(shape) * DTYPES[dtype].size_bytes
    content = np.random.default_rng(seed).integers(0, high, count, dtype=np.uint8)
    return (
        torch.empty(count, dtype=torch.uint8).copy_(torch.from_numpy(content)).view(getattr(torch, dtype)).view(shape)
    )
