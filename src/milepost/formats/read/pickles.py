"""Pickles, read without running them: the opcodes of protocols 2 to 5, for a small stack machine that calls nothing.

A name in a pickle is looked up in a table that the caller gives. A table holds `Maker`s: functions of this package
that check their arguments and build plain data. A name in the pickle reaches no other function. The `pickle` module is
not used, because one opcode can make its C code allocate any amount of memory.
"""

import struct
from collections.abc import Callable
from typing import Any

from milepost.formats.read.pickle_machine import BadPickle, Find, Machine, Opaque, PickleEnd


def load(data: bytes | memoryview, find: Find, persistent: Callable[[Any], Any] | None = None) -> Any:
    """The plain data that a pickle describes. Raises BadPickle, and what `find` raises for names that it refuses."""
    try:
        return Machine(bytes(data), find, persistent).run(_STEPS)
    except BadPickle:
        raise
    except (ValueError, IndexError, TypeError, KeyError, struct.error, AttributeError, OverflowError) as error:
        raise BadPickle(f"a pickle is damaged: {type(error).__name__} {str(error)[:200]}") from None


def _unknown(m: Machine) -> None:
    raise BadPickle(f"a pickle has the opcode {m.data[m.at - 1 : m.at]!r}, which is not supported")


def _stop(m: Machine) -> None:
    del m
    raise PickleEnd


def _mark(m: Machine) -> None:
    m.marks.append(m.stack)
    m.stack = []


def _memoize(m: Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _put(size: int) -> Callable[[Machine], None]:
    def step(m: Machine) -> None:
        m.memo[m.number(size)] = m.stack[-1]

    return step


def _get_short(m: Machine) -> None:
    """As `_get(1)`. Most opcodes of a large pickle are this and `_text_short`; written out, they are twice as fast."""
    at = m.at
    m.at = at + 1
    m.stack.append(m.memo[m.data[at]])


def _text_short(m: Machine) -> None:
    """As `_text(1)`."""
    data, start = m.data, m.at + 1
    m.at = stop = start + data[start - 1]
    if stop > len(data):
        raise BadPickle("a pickle ends in the middle")
    m.stack.append(data[start:stop].decode("utf-8", "surrogatepass"))


def _get(size: int) -> Callable[[Machine], None]:
    def step(m: Machine) -> None:
        m.stack.append(m.memo[m.number(size)])

    return step


def _push(make: Callable[[], Any]) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(make())


def _unsigned(size: int) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(m.number(size))


def _text(size: int) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(m.take(m.number(size)).decode("utf-8", "surrogatepass"))


def _bytes(size: int, kind: type = bytes) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(kind(m.take(m.number(size))))


def _tuple(count: int) -> Callable[[Machine], None]:
    def step(m: Machine) -> None:
        if len(m.stack) < count:
            raise BadPickle("a pickle takes more from its stack than is there")
        m.stack[-count:] = [tuple(m.stack[-count:])]

    return step


def _append(m: Machine) -> None:
    item = m.stack.pop()
    m.extend([item])


def _set_item(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.update([key, value])


def _dict_of(m: Machine) -> None:
    items = m.marked()
    m.stack.append({})
    m.update(items)


def _reduce(m: Machine) -> None:
    args, what = m.stack.pop(), m.stack.pop()
    m.call(what, args)


def _reduce_named(m: Machine) -> None:
    keywords, args, what = m.stack.pop(), m.stack.pop(), m.stack.pop()
    if keywords and not isinstance(what, Opaque):
        raise BadPickle("a pickle makes something with named arguments")
    m.call(what, args)


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.named(module, name)


def _persistent(m: Machine) -> None:
    if m.persistent is None:
        raise BadPickle("a pickle refers to something outside of it")
    m.stack.append(m.persistent(m.stack.pop()))


_KNOWN: dict[int, Callable[[Machine], Any]] = {
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
_STEPS: list[Callable[[Machine], Any]] = [_KNOWN.get(code, _unknown) for code in range(256)]
