"""Pickles, read without running them: a small stack machine that knows the opcodes of protocols 2 to 5 and calls nothing.

What a pickle names is looked up in a table that the caller gives. A table holds `Maker`s, which are our own functions
that check their arguments and build plain data; there is no way from a name in the pickle to any other function. The
`pickle` module is not used at all: its C code can be made to take any amount of memory by one opcode.

What a pickle has made once it can name again with two bytes. So whatever takes longer for larger objects (copies, hashes) is
counted, and may not be more than a few steps for each byte; and keys that hash alike, which make dicts slow, are few.
"""

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from milepost.core.hash_flood import MAX_ALIKE
from milepost.errors import UnsafeCheckpoint

Find = Callable[[str, str], Any]
_MAX_INT_BYTES = 1024
_MAX_KEY_DEPTH = 4
_STEPS_PER_BYTE = 4
_SLACK_STEPS = 100_000
_SHORT_INT = 2**60
"""Integers below have a hash that no other has."""


@dataclass(frozen=True, slots=True)
class Maker:
    """What a name in a pickle stands for: a function of ours that builds plain data from the arguments.

    It may go through an argument, and not through what that holds. `hashes`: but its argument's items become keys.
    """

    name: str
    make: Callable[..., Any]
    hashes: bool = False


class NamedObject:
    """An object of a class that we know by name only: its arguments and its fields, as plain data."""

    __slots__ = ("args", "fields", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name, self.args = name, args
        self.fields: dict[Any, Any] = {}
        self.state: Any = None

    def build(self, state: Any) -> None:
        """Take over the state that was pickled."""
        self.state = state
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.fields.update(part)


class Opaque:
    """Stands for an object that only running its pickle could make. Takes whatever is done to it and keeps nothing."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


_SIZED = (str, bytes, bytearray, list, tuple, dict, set, frozenset)


class BadPickle(ValueError):
    """The bytes are no pickle that we read: damaged, or of a kind that nobody writes."""


def load(data: bytes | memoryview, find: Find, persistent: Callable[[Any], Any] | None = None) -> Any:
    """The plain data that a pickle stands for. Raises BadPickle, and whatever `find` raises for names it refuses."""
    try:
        return _Machine(bytes(data), find, persistent).run()
    except BadPickle:
        raise
    except (ValueError, IndexError, TypeError, KeyError, struct.error, AttributeError, OverflowError) as error:
        raise BadPickle(f"a pickle is damaged: {type(error).__name__} {str(error)[:200]}") from None


class _Stop(Exception):
    """The pickle is at its end."""


class _Machine:
    def __init__(self, data: bytes, find: Find, persistent: Callable[[Any], Any] | None) -> None:
        self.data, self.at = data, 0
        self.find, self.persistent = find, persistent
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.steps_left = _STEPS_PER_BYTE * len(data) + _SLACK_STEPS
        self.alike: dict[int, Counter[int]] = {}

    def run(self) -> Any:
        data, steps, end = self.data, _STEPS, len(self.data)
        try:
            while (at := self.at) < end:
                self.at = at + 1
                steps[data[at]](self)
        except _Stop:
            return self.stack.pop()
        raise BadPickle("a pickle ends in the middle")

    def take(self, count: int) -> bytes:
        """The next bytes."""
        stop = self.at + count
        if stop > len(self.data):
            raise BadPickle("a pickle ends in the middle")
        found = self.data[self.at : stop]
        self.at = stop
        return found

    def number(self, count: int) -> int:
        start = self.at
        self.at = stop = start + count
        if stop > len(self.data):
            raise BadPickle("a pickle ends in the middle")
        return int.from_bytes(self.data[start:stop], "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at) if b"\n" in self.data[self.at : self.at + 1000] else -1
        if end < 0:
            raise BadPickle("a pickle has a name without an end")
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def marked(self) -> list[Any]:
        """What stands on the stack above the last mark, taken off."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def spend(self, steps: int) -> None:
        """Count work that is not bounded by the bytes that ask for it."""
        self.steps_left -= steps
        if self.steps_left < 0:
            raise UnsafeCheckpoint(
                "a pickle uses the same objects again and again, for far more work than it has bytes"
            )

    def check_key(self, value: Any, alike: "Counter[int]") -> None:
        """Refuse a key that is slow to hash, or that makes a dict slow; `alike` counts the hashes of the others in it."""
        if type(value) in (str, bytes, NamedObject) or (type(value) is int and -_SHORT_INT < value < _SHORT_INT):
            return
        self._check_depth(value, 0)
        found = hash(value)
        alike[found] += 1
        if alike[found] > MAX_ALIKE:
            raise UnsafeCheckpoint("a pickle has many keys with the same hash, which nobody has by chance")

    def _check_depth(self, value: Any, depth: int) -> None:
        """A tuple of the same tuple twice, and so on, has 2**depth members."""
        if isinstance(value, (tuple, frozenset)):
            if depth > _MAX_KEY_DEPTH:
                raise UnsafeCheckpoint("a pickle has a key of tuples in tuples in tuples")
            self.spend(len(value))
            for item in value:
                self._check_depth(item, depth + 1)

    def keys(self, items: list[Any]) -> list[Any]:
        """The same items, checked as members of one set."""
        alike: Counter[int] = Counter()
        for item in items:
            self.check_key(item, alike)
        return items

    def made(self, value: Any) -> None:
        """Put something on the stack; what it was made of is taken off already."""
        self.stack.append(value)

    def long(self, count: int) -> None:
        if count > _MAX_INT_BYTES:
            raise UnsafeCheckpoint(f"a pickle holds an integer of {count} bytes, over {_MAX_INT_BYTES}")
        self.stack.append(int.from_bytes(self.take(count), "little", signed=True))

    def call(self, what: Any, args: Any) -> None:
        if not isinstance(args, tuple):
            raise BadPickle("a pickle calls something without arguments")
        if isinstance(what, Maker):
            self.spend(sum(len(arg) for arg in args if isinstance(arg, _SIZED)))
            if what.hashes and args:
                self.keys(args[0])
            try:
                self.stack.append(what.make(*args))
            except (TypeError, ValueError, IndexError) as error:
                raise BadPickle(f"{what.name} is called with odd arguments: {str(error)[:200]}") from None
        elif isinstance(what, Opaque):
            self.stack.append(Opaque(what.name))
        else:
            raise UnsafeCheckpoint(f"a pickle calls a {type(what).__name__}, which nobody does who saves data")

    def named(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise BadPickle("a pickle has a name that is no text")
        self.stack.append(self.find(module, name))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, NamedObject):
            parts = state if isinstance(state, tuple) else (state,)
            self.spend(len(parts))
            self.spend(sum(len(part) for part in parts if isinstance(part, dict)))
            target.build(state)
        elif not isinstance(target, (Opaque, OrderedDict)):  # the state of an OrderedDict is torch's `_metadata`
            raise UnsafeCheckpoint(f"a pickle sets the state of a {type(target).__name__}, which has none")

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Opaque):
            raise BadPickle(f"a pickle appends to a {type(target).__name__}")

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):
            if len(items) % 2:
                raise BadPickle("a pickle has a key without a value")
            alike = self.alike.get(id(target))
            for i in range(0, len(items), 2):
                if type(items[i]) is not str:
                    alike = self.alike.setdefault(id(target), Counter()) if alike is None else alike
                    self.check_key(items[i], alike)
                target[items[i]] = items[i + 1]
        elif not isinstance(target, Opaque):
            raise BadPickle(f"a pickle sets items of a {type(target).__name__}")

    def add(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, set):
            alike = self.alike.setdefault(id(target), Counter())
            for item in items:
                self.check_key(item, alike)
                target.add(item)
        elif not isinstance(target, Opaque):
            raise BadPickle(f"a pickle adds to a {type(target).__name__}")


