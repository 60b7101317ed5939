"""A state with everything in it that other libraries can save, and how to compare it."""

import torch


def zeroed(state):
    """The same state with every tensor empty and every value gone."""
    if isinstance(state, dict):
        return {k: zeroed(v) for k, v in state.items()}
    if isinstance(state, (list, tuple)) and any(isinstance(v, (torch.Tensor, dict, list)) for v in state):
        return type(state)(zeroed(v) for v in state)
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def same(one, other):
    if isinstance(one, torch.Tensor):
        if one.is_floating_point() or one.is_complex():
            bits = [t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
            return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        return list(map(str, one)) == list(map(str, other)) and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def rich_state():
    model = torch.nn.Linear(5, 7)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5)).sum().backward()
    optimizer.step()
    return {
        "model": dict(model.state_dict()),
        "optim": optimizer.state_dict(),
        "step": 12,
        "big": 2**70,
        "text": "ünï",
        "nothing": None,
        "bytes": b"\0\1",
        "numbers": [1, 2.5, {"a": (True, None)}],
        "tuple": (torch.arange(3), 2, [torch.ones(2)]),
        "list": [torch.ones(2), {"a": torch.zeros(1)}],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "turned": torch.arange(12).view(3, 4).t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "sliced": torch.arange(100.0).view(10, 10)[2:7, 3:5],
        "expanded": torch.tensor([1.0, 2.0]).view(2, 1).expand(2, 3),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
    }
