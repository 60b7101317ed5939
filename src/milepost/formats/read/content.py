"""The content of a `torch.save` archive: its containers and values, with descriptions in place of tensors.

Unknown names do no harm: the objects that they would make stay opaque, and reading their keys raises an error.
"""

import re
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from milepost.core.box import Shape, check_shape, strides_of
from milepost.core.dtypes import DTYPES
from milepost.core.limits import MAX_DIMS
from milepost.core.tree import FACTORIES
from milepost.errors import CheckpointDamaged, UnsafeCheckpoint
from milepost.formats.read.archive import Archive
from milepost.formats.read.pickle_machine import BadPickle, Maker, NamedObject, Opaque
from milepost.formats.read.pickles import load

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "BFloat16Storage": "bfloat16",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
}
"""The element type of each class of storage that torch.save names."""
_BUILTINS = ("builtins", "__builtin__")
_ALIKE_BYTES = 1024
_SCALAR = re.compile(r"[<|]?[biufc][0-9]{1,2}")


class DtypeName(str):
    """The name of a torch dtype."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """A storage of an archive: the name of its record, its element type and how many elements it has."""

    key: str
    dtype: str
    elements: int


@dataclass(frozen=True, slots=True, eq=False)
class Strided:
    """A tensor of an archive: which elements of which storage it holds. `conj` and `neg` are yet to be applied."""

    storage: StorageRecord
    dtype: str
    offset: int
    shape: Shape
    strides: Shape
    conj: bool = False
    neg: bool = False

    @property
    def span(self) -> int:
        """How many elements lie between its first and last, both counted."""
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1


def read_content(archive: Archive, what: str) -> Any:
    """The object that was saved. Raises CheckpointDamaged, naming `what`."""
    return _loaded(_read_pickle(archive, what), what)


def read_tensor(archive: Archive, what: str) -> Strided:
    """The tensor that was saved alone. Raises CheckpointDamaged, naming `what`, for anything else."""
    data = _read_pickle(archive, what)
    found = _loaded(data, what, _small_pickle if len(data) <= _ALIKE_BYTES else _any_pickle)
    if not isinstance(found, Strided):
        raise CheckpointDamaged(f"{what} holds a {type(found).__name__}, not a tensor")
    return found


def _read_pickle(archive: Archive, what: str) -> bytes:
    name = f"{archive.prefix}data.pkl"
    data, crc = archive.read(name), archive.records[name].crc
    if crc and zlib.crc32(data) != crc:
        raise CheckpointDamaged(f"{what}: its pickle is not what was saved; the CRC-32 differs")
    return data


def _any_pickle(data: bytes) -> Any:
    return load(data, _find, _storage)


@lru_cache(maxsize=1024)
def _small_pickle(data: bytes) -> Strided | None:
    """The tensor that a pickle describes, if it is one. Tensors of one shape and type have the same pickle."""
    found = _any_pickle(data)
    return found if isinstance(found, Strided) else None


def _loaded(data: bytes, what: str, read: Callable[[bytes], Any] = _any_pickle) -> Any:
    """What a pickle holds. Errors name `what`."""
    try:
        return read(data)
    except (BadPickle, RecursionError) as error:
        raise CheckpointDamaged(f"{what}: {error}") from None
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(f"{what}: {error}") from None


def _storage(reference: Any) -> StorageRecord:
    kind, storage, key, _, elements = reference
    if kind != "storage" or not isinstance(storage, Maker) or storage.name not in STORAGES:
        raise BadPickle("a tensor has an unknown kind of storage")
    if type(key) is not str or type(elements) is not int or not 0 <= elements < 2**60:
        raise BadPickle("a tensor's storage is not described as torch does")
    return StorageRecord(key, STORAGES[storage.name], elements)


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any = None, _hooks: Any = None, notes: Any = None
) -> Strided:
    return _make(storage, storage.dtype, offset, shape, strides, notes)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, notes: Any = None
) -> Strided:
    if not isinstance(dtype, DtypeName):
        raise BadPickle("a tensor has no dtype")
    return _make(storage, str(dtype), offset, shape, strides, notes)


def _make(storage: Any, dtype: str, offset: Any, shape: Any, strides: Any, notes: Any) -> Strided:
    notes = notes or {}
    if any(not isinstance(sizes, (tuple, list)) or len(sizes) > MAX_DIMS for sizes in (shape, strides)):
        raise BadPickle("a tensor has no possible shape")
    shape, strides = tuple(shape), tuple(strides)
    if not isinstance(storage, StorageRecord) or not isinstance(notes, dict) or set(notes) - {"conj", "neg"}:
        raise BadPickle("a tensor is not described as torch does")
    if len(shape) != len(strides) or any(type(n) is not int or n < 0 for n in (offset, *shape, *strides)):
        raise BadPickle("a tensor has no possible shape")
    check_shape(shape)
    made = Strided(storage, dtype, offset, shape, strides, bool(notes.get("conj")), bool(notes.get("neg")))
    room = storage.elements * DTYPES[storage.dtype].size_bytes // DTYPES[dtype].size_bytes
    if 0 not in shape and offset + made.span > room:
        raise BadPickle("a tensor reaches beyond its storage")
    return made


def _inner(tensor: Any, *_: Any) -> Any:
    """A parameter is its tensor."""
    if not isinstance(tensor, (Strided, Opaque)):
        raise BadPickle("a parameter is no tensor")
    return tensor


def _from_type(make: Any, kind: Any, args: Any, _: Any = None) -> Any:
    """A tensor without its extra attributes, which are dropped; a subclass of Tensor stays opaque."""
    rebuilds = isinstance(make, Maker) and make.make in (_tensor, _tensor_v3, _inner)
    if rebuilds and isinstance(kind, Maker) and kind.name in ("Tensor", "Parameter"):
        return make.make(*args)
    return Opaque("a subclass of torch.Tensor")


def _encoded(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes are spelled in latin1")
    return text.encode("latin1")


def _byte_array(content: Any = b"", encoding: str = "latin1") -> bytearray:
    return bytearray(_encoded(content, encoding) if isinstance(content, str) else _is(bytes, content))


def _is(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a {kind} was expected")
    return value


def _ordered(items: Any = ()) -> OrderedDict[Any, Any]:
    if items:  # Python 3 sets them afterwards, as those of any dict
        raise BadPickle("an OrderedDict has its items as an argument")
    return OrderedDict()


def _counter(counts: Any) -> Counter[Any]:
    return Counter(_is(dict, counts))


def _set_of(kind: Any) -> Any:
    return lambda items=(): kind(_is((list, tuple), items))


def _default(factory: Any = None) -> Any:
    name = factory.name if isinstance(factory, Maker) else "None" if factory is None else ""
    return defaultdict(FACTORIES[name]) if name in FACTORIES else Opaque("a defaultdict with a factory of its own")


def _scalar(dtype: Any, data: Any) -> Any:
    """A numpy scalar."""
    kind = np.dtype(_is(NamedObject, dtype).args[0])
    return np.frombuffer(_is(bytes, data), dtype=kind, count=1)[0]


def _numpy_dtype(name: Any, *_: Any) -> Any:
    return NamedObject("dtype", (name,)) if isinstance(name, str) and _SCALAR.fullmatch(name) else Opaque("numpy.dtype")


def _size(items: Any) -> Any:
    import torch  # noqa: PLC0415

    return torch.Size([_is(int, n) for n in _is((tuple, list), items)])


def _device(kind: Any, index: Any = None) -> Any:
    import torch  # noqa: PLC0415

    try:
        return torch.device(_is(str, kind)) if index is None else torch.device(_is(str, kind), _is(int, index))
    except RuntimeError:
        return Opaque("torch.device")


def _opaque(*_: Any) -> Opaque:
    """For types that a pickle names, but makes in no way that is read here."""
    return Opaque("an object")


@cache
def _table() -> dict[tuple[str, str], Any]:
    """What the names in a pickle of torch.save may stand for."""
    makers: dict[tuple[str, str], Any] = {
        ("torch._utils", "_rebuild_tensor"): _tensor,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
        ("torch._utils", "_rebuild_parameter"): _inner,
        ("torch._utils", "_rebuild_parameter_with_state"): _inner,
        ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
        ("torch", "Tensor"): _opaque,
        ("torch.nn.parameter", "Parameter"): _opaque,
        ("torch", "Size"): _size,
        ("torch", "device"): _device,
        ("collections", "OrderedDict"): _ordered,
        ("collections", "defaultdict"): _default,
        ("collections", "Counter"): _counter,
        ("_codecs", "encode"): _encoded,
        ("numpy", "dtype"): _numpy_dtype,
        ("numpy.core.multiarray", "scalar"): _scalar,
        ("numpy._core.multiarray", "scalar"): _scalar,
    }
    for module in _BUILTINS:
        makers |= {(module, "complex"): lambda a, b: complex(_is(float, a), _is(float, b))}
        makers |= {(module, "bytes"): lambda: b"", (module, "bytearray"): _byte_array}
        makers |= {(module, name): _opaque for name in ("dict", "list", "int", "float", "str", "tuple", "bool")}
    for name in STORAGES:
        makers |= {(module, name): _opaque for module in ("torch", "torch.storage")}
    table = {key: Maker(key[1], function) for key, function in makers.items()}
    for module in _BUILTINS:
        for kind in (set, frozenset):
            table[module, kind.__name__] = Maker(kind.__name__, _set_of(kind), hashes=True)
    return table


def _find(module: str, name: str) -> Any:
    found = _table().get((module, name))
    if found is not None:
        return found
    if module == "torch" and name in DTYPES:
        return DtypeName(name)
    return Opaque(f"{module}.{name}"[:200])


def located(archive: Archive, tensor: Strided, what: str) -> tuple[int, int]:
    """Where the storage of a tensor starts, and its CRC-32. Raises CheckpointDamaged where its size is wrong."""
    start, record = archive.place(f"{archive.prefix}data/{tensor.storage.key}")
    if record.size_bytes != tensor.storage.elements * DTYPES[tensor.storage.dtype].size_bytes:
        raise CheckpointDamaged(f"{what}: its storage {tensor.storage.key[:40]!r} has the wrong size")
    return start, record.crc


def order_of(tensor: Strided) -> Shape | None:
    """The dimensions from the outermost to the innermost, if the tensor lies in one run without gaps; else None."""
    if tensor.conj or tensor.neg:
        return None
    rows = strides_of(tensor.shape)
    if all(n == 1 or s == row for n, s, row in zip(tensor.shape, tensor.strides, rows, strict=True)):
        return tuple(range(len(tensor.shape)))
    order = sorted(range(len(tensor.shape)), key=lambda d: (tensor.shape[d] != 1, -tensor.strides[d]))
    expected = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and tensor.strides[dim] != expected:
            return None
        expected *= tensor.shape[dim]
    return tuple(order)