def _unknown(m: _Machine) -> None:
    raise BadPickle(f"a pickle has the opcode {m.data[m.at - 1 : m.at]!r}, which is not supported")


def _stop(m: _Machine) -> None:
    del m
    raise _Stop


def _mark(m: _Machine) -> None:
    m.marks.append(m.stack)
    m.stack = []


def _memoize(m: _Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _put(size: int) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        m.memo[m.number(size)] = m.stack[-1]

    return step


def _get_short(m: _Machine) -> None:
    """As `_get(1)`. This and `_text_short` are most of what a large pickle has, and so are spelled out: twice as fast."""
    at = m.at
    m.at = at + 1
    m.stack.append(m.memo[m.data[at]])


def _text_short(m: _Machine) -> None:
    """As `_text(1)`."""
    data, start = m.data, m.at + 1
    m.at = stop = start + data[start - 1]
    if stop > len(data):
        raise BadPickle("a pickle ends in the middle")
    m.stack.append(data[start:stop].decode("utf-8", "surrogatepass"))


def _get(size: int) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        m.stack.append(m.memo[m.number(size)])

    return step


def _push(make: Callable[[], Any]) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(make())


def _unsigned(size: int) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(m.number(size))


def _text(size: int) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(m.take(m.number(size)).decode("utf-8", "surrogatepass"))


def _bytes(size: int, kind: type = bytes) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(kind(m.take(m.number(size))))


def _tuple(count: int) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        if len(m.stack) < count:
            raise BadPickle("a pickle takes more from its stack than is there")
        m.stack[-count:] = [tuple(m.stack[-count:])]

    return step


def _append(m: _Machine) -> None:
    item = m.stack.pop()
    m.extend([item])


def _set_item(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.update([key, value])


def _dict_of(m: _Machine) -> None:
    items = m.marked()
    m.stack.append({})
    m.update(items)


def _reduce(m: _Machine) -> None:
    args, what = m.stack.pop(), m.stack.pop()
    m.call(what, args)


def _reduce_named(m: _Machine) -> None:
    keywords, args, what = m.stack.pop(), m.stack.pop(), m.stack.pop()
    if keywords and not isinstance(what, Opaque):
        raise BadPickle("a pickle makes something with named arguments")
    m.call(what, args)


def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.named(module, name)


def _persistent(m: _Machine) -> None:
    if m.persistent is None:
        raise BadPickle("a pickle refers to something outside of it")
    m.stack.append(m.persistent(m.stack.pop()))


_KNOWN: dict[int, Callable[[_Machine], Any]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    ord("."): _stop,
    ord("("): _mark,
    ord("0"): lambda m: m.stack.pop(),
    ord("1"): lambda m: m.marked(),
    ord("2"): lambda m: m.stack.append(m.stack[-1]),
    ord("N"): lambda m: m.stack.append(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    ord("J"): lambda m: m.stack.append(struct.unpack("<i", m.take(4))[0]),
    ord("K"): _unsigned(1),
    ord("M"): _unsigned(2),
    0x8A: lambda m: m.long(m.number(1)),
    0x8B: lambda m: m.long(m.number(4)),
    ord("G"): lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    ord("X"): _text(4),
    0x8C: _text_short,
    0x8D: _text(8),
    ord("B"): _bytes(4),
    ord("C"): _bytes(1),
    0x8E: _bytes(8),
    0x96: _bytes(8, bytearray),
    ord(")"): lambda m: m.stack.append(()),
    ord("t"): lambda m: m.made(tuple(m.marked())),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("]"): _push(list),
    ord("l"): lambda m: m.made(m.marked()),
    ord("a"): _append,
    ord("e"): lambda m: m.extend(m.marked()),
    ord("}"): _push(dict),
    ord("d"): _dict_of,
    ord("s"): _set_item,
    ord("u"): lambda m: m.update(m.marked()),
    0x8F: _push(set),
    0x90: lambda m: m.add(m.marked()),
    0x91: lambda m: m.made(frozenset(m.keys(m.marked()))),
    ord("c"): lambda m: m.named(m.line(), m.line()),
    0x93: _stack_global,
    ord("R"): _reduce,
    0x81: _reduce,  # NEWOBJ: a class and its arguments
    0x92: _reduce_named,
    ord("b"): lambda m: m.build(),
    ord("Q"): _persistent,
    ord("q"): _put(1),
    ord("r"): _put(4),
    ord("h"): _get_short,
    ord("j"): _get(4),
    0x94: _memoize,
}
_STEPS: list[Callable[[_Machine], Any]] = [_KNOWN.get(code, _unknown) for code in range(256)]
