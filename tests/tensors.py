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


def numbers_of(tensor):
    """All numbers of a tensor in float64, flat: two for each complex element."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    tensor = tensor.reshape(-1)
    if tensor.is_floating_point():
        return tensor.double().numpy() if tensor.element_size() > 1 else tensor.float().double().numpy()
    return tensor.numpy().astype(np.float64)


def check_statistics(found, tensor):
    """What was recorded about a tensor is what float64 says: counts and extremes exactly, sums as they round."""
    numbers = numbers_of(tensor)
    finite = numbers[np.isfinite(numbers)]
    assert (found.count, found.nan, found.inf) == (numbers.size, np.isnan(numbers).sum(), np.isinf(numbers).sum())
    if not finite.size:
        assert (found.min, found.max, found.mean, found.rms, found.histogram) == (None, None, None, None, ())
        return
    assert (found.min, found.max) == (finite.min(), finite.max())
    largest = np.abs(finite).max() or 1.0
    shares = finite / largest
    rms = largest * math.sqrt(math.fsum(shares * shares) / finite.size)
    assert math.isclose(found.rms, rms, rel_tol=1e-5)
    assert abs(found.mean - largest * (math.fsum(shares) / finite.size)) <= 1e-5 * rms
    assert found.min <= found.mean <= found.max


def check_histogram(found, tensor):
    """Each finite number is in the one bin that has it, and bins are in order."""
    numbers = numbers_of(tensor)
    finite = numbers[np.isfinite(numbers)]
    low_ends = [low for low, _, _ in found.bins]
    assert low_ends == sorted(low_ends)
    assert sum(count for _, _, count in found.bins) == finite.size
    for low, high, count in found.bins:
        inside = (finite >= low) & (finite < high) if low >= 0 else (finite > low) & (finite <= high)
        assert count == (inside | ((finite == 0) & (low == high == 0))).sum()
