"""Tensors that are made of other tensors come back exactly, with their class, or are refused with a way out."""

import warnings

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

import milepost
from tests.ranks import spawn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def jagged(*rows, **options):
    return torch.nested.nested_tensor([torch.arange(2.0 * n).view(n, 2) for n in rows], layout=torch.jagged, **options)


def coo(rows, values, coalesced=True):
    made = torch.sparse_coo_tensor(torch.tensor([rows, rows]), torch.tensor(values), (4, 4), check_invariants=True)
    return made.coalesce() if coalesced else made


def quantized(channels=False, dtype=torch.qint8):
    data = torch.linspace(-3, 3, 12).view(4, 3)
    if not channels:
        return torch.quantize_per_tensor(data, 0.1, 3, dtype)
    return torch.quantize_per_channel(data, torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0, 1, 2, 3]), 0, dtype)


MAKERS = {
    "coo": lambda n: coo([0, 2, 3][:n], [1.0, 2.0, 3.0][:n]),
    "coo, not coalesced": lambda n: coo([2, 2, 0][:n], [1.0, 2.0, 3.0][:n], coalesced=False),
    "hybrid coo": lambda n: torch.sparse_coo_tensor(torch.tensor([[1, 3][:n]]), torch.ones(n, 5), (4, 5)).coalesce(),
    "csr": lambda n: coo([0, 2, 3][:n], [1.0, 2.0, 3.0][:n]).to_sparse_csr(),
    "csc": lambda n: coo([0, 2, 3][:n], [1.0, 2.0, 3.0][:n]).to_sparse_csc(),
    "bsr": lambda n: coo([0, 2, 3][:n], [1.0, 2.0, 3.0][:n]).to_dense().to_sparse_bsr((2, 2)),
    "bsc": lambda n: coo([0, 2, 3][:n], [1.0, 2.0, 3.0][:n]).to_dense().to_sparse_bsc((2, 2)),
    "per tensor": lambda n: quantized(dtype=[torch.qint8, torch.quint8][0]) if n == 2 else quantized().clone(),
    "per channel": lambda _: quantized(channels=True),
    "quint8": lambda _: quantized(dtype=torch.quint8),
    "jagged": lambda n: jagged(*[3, 1, 2][:n]),
    "two": lambda n: TwoTensor(torch.full((3,), float(n)), torch.arange(3.0)),
    "two of two": lambda n: TwoTensor(TwoTensor(torch.full((3,), float(n)), torch.ones(3)), torch.arange(3.0)),
    "two of sparse": lambda n: [TwoTensor(torch.full((2,), float(n)), torch.ones(2)), coo([1], [2.0])],
}


def same(a, b):
    """Whether two tensors are of one class and kind, part by part."""
    if isinstance(a, list):
        return all(map(same, a, b))
    if type(a) is not type(b) or a.dtype != b.dtype or a.layout != b.layout or a.is_quantized != b.is_quantized:
        return False
    if isinstance(a, TwoTensor):
        return same(a.a, b.a) and same(a.b, b.b)
    if a.is_nested:
        return torch.equal(a.values(), b.values()) and torch.equal(a.offsets(), b.offsets())
    if a.layout is torch.sparse_coo:
        return a.is_coalesced() == b.is_coalesced() and all(
            map(torch.equal, (a._indices(), a._values()), (b._indices(), b._values()))
        )
    if a.is_quantized:
        return a.qscheme() == b.qscheme() and torch.equal(a, b)
    return torch.equal(a.to_dense(), b.to_dense())


@pytest.mark.parametrize("kind", MAKERS)
def test_it_comes_back_with_its_class(tmp_path, kind):
    old, new = MAKERS[kind](3 if "hybrid" not in kind else 2), MAKERS[kind](1)
    milepost.save({"w": old, "deep": [(old, 1)], "own": milepost.PerRank([old])}, tmp_path)
    target = {"w": new, "deep": [(MAKERS[kind](1), 0)], "own": milepost.PerRank(None)}
    milepost.load(target, tmp_path, types=[TwoTensor])
    assert same(target["w"], old)
    assert same(target["deep"][0][0], old)
    assert same(target["own"].value[0], old)
    assert same(milepost.open(tmp_path, types=[TwoTensor]).state()["w"], old)
    pending = milepost.async_save({"w": old}, tmp_path / "later")
    pending.result()
    assert same(milepost.load({"w": MAKERS[kind](1)}, tmp_path / "later")["w"], old)


