"""States for conversions, and how each format's own reader gives them back."""

import json
import zipfile
from collections import OrderedDict

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

import milepost
from milepost.core.dtypes import DTYPES

REFUSED = ("complex32", "complex128")
HELD = [name for name in DTYPES if hasattr(torch, name) and name not in REFUSED]
FORMATS = ["milepost", "dcp", "torch", "safetensors"]


def files_in(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def read_back(place, to):
    """The flat tensors of a target, by the format's own reader."""
    if to == "milepost":
        checkpoint = milepost.open(place)
        assert checkpoint.verify().ok
        return {key: lazy.read() for key, lazy in checkpoint.tensors.items()}
    if to == "torch":
        with zipfile.ZipFile(place) as archive:
            assert archive.testzip() is None
        return torch.load(place, weights_only=True)
    if to == "safetensors":
        return read_folder(place)
    metadata = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
    target = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in metadata.items()}
    dcp.load(target, checkpoint_id=place, no_dist=True)
    return target


def flat_state(count=40):
    torch.manual_seed(2)
    state = {f"w{i:02}": torch.randn(i * 700 + 3, 11) for i in range(count)}
    return state | {"scalar": torch.tensor(4), "empty": torch.empty(0, 2), "large": torch.randn(1_500_001)}


def random_bits(dtype, *shape):
    size = DTYPES[dtype].size_bytes
    data = torch.randint(0, 2 if dtype == "bool" else 256, (*shape, size), dtype=torch.uint8)
    return data.view(getattr(torch, dtype)).reshape(shape)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def same(a, b, path="state"):
    assert type(a) is type(b), f"{path}: {type(a)}, {type(b)}"
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert torch.equal(bits(a), bits(b)), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}.{i}")
    else:
        assert a == b, path


def training_state():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.ReLU(), torch.nn.Linear(50, 7))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    model(torch.randn(4, 30)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "more": [torch.arange(5), {"x": torch.tensor(2.5), 3: None}, (torch.ones(2, dtype=torch.bool), "text")],
        "empty": torch.empty(0, 3),
        "ordered": OrderedDict(b=1, a=torch.zeros(2, 0, 4)),
        "nothing": {},
        "step": 7,
        "lr": [0.1, float("inf")],
        "raw": b"\x00\xff" * 10,
    }


def read_folder(folder):
    """Everything, by way of the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        with safe_open(folder / "model.safetensors", "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no dict
    found = {}
    record = json.loads(index.read_text())
    for key, name in record["weight_map"].items():
        with safe_open(folder / name, "pt") as file:
            found[key] = file.get_tensor(key)
    assert record["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())
    return found
