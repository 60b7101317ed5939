"""Fuzzed bytes for every decoder, guided by what they reach. Row 20 of the table of faults.

Valid inputs are changed (`changes.py`) and given to a decoder (`decoders.py`). Every input is followed through
the decoders' own Python code (`sys.settrace`): an arc is a step from one line to another, a path is the set of arcs of one
input. An input that is accepted becomes the parent of its path, unless one of fewer generations is; one that is refused
becomes a parent if it reached a new arc. Parents are changed further, and parts of them go into others.

Refused inputs with nothing but a new path are no parents: decoders stop at the first thing that is wrong, and changes to
those were measured to reach less than changes to valid ones. What C code does (msgspec, numpy) is not seen. Guided or not,
nearly the same lines are reached; guided, about twice as many paths, and faults that only several changes make.

An input may be refused with an error that the decoder documents; what is accepted is checked (`sound.py`).
Seeded: one seed makes the same inputs in the same order, as long as Python's hashes are the same (`PYTHONHASHSEED=0`).
`python -m faults.fuzz 20000` shows what so many inputs reach, guided and not.
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
"""What remembers inputs. It forgets before each, so that a path depends on nothing but the input."""
Arc = tuple[str, int, int]
"""A step from one line of a file to another; -1 stands for the caller."""
MOST_GROWTH = 4
FROM_REFUSED, FROM_ACCEPTED, SPLICED = 0.1, 0.5, 0.3
"""How often a parent was refused, or accepted (else it is a valid input), and how often two are mixed."""


@dataclass
class Fuzzed:
    """How inputs ended, what those looked like that ended badly, and which arcs and how many paths were reached."""

    ended: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    arcs: set[Arc] = field(default_factory=set)
    paths: int = 0

    def add(self, other: "Fuzzed") -> None:
        """Count those of another run too; the paths of different runs are taken for different."""
        self.ended.update(other.ended)
        self.bad += other.bad
        self.arcs |= other.arcs
        self.paths += other.paths


def fuzz_all(job: tuple[int, int, bool]) -> Fuzzed:
    """So many inputs for all decoders, made from this seed, guided or not."""
    seed, count, guided = job
    total = Fuzzed()
    for name, decoder in decoders().items():
        found = fuzz(decoder, count * decoder.percent // 100, random.Random(seed), guided)
        found.bad = [f"{name}: {text}" for text in found.bad[:3]]
        total.add(found)
    return total


def fuzz(decoder: Decoder, count: int, rng: random.Random, guided: bool = True, files: Iterable[str] = FILES) -> Fuzzed:
    """The same for one decoder. Not guided: only valid inputs are changed, and arcs are counted all the same."""
    guide, done = Guide(decoder.seeds, files, guided), Fuzzed()
    most = MOST_GROWTH * max(map(len, decoder.seeds))
    for seed in decoder.seeds:
        with suppress(Exception):  # what is made once in a process is made here, not on the path of the first input
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
    """How an input ended, followed by the guide."""
    try:
        found = guide.follow(decoder.decode, data)
    except decoder.errors:
        return REFUSED
    except Exception as error:
        return f"crash ({type(error).__name__})"
    try:
        return ACCEPTED if decoder.sound(data, found) else WRONG
    except Exception as error:  # what our own code then refuses to write or to read again
        return f"{WRONG} ({type(error).__name__}): {error}"


class Parent(NamedTuple):
    """An input, and how many changes ago it was a valid one of ours."""

    data: bytes
    generation: int


class Guide:
    """Knows what inputs have reached, and which of them are worth changing further."""

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
        """What the decoder makes of an input, or raises; each step from line to line in our files is noted."""
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
        """Note what the input reached that was followed last, and keep it if it is worth changing further."""
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
            # The newest, so that they take turns; but those of many generations have lost what others may need.
            self.accepted[self._places[path]] = child


# ---------------------------------------------------------------- how much was reached


def lines_of(arcs: set[Arc]) -> tuple[int, int]:
    """How many lines were reached, and how many there are in the functions that were entered."""
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
            if constant.co_flags & inspect.CO_OPTIMIZED:  # no class
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
