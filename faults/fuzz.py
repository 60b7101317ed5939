"""Fuzzed bytes for every decoder, guided by coverage. Row 20 of the table of faults.

Valid inputs are changed (`changes.py`) and given to a decoder (`decoders.py`). Every input is traced through the Python
code of the decoders (`sys.settrace`). An arc is a step from one line to another, and a path is the set of arcs of one
input. An accepted input becomes the parent of its path, unless an input of fewer generations already is. A refused
input becomes a parent if it reached a new arc. Parents are changed further, and parts of them go into other inputs.

Refused inputs with only a new path do not become parents. Decoders stop at the first error, and measurements show that
changes to such inputs reach less than changes to valid ones. C code (msgspec, numpy) is not traced. Guided and unguided
runs reach nearly the same lines. Guided runs reach about twice as many paths, and faults that need several changes.

An input may be refused with an error that the decoder documents. Accepted inputs are checked (`sound.py`). One seed
makes the same inputs in the same order, as long as Python's hashes are the same (`PYTHONHASHSEED=0`).

`python -m faults.fuzz 20000` shows what 20,000 inputs reach, guided and not.
"""

import inspect
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

from faults.changes import WATCHED
from faults.decoders import Decoder, decoders

REFUSED, ACCEPTED, WRONG = "refused", "accepted and sound", "wrongly accepted"
FILES = frozenset(inspect.getfile(module) for module in WATCHED)
CACHES = tuple(
    function
    for module in WATCHED
    for function in vars(module).values()
    if hasattr(function, "cache_parameters") and function.cache_parameters()["maxsize"]
)
"""Caches that are cleared before each input, so that a path depends only on the input."""
Arc = tuple[str, int, int]
"""A step from one line of a file to another; -1 stands for the caller."""
MOST_GROWTH = 4
FROM_REFUSED, FROM_ACCEPTED, SPLICED = 0.1, 0.5, 0.3
"""The chances that a parent is a refused or an accepted input (else a valid one), and that two are mixed."""


@dataclass
class Fuzzed:
    """How inputs ended, the inputs that ended badly, the arcs that were reached, and the number of paths."""

    ended: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    arcs: set[Arc] = field(default_factory=set)
    paths: int = 0

    def add(self, other: "Fuzzed") -> None:
        """Add the counts of another run. Paths of different runs count as different."""
        self.ended.update(other.ended)
        self.bad += other.bad
        self.arcs |= other.arcs
        self.paths += other.paths


