"""What changed between steps of a run, by their tables of checksums: one byte for each tensor."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from milepost.errors import CheckpointError, InvalidRequest
from milepost.store import Store
from milepost.view.record import Change, FileTable, Page, PageStep

if TYPE_CHECKING:
    from milepost.inspection.diff import Difference

_ALL = 254
_UNKNOWN = 255
_USABLE = ("whole", "unhealthy")


@dataclass(frozen=True, slots=True)
class _Compared:
    """What was found for a pair of steps. `column`: one byte for each tensor of the later one. `fault`: why nothing."""

    column: bytes = b""
    changed_bytes: int = 0
    unknown_bytes: int = 0
    bytes_read: int = 0
    fault: str = ""


class Comparisons:
    """Pairs of steps that were compared. Each pair is compared once, however often the page is made."""

    def __init__(self, place: Callable[[str], Store], wanted: tuple[tuple[str, str], ...]) -> None:
        self._place, self._wanted, self._read_before = place, wanted, False
        self._known: dict[tuple[str, ...], _Compared] = {}

    def added_to(self, page: Page, pairs: int, read_bytes: int) -> Page:
        """The page, with what changed between some pairs of its steps: the newest pairs, and the first and the last.

        Those are compared only where they have the same structure, since the tables tell there. Ends before it would
        read more than `read_bytes`. The pairs that are wanted are compared in any case. Raises InvalidRequest if there
        is no such step.
        """
        asked = self._asked(page)
        known, self._known = self._known, {}
        left, skipped = read_bytes, 0
        compared: list[tuple[int, int, _Compared]] = []
        for before, after in dict.fromkeys([*asked, *_pairs(page.steps, pairs)]):
            name, limit = _name(page.steps[before], page.steps[after]), None if (before, after) in asked else left
            found = known.get(name)
            if found is None:
                if limit is not None and _expected_bytes(page, before, after) > limit:
                    skipped += 1
                    continue
                found = self._compare(page, before, after, limit)
                left -= 0 if limit is None else found.bytes_read
            self._known[name] = found
            compared.append((before, after, found))
        notes = [found.fault for _, _, found in compared if found.fault] + ([_note(skipped)] if skipped else [])
        return _with_changes(page, compared, notes)

    def _asked(self, page: Page) -> list[tuple[int, int]]:
        """The pairs that are wanted. One that was there before, and is not there any more, is left out."""
        found = [(_step(page, one), _step(page, other)) for one, other in self._wanted]
        missing = {
            name
            for pair, at in zip(self._wanted, found, strict=True)
            for name, i in zip(pair, at, strict=True)
            if i < 0
        }
        if missing and page.steps and not self._read_before:
            raise InvalidRequest(f"there is no step {', '.join(sorted(missing))} that can be compared in {page.source}")
        self._read_before = self._read_before or bool(page.steps)
        return [pair for pair in found if min(pair) >= 0]

    def _compare(self, page: Page, before: int, after: int, read_bytes: int | None) -> _Compared:
        """What changed; nothing but the fault where a step is damaged, or was removed meanwhile."""
        from milepost.inspection.diff import diff, diff_within  # noqa: PLC0415  # brings numpy, which takes a while

        one, other = (self._place(page.steps[number].name) for number in (before, after))
        try:
            told = diff(one, other) if read_bytes is None else diff_within(one, other, read_bytes)
        except CheckpointError as error:
            names = page.steps[before].name, page.steps[after].name
            return _Compared(fault=f"{names[0]} and {names[1]} could not be compared: {error}")
        return _compared(page, after, told)


def _with_changes(page: Page, compared: list[tuple[int, int, _Compared]], notes: list[str]) -> Page:
    rows: list[Change] = []
    columns: list[bytes] = []
    for before, after, found in compared:
        if not found.fault:
            sizes = found.changed_bytes, found.unknown_bytes, found.bytes_read
            rows.append(Change(before, after, sum(map(len, columns)), len(found.column), *sizes))
            columns.append(found.column)
    data = b"".join(columns)
    return msgspec.structs.replace(page, changes=rows, changes_bytes=data, notes=[*page.notes, *notes])


def _byte(share: float | None) -> int:
    if share is None:
        return _UNKNOWN
    return max(1, round(share * _ALL)) if share else 0


def _note(skipped: int) -> str:
    pairs = "1 pair of steps was" if skipped == 1 else f"{skipped:,} pairs of steps were"
    return f"{pairs} not compared: that would read more than the page may. milepost view --compare does."


def _name(before: PageStep, after: PageStep) -> tuple[str, ...]:
    return before.name, before.save_id, after.name, after.save_id


def _step(page: Page, name: str) -> int:
    """The place in the list of the step with this name or number; -1 if there is none."""
    usable = (i for i, step in enumerate(page.steps) if name in (step.name, str(step.step)) and step.structure >= 0)
    return next(usable, -1)


def _pairs(steps: list[PageStep], count: int) -> Iterator[tuple[int, int]]:
    """The newest two, the first and the last, then older neighbours; only those that tables can compare."""
    usable = [i for i, step in enumerate(steps) if step.state in _USABLE and step.structure >= 0 and step.generation]
    pairs = list(pairwise(usable))[::-1]
    if len(usable) > 2:
        pairs.insert(1, (usable[0], usable[-1]))
    alike = [pair for pair in pairs if _look(steps[pair[0]]) == _look(steps[pair[1]])]
    return iter(alike[:count])


def _look(step: PageStep) -> tuple[int, int]:
    return step.structure, step.block_bytes


def _expected_bytes(page: Page, *numbers: int) -> int:
    """The headers and tables of all files of some steps."""
    found = 0
    for step in (page.steps[number] for number in numbers):
        files: FileTable | None = page.files[step.files] if step.files >= 0 else None
        if files is None:
            return 1 << 60
        sizes = [*files.size_bytes, *(file.size_bytes for file in files.older)]
        found += sum(files.header_bytes) + sum(file.header_bytes for file in files.older)
        found += 8 * (sum(sizes) // step.block_bytes + len(sizes))
    return found


def _compared(page: Page, after: int, told: "Difference") -> _Compared:
    """How much of each tensor changed, as the page reads it, and the bytes of all that did."""
    tensors = page.structures[page.steps[after].structure].tensors.keys
    column = bytearray(len(tensors))
    order = {key: index for index, key in enumerate(tensors)}
    changed, unknown = 0.0, 0
    for tensor in told.tensors:
        if tensor.key not in order:
            continue
        share, size = tensor.share, tensor.size_bytes[1] * (not tensor.tied[1])
        column[order[tensor.key]] = _byte(share)
        changed += (share or 0.0) * size
        unknown += size * (share is None)
    for key in told.only_b:
        if key in order:
            column[order[key]] = _UNKNOWN
    return _Compared(bytes(column), round(changed), unknown, told.bytes_read)
