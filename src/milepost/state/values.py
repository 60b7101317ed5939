"""The closed codec for values: everything in a state that is not a tensor, as plain JSON, and back.

None, bool, int, str and finite floats are plain JSON. Everything else is an object with one field that names its type:
`{"tuple": [...]}`, `{"bytes": "base64"}`. Decoding never runs code: a name that the codec does not know is an error,
enums and dataclasses are built only from classes that the caller passed, and pickle needs an opt-in on both sides.
"""

import base64
import dataclasses
import enum
import io
import math
import pickle
import re
import reprlib
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from milepost.core.dtypes import DTYPES
from milepost.core.hash_flood import differing
from milepost.core.limits import MAX_DEPTH
from milepost.core.option_values import check_values, items_of
from milepost.core.tree import FACTORIES, factory_name, is_namedtuple, make_namedtuple
from milepost.errors import InvalidRequest, InvalidState, UnsupportedFormat

_JSON_INT = 2**53
_HEX = re.compile(r"-?0x[1-9a-f][0-9a-f]*")
_KEY_LETTERS = 200
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Codec:
    """Encodes values as JSON data, and decodes them.

    `types` are the enums, dataclasses and subclasses of Tensor that may occur. `allow_pickle` encodes and decodes all
    other types by pickle.
    Raises InvalidRequest for other classes in `types`, and for two of the same name.
    """

    def __init__(self, types: Iterable[type] = (), allow_pickle: bool = False) -> None:
        self._types: dict[str, type] = {}
        check_values({"allow_pickle": allow_pickle})
        self.allow_pickle = allow_pickle
        for kind in items_of("types", types):
            if not (isinstance(kind, type) and _is_known(kind)):
                raise InvalidRequest(f"`types` takes enum and dataclass types and subclasses of Tensor, not {kind!r}")
            if self._types.setdefault(kind.__qualname__, kind) is not kind:
                raise InvalidRequest(f"`types` holds two classes called {kind.__qualname__!r}")

    def encode(self, value: Any, key: str) -> Any:
        """The value as plain JSON data. Raises InvalidState, naming key and type, for what the codec does not know."""
        return self.encode_at(value, key, 0)

    def encode_at(self, value: Any, key: str, depth: int) -> Any:
        """Encode a value that stands `depth` levels inside another."""
        if depth > MAX_DEPTH:
            raise InvalidState(f"{key!r} is nested more than {MAX_DEPTH} levels deep; does it contain itself?")
        if value is None or isinstance(value, bool):
            return value
        encode = _ENCODERS.get(type(value))
        if encode is not None:
            return encode(self, value, key, depth)
        if is_namedtuple(value):
            items = [[f, self.encode_at(v, key, depth + 1)] for f, v in zip(value._fields, value, strict=True)]
            return {"namedtuple": [type(value).__name__, items]}
        return self._encode_other(value, key, depth)

    def _encode_other(self, value: Any, key: str, depth: int) -> Any:
        kind = type(value)
        if self._types.get(kind.__qualname__) is kind and not _is_tensor_class(kind):
            if isinstance(value, enum.Flag):
                return {"flag": [kind.__qualname__, value.value]}  # a combination of flags has no name
            if isinstance(value, enum.Enum):
                return {"enum": [kind.__qualname__, value.name]}
            fields = [
                [f.name, self.encode_at(getattr(value, f.name), f"{key}.{f.name}", depth + 1)]
                for f in dataclasses.fields(value)
            ]
            return {"dataclass": [kind.__qualname__, fields]}
        import numpy as np  # noqa: PLC0415  # here and below: to read plain values must not wait for it

        if isinstance(value, np.generic) and value.dtype.name in DTYPES and value.dtype.isbuiltin == 1:
            return {"numpy": [value.dtype.name, _text(value.tobytes())]}
        encoded = _encode_torch(value)
        if encoded is not None:
            return encoded
        if self.allow_pickle:
            try:
                return {"pickle": _text(pickle.dumps(value))}
            except Exception as error:
                raise InvalidState(f"{key!r} is a {kind.__qualname__} that cannot be pickled: {error}") from error
        raise InvalidState(_refusal(value, key))

    def decode(self, data: Any, key: str) -> Any:
        """The value of JSON data. Raises UnsupportedFormat if it needs an opt-in, ValueError if it is not a value."""
        return self.decode_at(data, key[:_KEY_LETTERS], 0)

    def decode_at(self, data: Any, key: str, depth: int) -> Any:
        """Decode a value that stands `depth` levels inside another."""
        if depth > MAX_DEPTH:
            raise ValueError(f"{key!r} is nested more than {MAX_DEPTH} levels deep")
        if data is None or isinstance(data, (bool, int, float, str)):
            return data
        if isinstance(data, dict) and len(data) == 1:
            ((kind, content),) = data.items()
            decode = _DECODERS.get(kind)
            if decode is not None:
                try:
                    return decode(self, content, key, depth)
                except (TypeError, IndexError, AttributeError, KeyError, OverflowError) as error:
                    raise ValueError(f"{key!r} holds a damaged {kind}: {str(error)[:200]}") from error
        raise ValueError(f"{key!r} holds something that is not a value: {reprlib.repr(data)}")

    def _decode_class(self, content: Any, key: str, base: str) -> tuple[Any, Any]:
        name, rest = content
        kind = self._types.get(name)
        if kind is None:
            shown = str(name)[:200]
            raise UnsupportedFormat(f"{key!r} is the {base} {shown!r}; pass the class: types=[{shown}]")
        if (base == "enum") != issubclass(kind, enum.Enum) or _is_tensor_class(kind):
            raise ValueError(f"{key!r} was saved as the {base} {name!r}, which is another kind of class now")
        return kind, rest

    def tensor_class(self, name: str) -> Any:
        """The subclass of Tensor of this full name that the caller passed, or None."""
        found = (kind for kind in self._types.values() if _is_tensor_class(kind))
        return next((kind for kind in found if f"{kind.__module__}.{kind.__qualname__}" == name), None)

    def decode_enum(self, content: Any, key: str) -> Any:
        """A member of an enum that the caller passed."""
        kind, member = self._decode_class(content, key, "enum")
        return kind[member]

    def decode_flag(self, content: Any, key: str) -> Any:
        """Flags of an enum that the caller passed."""
        kind, number = self._decode_class(content, key, "enum")
        return kind(_int(number))

    def decode_dataclass(self, content: Any, key: str, depth: int) -> Any:
        """An instance of a dataclass that the caller passed; its fields are set without running its `__init__`."""
        kind, fields = self._decode_class(content, key, "dataclass")
        known = {f.name for f in dataclasses.fields(kind)}
        names = [name for name, _ in fields]
        if len(names) != len(known) or set(names) != known:
            shown = reprlib.repr(names)
            raise ValueError(f"{key!r} was saved with the fields {shown}, and {kind.__qualname__} has {sorted(known)}")
        result = object.__new__(kind)
        for name, field in fields:
            object.__setattr__(result, name, self.decode_at(field, _inside(key, name), depth + 1))
        return result

    def decode_pickle(self, content: Any, key: str) -> Any:
        """An unpickled object, if the caller allowed it."""
        if not self.allow_pickle:
            raise UnsupportedFormat(
                f"{key!r} was saved with pickle, which can run any code when it is read. "
                "Pass allow_pickle=True if you trust the author of the checkpoint."
            )
        try:
            return pickle.loads(_bytes(content))
        except Exception as error:
            raise ValueError(f"{key!r} cannot be unpickled: {error}") from error


