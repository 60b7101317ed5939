"""The machine that reads pickles: a stack, a memo, and a budget. It calls nothing but `Maker`s.

What a pickle has made once it can name again with two bytes. So work that grows with the size of an object (copies,
hashes) is counted, and may not be more than a few steps for each byte; and keys that hash alike, which make dicts slow,
are few.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from milepost.core.hash_flood import MAX_ALIKE
from milepost.core.versions import plain_versions, set_versions
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
    """What a name in a pickle means: a function of this package that builds plain data from the arguments.

    It may walk through an argument, but not deeper. `hashes`: the items of its argument become keys.
    """

    name: str
    make: Callable[..., Any]
    hashes: bool = False


class NamedObject:
    """An object of a class that is known by name only: its arguments and its fields, as plain data."""

    __slots__ = ("args", "fields", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        self.name, self.args = name, args
        self.fields: dict[Any, Any] = {}
        self.state: Any = None

    def build(self, state: Any) -> None:
        """Set the pickled state."""
        self.state = state
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.fields.update(part)


class Opaque:
    """Stands for an object that only running its pickle could make. Accepts all operations and keeps nothing."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


_SIZED = (str, bytes, bytearray, list, tuple, dict, set, frozenset)


class BadPickle(ValueError):
    """The bytes are not a supported pickle: they are damaged, or use opcodes that no program writes."""


class PickleEnd(Exception):
    """The pickle is at its end."""


class Machine:
    """Runs the opcodes of one pickle over a stack, and counts the work."""

    def __init__(self, data: bytes, find: Find, persistent: Callable[[Any], Any] | None) -> None:
        self.data, self.at = data, 0
        self.find, self.persistent = find, persistent
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.steps_left = _STEPS_PER_BYTE * len(data) + _SLACK_STEPS
        self.alike: dict[int, Counter[int]] = {}

    def run(self, steps: "Sequence[Callable[[Machine], Any]]") -> Any:
        """Do the step of each opcode, up to the end; give what is on the stack then."""
        data, end = self.data, len(self.data)
        try:
            while (at := self.at) < end:
                self.at = at + 1
                steps[data[at]](self)
        except PickleEnd:
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
        """The next bytes as an unsigned number."""
        start = self.at
        self.at = stop = start + count
        if stop > len(self.data):
            raise BadPickle("a pickle ends in the middle")
        return int.from_bytes(self.data[start:stop], "little")

    def line(self) -> str:
        """The text up to the next newline."""
        end = self.data.index(b"\n", self.at) if b"\n" in self.data[self.at : self.at + 1000] else -1
        if end < 0:
            raise BadPickle("a pickle has a name without an end")
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def marked(self) -> list[Any]:
        """Take off the stack all that is above the last mark."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def spend(self, steps: int) -> None:
        """Count work that is not bounded by the bytes that cause it."""
        self.steps_left -= steps
        if self.steps_left < 0:
            raise UnsafeCheckpoint(
                "a pickle uses the same objects again and again, and causes far more work than it has bytes"
            )

    def check_key(self, value: Any, alike: "Counter[int]") -> None:
        """Refuse a key that is slow to hash, or that makes a dict slow. `alike` counts the hashes of the other keys."""
        if type(value) in (str, bytes, NamedObject) or (type(value) is int and -_SHORT_INT < value < _SHORT_INT):
            return
        self._check_depth(value, 0)
        found = hash(value)
        alike[found] += 1
        if alike[found] > MAX_ALIKE:
            raise UnsafeCheckpoint("a pickle has many keys with the same hash, which does not happen by chance")

    def _check_depth(self, value: Any, depth: int) -> None:
        """Refuse deep keys: a tuple that holds the same tuple twice, and so on, has 2**depth members."""
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
        """Put an object on the stack; its parts were taken off before."""
        self.stack.append(value)

    def long(self, count: int) -> None:
        """Put an integer of `count` bytes on the stack. Raises UnsafeCheckpoint for a very long one."""
        if count > _MAX_INT_BYTES:
            raise UnsafeCheckpoint(f"a pickle holds an integer of {count} bytes, over {_MAX_INT_BYTES}")
        self.stack.append(int.from_bytes(self.take(count), "little", signed=True))

    def call(self, what: Any, args: Any) -> None:
        """Put on the stack what a `Maker` builds from these arguments; nothing else can be called."""
        if not isinstance(args, tuple):
            raise BadPickle("a pickle calls something without arguments")
        if isinstance(what, Maker):
            self.spend(sum(len(arg) for arg in args if isinstance(arg, _SIZED)))
            if what.hashes and args:
                self.keys(args[0])
            try:
                self.stack.append(what.make(*args))
            except (TypeError, ValueError, IndexError) as error:
                raise BadPickle(f"{what.name} is called with wrong arguments: {str(error)[:200]}") from None
        elif isinstance(what, Opaque):
            self.stack.append(Opaque(what.name))
        else:
            raise UnsafeCheckpoint(f"a pickle calls a {type(what).__name__}, which no program needs to save data")

    def named(self, module: Any, name: Any) -> None:
        """Put on the stack what a name stands for."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise BadPickle("a pickle has a name that is no text")
        self.stack.append(self.find(module, name))

    def build(self) -> None:
        """Give the object below the top of the stack the state on top of it."""
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, NamedObject):
            parts = state if isinstance(state, tuple) else (state,)
            self.spend(len(parts))
            self.spend(sum(len(part) for part in parts if isinstance(part, dict)))
            target.build(state)
        elif isinstance(target, OrderedDict):
            metadata = state.get("_metadata") if isinstance(state, dict) else None
            self.spend(len(metadata) if isinstance(metadata, dict) else 0)
            set_versions(target, plain_versions(metadata))
        elif not isinstance(target, Opaque):
            raise UnsafeCheckpoint(f"a pickle sets the state of a {type(target).__name__}, which has none")

    def extend(self, items: list[Any]) -> None:
        """Append to the list on top of the stack."""
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Opaque):
            raise BadPickle(f"a pickle appends to a {type(target).__name__}")

    def update(self, items: list[Any]) -> None:
        """Set items of the dict on top of the stack: a key, its value, the next key, and so on."""
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
        """Add to the set on top of the stack."""
        target = self.stack[-1]
        if isinstance(target, set):
            alike = self.alike.setdefault(id(target), Counter())
            for item in items:
                self.check_key(item, alike)
                target.add(item)
        elif not isinstance(target, Opaque):
            raise BadPickle(f"a pickle adds to a {type(target).__name__}")