def test_without_its_class_a_subclass_is_its_parts(tmp_path):
    milepost.save({"w": TwoTensor(torch.ones(3), torch.zeros(3))}, tmp_path)
    parts = milepost.open(tmp_path).state()["w"]
    assert type(parts) is dict
    assert parts["class"].endswith("two_tensor.TwoTensor")
    assert parts["tensors"]["a"].tolist() == [1, 1, 1]
    assert list(milepost.open(tmp_path).tensors) == ["w.tensors.a", "w.tensors.b"]


class Holder:
    """An object that keeps tensors, and has none before it was loaded."""

    def __init__(self, kept):
        self.kept = kept

    def state_dict(self):
        return {"kept": self.kept}

    def load_state_dict(self, state):
        self.kept = state["kept"]


def test_an_object_without_the_class_gets_it_from_types(tmp_path):
    state = {"a": coo([1], [2.0]), "b": TwoTensor(torch.ones(3), torch.zeros(3))}
    milepost.save({"h": Holder(state)}, tmp_path)
    with pytest.raises(milepost.UnsupportedFormat, match=r"'h\.kept\.b' is a .*TwoTensor.*types=\[TwoTensor\]"):
        milepost.load({"h": Holder({})}, tmp_path)
    for target in (Holder({}), Holder({"b": TwoTensor(torch.zeros(3), torch.ones(3))})):
        milepost.load({"h": target}, tmp_path, types=[TwoTensor])
        assert same(target.kept["a"], state["a"])
        assert same(target.kept["b"], state["b"])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_and_buffers_of_a_module(tmp_path, device):
    def build(n):
        module = nn.Module()
        module.w = nn.Parameter(TwoTensor(torch.full((3,), float(n)), torch.arange(3.0) * n))
        module.register_buffer("mask", coo([0, 2, 3][:n], [1.0, 2.0, 3.0][:n]))
        module.plain = nn.Buffer(torch.full((2,), float(n)))
        return module

    old, new = build(3), build(1)
    if device == "meta":
        new.w = nn.Parameter(TwoTensor(torch.empty(3, device="meta"), torch.empty(3, device="meta")))
    kept = new.w
    milepost.save({"m": old}, tmp_path)
    milepost.load({"m": new}, tmp_path)
    assert type(new.w) is TwoTensor
    assert same(new.w.detach(), old.w.detach())
    assert isinstance(new.w, nn.Parameter)
    assert same(new.mask, old.mask)
    assert torch.equal(new.plain, old.plain)
    assert device == "meta" or new.w is kept


TARGETS = {
    "dense": (
        lambda: coo([1], [2.0]),
        lambda: torch.zeros(4, 4),
        "parts of a sparse_coo tensor and the target is a Tensor",
    ),
    "sparse": (lambda: torch.zeros(4, 4), lambda: coo([1], [2.0]), "saved as a tensor and the target is a sparse_coo"),
    "layout": (
        lambda: coo([1], [2.0]),
        lambda: coo([1], [2.0]).to_sparse_csr(),
        "sparse_coo and the target is a sparse_csr",
    ),
    "shape": (lambda: torch.eye(3).to_sparse(), lambda: torch.eye(4).to_sparse(), "saved with the shape"),
    "dtype": (
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).double().to_sparse(),
        "saved as float32 .* float64",
    ),
    "class": (
        lambda: TwoTensor(torch.ones(3), torch.ones(3)),
        lambda: jagged(1, 2),
        "subclass and the target is a jagged",
    ),
    "inner": (
        lambda: TwoTensor(torch.ones(3), torch.ones(3)),
        lambda: TwoTensor(torch.ones(4), torch.ones(4)),
        r"\(3,\).*\(4,\)",
    ),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_a_target_of_another_kind_is_refused(tmp_path, kind):
    saved, target, says = TARGETS[kind]
    milepost.save({"w": saved()}, tmp_path)
    with pytest.raises(milepost.StateMismatch, match=rf"(?s)'w.*{says}"):
        milepost.load({"w": target()}, tmp_path)


def test_values_of_a_sparse_tensor_are_converted_if_asked(tmp_path):
    milepost.save({"w": coo([1, 3], [2.0, 1.0])}, tmp_path)
    target = {"w": torch.eye(4).double().to_sparse()}
    milepost.load(target, tmp_path, convert_dtype=True)
    assert same(target["w"], coo([1, 3], [2.0, 1.0]).double())