def _is_known(kind: type) -> bool:
    return issubclass(kind, enum.Enum) or dataclasses.is_dataclass(kind) or _is_tensor_class(kind)


def _is_tensor_class(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _int(number: Any) -> int:
    # Not `int(number)`: it also takes text, with digits of every script, underscores and spaces.
    if type(number) is not int:
        raise TypeError("a whole number was expected")
    return number


def _decode_hex(text: Any) -> int:
    if not _HEX.fullmatch(text):
        raise TypeError("a number as `hex` writes it was expected")
    return int(text, 16)


def _encode_float(value: float) -> Any:
    return value if math.isfinite(value) else {"float": repr(value)}


def _encode_pairs(codec: Codec, value: dict[Any, Any], key: str, depth: int) -> list[list[Any]]:
    pairs = []
    for k, v in value.items():
        name = _inside(key, k)
        pairs.append([codec.encode_at(k, name, depth + 1), codec.encode_at(v, name, depth + 1)])
    return pairs


def _encode_defaultdict(codec: Codec, value: defaultdict[Any, Any], key: str, depth: int) -> Any:
    factory = factory_name(value)
    if factory is None:
        raise InvalidState(
            f"{key!r} is a defaultdict whose factory is {reprlib.repr(value.default_factory)}, which is code. Use one "
            f"of {', '.join(FACTORIES)} as the factory, or a dict."
        )
    return {"defaultdict": [factory, _encode_pairs(codec, value, key, depth)]}


def _encode_items(name: str) -> Callable[[Codec, Any, str, int], Any]:
    def encode(codec: Codec, value: Any, key: str, depth: int) -> Any:
        return {name: [codec.encode_at(item, f"{key}.{i}", depth + 1) for i, item in enumerate(value)]}

    return encode


def _encode_set(name: str) -> Callable[[Codec, Any, str, int], Any]:
    def encode(codec: Codec, value: Any, key: str, depth: int) -> Any:
        # Sets have no order. They are sorted, so that equal sets have equal text on all ranks.
        return {name: sorted((codec.encode_at(item, key, depth + 1) for item in value), key=repr)}

    return encode


def _encode_torch(value: Any) -> Any:
    """The encoding of torch's small types, or None. Torch is not imported: without it no such value can exist."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(value, torch.dtype) and str(value).removeprefix("torch.") in DTYPES:
        return {"torch.dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Size):
        return {"torch.Size": list(value)}
    if isinstance(value, torch.device):
        return {"torch.device": str(value)}
    return None


_ENCODERS: dict[type, Callable[[Codec, Any, str, int], Any]] = {
    int: lambda c, v, k, d: v if abs(v) <= _JSON_INT else {"int": hex(v)},
    float: lambda c, v, k, d: _encode_float(v),
    str: lambda c, v, k, d: v if v.isascii() or _is_unicode(v) else {"str": _text(v.encode("utf-8", "surrogatepass"))},
    complex: lambda c, v, k, d: {"complex": [_encode_float(v.real), _encode_float(v.imag)]},
    bytes: lambda c, v, k, d: {"bytes": _text(v)},
    bytearray: lambda c, v, k, d: {"bytearray": _text(bytes(v))},
    io.BytesIO: lambda c, v, k, d: {"BytesIO": _text(v.getvalue())},
    list: _encode_items("list"),
    tuple: _encode_items("tuple"),
    set: _encode_set("set"),
    frozenset: _encode_set("frozenset"),
    dict: lambda c, v, k, d: {"dict": _encode_pairs(c, v, k, d)},
    OrderedDict: lambda c, v, k, d: {"OrderedDict": _encode_pairs(c, v, k, d)},
    Counter: lambda c, v, k, d: {"Counter": _encode_pairs(c, v, k, d)},
    defaultdict: _encode_defaultdict,
}


def _is_unicode(text: str) -> bool:
    """False for lone surrogates, which JSON cannot carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _inside(key: str, part: object) -> str:
    """The key of a part, for messages. Its length is bounded: a forger can put a million parts under a long key."""
    return f"{key}.{str(part)[:_KEY_LETTERS]}" if len(key) < _KEY_LETTERS else key


def _items(codec: Codec, content: list[Any], key: str, depth: int) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError("a list was expected")
    return [codec.decode_at(item, _inside(key, i), depth + 1) for i, item in enumerate(content)]


def _decode_dict(codec: Codec, content: Any, key: str, depth: int) -> dict[Any, Any]:
    names = differing(codec.decode_at(name, key, depth + 1) for name, _ in content)
    result = {}
    for i, (name, (encoded, value)) in enumerate(zip(names, content, strict=True)):
        part = encoded if isinstance(encoded, str) else i
        result[name] = codec.decode_at(value, _inside(key, part), depth + 1)
    return result


def _decode_defaultdict(codec: Codec, content: Any, key: str, depth: int) -> defaultdict[Any, Any]:
    factory, pairs = content
    return defaultdict(FACTORIES[factory], _decode_dict(codec, pairs, key, depth))


def _decode_float(data: Any) -> Any:
    return _FLOATS[data["float"]] if isinstance(data, dict) else data


def _decode_numpy(content: Any) -> Any:
    name, data = content
    if name not in DTYPES:
        raise ValueError(f"unknown numpy type {name!r}")
    import numpy as np  # noqa: PLC0415

    return np.frombuffer(_bytes(data), dtype=np.dtype(name), count=1)[0]


def _decode_namedtuple(codec: Codec, content: Any, key: str, depth: int) -> Any:
    name, fields = content
    values = [codec.decode_at(value, _inside(key, i), depth + 1) for i, (_, value) in enumerate(fields)]
    return make_namedtuple(str(name), [str(field) for field, _ in fields])._make(values)


def _decode_torch(name: str, content: Any) -> Any:
    import torch  # noqa: PLC0415  # listing a checkpoint must not import torch

    if name == "dtype":
        found = getattr(torch, content) if content in DTYPES else None
        if not isinstance(found, torch.dtype):
            raise ValueError(f"torch has no dtype {content!r}")
        return found
    if name == "Size":
        return torch.Size([_int(n) for n in content])
    if not isinstance(content, str):  # torch takes a number for a device of this machine
        raise TypeError("a device's name was expected")
    try:
        return torch.device(content)
    except RuntimeError as error:
        raise ValueError(f"torch has no device {content[:40]!r}") from error


_DECODERS: dict[str, Callable[[Codec, Any, str, int], Any]] = {
    "int": lambda c, v, k, d: _decode_hex(v),
    "float": lambda c, v, k, d: _FLOATS[v],
    "str": lambda c, v, k, d: _bytes(v).decode("utf-8", "surrogatepass"),
    "complex": lambda c, v, k, d: complex(_decode_float(v[0]), _decode_float(v[1])),
    "bytes": lambda c, v, k, d: _bytes(v),
    "bytearray": lambda c, v, k, d: bytearray(_bytes(v)),
    "BytesIO": lambda c, v, k, d: io.BytesIO(_bytes(v)),
    "list": _items,
    "tuple": lambda c, v, k, d: tuple(_items(c, v, k, d)),
    "set": lambda c, v, k, d: set(differing(_items(c, v, k, d))),
    "frozenset": lambda c, v, k, d: frozenset(differing(_items(c, v, k, d))),
    "dict": _decode_dict,
    "OrderedDict": lambda c, v, k, d: OrderedDict(_decode_dict(c, v, k, d)),
    "Counter": lambda c, v, k, d: Counter(_decode_dict(c, v, k, d)),
    "defaultdict": _decode_defaultdict,
    "numpy": lambda c, v, k, d: _decode_numpy(v),
    "namedtuple": _decode_namedtuple,
    "enum": lambda c, v, k, d: c.decode_enum(v, k),
    "flag": lambda c, v, k, d: c.decode_flag(v, k),
    "dataclass": lambda c, v, k, d: c.decode_dataclass(v, k, d),
    "pickle": lambda c, v, k, d: c.decode_pickle(v, k),
    "torch.dtype": lambda c, v, k, d: _decode_torch("dtype", v),
    "torch.Size": lambda c, v, k, d: _decode_torch("Size", v),
    "torch.device": lambda c, v, k, d: _decode_torch("device", v),
}


def _refusal(value: Any, key: str) -> str:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    what = f"{key!r} is a {name}, which cannot be saved as it is."
    if isinstance(value, enum.Enum) or dataclasses.is_dataclass(value):
        return f"{what} Pass the class, when saving and when loading: types=[{kind.__qualname__}]."
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{what} Tensors stand in dicts, lists and tuples, not inside other values."
    advice = "Turn it into plain values, give it state_dict/load_state_dict, or pass allow_pickle=True on both sides."
    return f"{what} {advice}"