def fuzz_all(job: tuple[int, int, bool]) -> Fuzzed:
    """Fuzz all decoders with `count` inputs, made from this seed, guided or not."""
    seed, count, guided = job
    total = Fuzzed()
    for name, decoder in decoders().items():
        found = fuzz(decoder, count * decoder.percent // 100, random.Random(seed), guided)
        found.bad = [f"{name}: {text}" for text in found.bad[:3]]
        total.add(found)
    return total


def fuzz(decoder: Decoder, count: int, rng: random.Random, guided: bool = True, files: Iterable[str] = FILES) -> Fuzzed:
    """The same for one decoder. Unguided runs change only valid inputs; arcs are counted all the same."""
    guide, done = Guide(decoder.seeds, files, guided), Fuzzed()
    most = MOST_GROWTH * max(map(len, decoder.seeds))
    for seed in decoder.seeds:
        with suppress(Exception):  # one-time work is done here, not on the path of the first input
            decoder.decode(seed)
    for _ in range(count):
        origin = guide.parent(rng)
        other = guide.parent(rng) if rng.random() < SPLICED else origin
        data = origin.data
        while data == origin.data or len(data) > most:
            data = decoder.change(rng, origin.data, other.data)
        ending = ending_of(decoder, data, guide)
        if ending not in (REFUSED, ACCEPTED):
            done.bad.append(f"{ending} {data!r}")
        guide.learn(data, origin, ending == ACCEPTED)
        done.ended[ending.partition(":")[0]] += 1
    done.arcs, done.paths = guide.arcs, len(guide.paths)
    return done


def ending_of(decoder: Decoder, data: bytes, guide: "Guide") -> str:
    """How an input ended. The guide traces it."""
    try:
        found = guide.follow(decoder.decode, data)
    except decoder.errors:
        return REFUSED
    except Exception as error:
        return f"crash ({type(error).__name__})"
    try:
        return ACCEPTED if decoder.sound(data, found) else WRONG
    except Exception as error:  # accepted, but Milepost cannot write it or read it again
        return f"{WRONG} ({type(error).__name__}): {error}"


class Parent(NamedTuple):
    """An input, and the number of changes since it was a valid one."""

    data: bytes
    generation: int


class Guide:
    """Records what inputs have reached, and keeps those that are worth changing further."""

    def __init__(self, seeds: list[bytes], files: Iterable[str], keeps: bool) -> None:
        self.seeds, self.files, self.keeps = [Parent(seed, 0) for seed in seeds], frozenset(files), keeps
        self.arcs: set[Arc] = set()
        self.paths: set[int] = set()
        self.accepted: list[Parent] = []
        self.refused: list[Parent] = []
        self._places: dict[int, int] = {}
        self._here: set[Arc] = set()

    def parent(self, rng: random.Random) -> Parent:
        """An input to change."""
        chance = rng.random()
        if self.refused and chance < FROM_REFUSED:
            return rng.choice(self.refused)
        if self.accepted and chance < FROM_REFUSED + FROM_ACCEPTED:
            return rng.choice(self.accepted)
        return rng.choice(self.seeds)

    def follow(self, decode: Callable[[bytes], Any], data: bytes) -> Any:
        """Decode an input; return or raise what the decoder does. Each step between lines of Milepost is recorded."""
        for function in CACHES:
            function.cache_clear()
        self._here = set()
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return decode(data)
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        """Called by Python at each call."""
        name = frame.f_code.co_filename
        if name not in self.files:
            return None
        note, last = self._here.add, -1

        def step(frame: FrameType, _event: str, _argument: Any) -> Any:
            nonlocal last
            line = frame.f_lineno
            note((name, last, line))
            last = line
            return step

        return step

    def learn(self, data: bytes, origin: Parent, accepted: bool) -> None:
        """Record what the last input reached, and keep that input if it is worth changing further."""
        child = Parent(data, origin.generation + 1)
        path = hash(frozenset(self._here))
        new_arc = not self._here <= self.arcs
        self.arcs |= self._here
        self.paths.add(path)
        if not self.keeps:
            return
        if not accepted:
            self.refused += [child] if new_arc else []
        elif path not in self._places:
            self._places[path] = len(self.accepted)
            self.accepted.append(child)
        elif child.generation <= self.accepted[self._places[path]].generation:
            # The newest, so that parents take turns. Inputs of many generations have lost parts that others need.
            self.accepted[self._places[path]] = child


# ---------------------------------------------------------------- how much was reached


def lines_of(arcs: set[Arc]) -> tuple[int, int]:
    """The number of lines reached, and the number of lines in the functions that were entered."""
    reached = {(name, line) for name, _, line in arcs}
    there: set[tuple[str, int]] = set()
    for module in WATCHED:
        name = inspect.getfile(module)
        for code in functions(compile(inspect.getsource(module), name, "exec")):
            inner = {line for function in functions(code) for line in lines_in(function)}
            own = {(name, line) for line in lines_in(code) - inner - {code.co_firstlineno}}
            there |= own if own & reached else set()
    return len(reached & there), len(there)


def lines_in(code: CodeType) -> set[int]:
    """The lines of a function."""
    return {line for _, _, line in code.co_lines() if line}


def functions(code: CodeType) -> Iterator[CodeType]:
    """The functions in a module or function."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from functions(constant)
            if constant.co_flags & inspect.CO_OPTIMIZED:  # not a class
                yield constant


def reach(done: Fuzzed) -> str:
    """How much a run reached, in words."""
    reached, there = lines_of(done.arcs)
    return f"{len(done.arcs):,} arcs, {reached:,} of {there:,} lines, {done.paths:,} paths"


def main(count: int) -> None:
    """Show what inputs reach for each decoder, guided and not."""
    for name, decoder in decoders().items():
        for guided in (True, False):
            done = fuzz(decoder, count, random.Random(0), guided)
            print(f"{name:24}{'guided' if guided else 'not guided':12}{reach(done)}; {dict(done.ended)}")
            print(*done.bad[:3], sep="\n", end="")


if __name__ == "__main__":
    main(int(sys.argv[1]))