def functional():
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(torch.ones(3))


def fake():
    with FakeTensorMode():
        return torch.ones(3)


REFUSED = {
    "fake": (fake, "no data to save"),
    "functional": (functional, "inside of torch.func"),
    "functional inside": (lambda: torch._to_functional_tensor(torch.ones(3)), "inside of torch.func"),
    "masked": (lambda: masked_tensor(torch.ones(2), torch.tensor([True, False])), "get_data"),
    "strided nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "jagged"),
    "lazy": (lambda: nn.UninitializedParameter(), "no shape yet"),
    "lazy buffer": (lambda: nn.UninitializedBuffer(), "no shape yet"),
    "bits": (lambda: torch.zeros(3, dtype=torch.uint8).view(torch.bits8), r"torch\.bits8.*view"),
    "small integers": (lambda: torch.zeros(3, dtype=torch.uint8).view(torch.uint4), r"torch\.uint4.*view"),
    "packed quantized": (
        lambda: torch.quantize_per_channel(torch.ones(2, 4), torch.ones(2), torch.zeros(2), 0, torch.quint4x2),
        "int_repr",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_come_back_is_refused_with_a_way_out(tmp_path, kind):
    make, says = REFUSED[kind]
    with pytest.raises(milepost.InvalidState, match=rf"(?s)'a\.bad'.*({says})"):
        milepost.save({"a": {"bad": make()}, "good": torch.ones(1)}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_under_vmap_nothing_is_saved(tmp_path):
    def step(x):
        with pytest.raises(milepost.InvalidState, match="'x'"):
            milepost.save({"x": x}, tmp_path)
        return x

    torch.vmap(step)(torch.ones(3))
    torch.func.grad(lambda x: step(x).sum())(torch.ones(3))


def test_zero_dimensions_and_sizes_come_back(tmp_path):
    state = {
        "none": torch.sparse_coo_tensor(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), (4, 4)),
        "empty": torch.zeros(0, 3).to_sparse_csr(),
        "scalar": TwoTensor(torch.tensor(1.0), torch.tensor(2.0)),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        milepost.save(state, tmp_path)
    found = milepost.open(tmp_path, types=[TwoTensor]).state()
    assert all(same(found[name], tensor) for name, tensor in state.items())


def forge(place, change):
    """Load and save again what a checkpoint holds, with other parts in it."""
    parts = {key: lazy.read() for key, lazy in milepost.open(place).tensors.items()}
    for key, tensor in change.items():
        with open(next(place.glob("data/*/*.safetensors")), "r+b") as file:
            data = file.read()
            at = data.index(parts[key].numpy().tobytes(), 4096)
            file.seek(at)
            file.write(tensor.numpy().tobytes())


FORGED = {
    "coo": (lambda: coo([1, 3], [5.5, 6.5]), {"w.indices": torch.tensor([[1, 9**9], [1, 3]])}, "sparse_coo"),
    "order": (lambda: coo([1, 3], [5.5, 6.5]), {"w.indices": torch.tensor([[3, 1], [1, 3]])}, "not sorted"),
    "csr": (
        lambda: coo([1, 3], [5.5, 6.5]).to_sparse_csr(),
        {"w.col_indices": torch.tensor([1, 9**9])},
        "sparse_csr",
    ),
    "jagged": (lambda: jagged(3, 1), {"w.offsets": torch.tensor([0, 9**9, 4])}, "jagged"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_parts_that_contradict_each_other_are_refused(tmp_path, kind):
    make, change, says = FORGED[kind]
    milepost.save({"w": make()}, tmp_path)
    forge(tmp_path, change)
    with pytest.raises(milepost.CheckpointDamaged, match=says):
        milepost.load({"w": make()}, tmp_path, verify=False)


@pytest.mark.slow
def test_torchao_comes_back_with_its_classes(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    optim = pytest.importorskip("torchao.optim")
    subclasses = pytest.importorskip("torchao.optim.subclass_8bit")

    def model(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(256, 64, bias=False), nn.Linear(64, 128))

    def quantized_model(seed):
        made = model(seed)
        quantization.quantize_(made, quantization.Int8WeightOnlyConfig())
        return made

    old = quantized_model(1)
    optimizer = optim.AdamW8bit(model(3).parameters())
    for p in optimizer.param_groups[0]["params"]:  # not by a step, which would compile for a minute
        kept = subclasses.OptimState8bit.zeros(p.shape, True, 64)
        kept.codes.random_(0, 256)
        kept.scale.uniform_()
        optimizer.state[p] = {"step": torch.tensor(1.0), "exp_avg": kept}
    milepost.save({"m": old, "o": optimizer}, tmp_path)
    new, fresh = quantized_model(2), optim.AdamW8bit(model(3).parameters())
    with pytest.raises(milepost.UnsupportedFormat, match=r"types=\[OptimState8bit\]"):
        milepost.load({"m": new, "o": fresh}, tmp_path)
    milepost.load({"m": new, "o": fresh}, tmp_path, types=[subclasses.OptimState8bit])
    x = torch.randn(4, 256)
    assert type(new[0].weight) is type(old[0].weight)
    assert torch.equal(old(x), new(x))
    for number, kept in optimizer.state_dict()["state"].items():
        got = fresh.state_dict()["state"][number]["exp_avg"]
        assert type(got) is subclasses.OptimState8bit
        assert torch.equal(kept["exp_avg"].dequantize(), got.dequantize())
    plain = model(4)
    with pytest.raises(milepost.StateMismatch, match=r"'m\.0\.weight'.*subclass"):
        milepost.load({"m": plain}, tmp_path, allow_unexpected=True)


class PackedRows(torch.Tensor):
    """Half as many rows as it shows: nobody can tell from its shape how they are cut."""

    @staticmethod
    def __new__(cls, rows):
        shape = (2 * rows.shape[0], *rows.shape[1:])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=rows.dtype, device=rows.device)

    def __init__(self, rows):
        self.rows = rows

    def __tensor_flatten__(self):
        return ["rows"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, context, size, stride):
        return cls(tensors["rows"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.view.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return PackedRows(args[0].rows)
        raise NotImplementedError(func)


def sharded_parts(rank, folder):
    mesh = init_device_mesh("cpu", (2,))

    def cut(start):
        return distribute_tensor(torch.arange(start, start + 8.0), mesh, [Shard(0)])

    def shards(number):
        """A DTensor whose local parts are made of others."""
        return DTensor.from_local(TwoTensor(torch.full((2,), number), torch.full((2,), 7.0)), mesh, [Shard(0)])

    whole = shards(-1.0)
    milepost.save({"w": shards(float(rank))}, f"{folder}/shards")
    milepost.load({"w": whole}, f"{folder}/shards")
    assert whole.to_local().a.tolist() == [float(rank)] * 2
    assert whole.to_local().b.tolist() == [7.0] * 2
    across = DTensor.from_local(PackedRows(torch.full((3, 2), float(rank))), mesh, [Shard(0)])
    try:
        milepost.save({"w": across}, f"{folder}/refused")
        said = "saved"
    except milepost.InvalidState as error:
        said = str(error)
    old, new = TwoTensor(cut(0), cut(10)), TwoTensor(cut(50), cut(60))
    milepost.save({"w": old}, f"{folder}/parts")
    milepost.load({"w": new}, f"{folder}/parts")
    assert isinstance(new.a, DTensor)
    assert new.a.placements == (Shard(0),)
    return said, new.a.full_tensor().tolist(), new.b.to_local().tolist()


@pytest.mark.slow
def test_sharded_parts_and_shards_of_parts_come_back(tmp_path):
    for rank, (said, first, second) in enumerate(spawn(2, sharded_parts, str(tmp_path))):
        assert "'w'" in said
        assert "how that is cut does not follow" in said
        assert first == list(range(8))
        assert second == [10 + 4 * rank + i for i in range(4)]


def test_torchao_on_meta_stays_the_same_objects_and_tied(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")

    def build():
        torch.manual_seed(5)
        made = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
        quantization.quantize_(made, quantization.Int8WeightOnlyConfig(), filter_fn=lambda _, name: name == "0")
        made[1].weight = made[0].weight
        return made

    old, new = build(), build().to("meta")
    assert new[1].weight is new[0].weight
    parameters = list(new.parameters())
    milepost.async_save({"m": old}, tmp_path).result()
    milepost.load({"m": new}, tmp_path)
    assert all(a is b for a, b in zip(new.parameters(), parameters, strict=True))
    assert new[1].weight is new[0].weight
    assert torch.equal(old(torch.ones(1, 32)), new(torch.ones(1, 32)))
