"""One step for the page, from its manifest; and what steps have in common: structures and tables of files. Pure.

The structure (tensors, layouts, tree) is parsed once, however many steps share it: of their manifests only the rest is
decoded.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from milepost.commit.find import parse
from milepost.core.history import PhaseTime
from milepost.core.manifest import Manifest, Value, unseal_brief
from milepost.core.statistics import TensorStatistics
from milepost.core.wire import Wire
from milepost.data.read import Files
from milepost.errors import CheckpointError
from milepost.inspection.contents import reused_of
from milepost.view.columns import packed_bytes, statistics_columns
from milepost.view.plain import plain, text
from milepost.view.reading import FoundStep, ReadStep, Rest, rest_of, rest_of_manifest
from milepost.view.record import FileTable, PageOlderFile, PagePhase, PageStep, Structure
from milepost.view.reused import HeaderBudget, older_files
from milepost.view.structure import structure_of

_VALUES = Wire.json(list[Value])
_STATISTICS = Wire.json(list[TensorStatistics])


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The statistics of a step. `columns`: as `statistics_columns` makes them; `packed_bytes`: of all in the page."""

    columns: bytes
    rows: int
    odd: list[tuple[int, int, int]]
    exact: bool
    histograms: dict[int, list[tuple[int, int]]]
    packed_bytes: int


@dataclass(frozen=True, slots=True)
class StepParts:
    """A step as the page shows it, but for its values: they are written as what differs from step to step.

    `values`: all of them, in the order of the structure; None where the structure is not in the page. `numbers`: its
    statistics; `lacks_numbers`: it has some that are not here.
    """

    step: PageStep
    values: tuple[str, ...] | None = None
    numbers: StepNumbers | None = None
    lacks_numbers: bool = False


@dataclass(slots=True)
class SharedParts:
    """What steps have in common, until `room` bytes of the page are taken. `left_out`: how many steps lack what.

    `headers`: how many of them may still be read to tell which data lies in files of earlier saves.
    """

    room: int
    headers: HeaderBudget
    structures: list[Structure] = field(default_factory=list)
    tables: list[FileTable] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    _structures: dict[bytes, int] = field(default_factory=dict)
    _tables: dict[bytes, int] = field(default_factory=dict)

    def structure(self, digest: bytes, manifest: Callable[[], Manifest]) -> int:
        """The number of a structure; -1 if there is no room for one more. The first one always has room."""
        if digest not in self._structures:
            made = structure_of(manifest())
            self._structures[digest] = -1
            if self._pays(packed_bytes(_encoded(made))) or not self.structures:
                self._structures[digest] = len(self.structures)
                self.structures.append(made)
        if self._structures[digest] < 0:
            self._leave_out("the tensors and layouts")
        return self._structures[digest]

    def table(self, table: FileTable) -> int:
        """The number of a table of files; most steps of a run have the same."""
        encoded = _encoded(table)
        if encoded not in self._tables:
            if not self._pays(packed_bytes(encoded)):
                if any(file.entries for file in table.older):
                    return self.table(_without_entries(table))
                self._leave_out("the sizes of files")
                return -1
            self._tables[encoded] = len(self.tables)
            self.tables.append(table)
        return self._tables[encoded]

    def _pays(self, size_bytes: int) -> bool:
        if size_bytes > self.room:
            return False
        self.room -= size_bytes
        return True

    def _leave_out(self, what: str) -> None:
        self.left_out[what] = self.left_out.get(what, 0) + 1


def parts_of(read: ReadStep, shared: SharedParts, numbers: "NumbersOf") -> StepParts:
    """One step of a run, as far as it can be read; the fault of one that cannot is shown with it."""
    found, summary = read.found, read.found.summary
    if found.is_unfinished:
        state = "unfinished" if summary is None else summary.state
        reason = "it is being saved, or the save never finished" if summary is None else summary.reason
        return StepParts(PageStep(found.name, state, found.step, reason, read.url))
    if read.fault:
        return _faulty(read, read.fault)
    if read.files is not None:
        return parts_of_files(read.url, read.files, found, shared, numbers)
    try:
        rest = rest_of(read.data)
        structure = shared.structure(rest.digest, lambda: parse(read.url, read.generation, read.data))
        table = _table(rest, [], _older(read, rest, shared))
        return _parts(rest, read.url, structure, found, shared, numbers, table)
    except (CheckpointError, ValueError) as error:
        return _faulty(read, str(error))


def _faulty(read: ReadStep, fault: str) -> StepParts:
    summary = read.found.summary
    known = summary is not None and summary.state in ("damaged", "unreadable")
    state = summary.state if summary is not None and known else "damaged"
    return StepParts(PageStep(read.found.name, state, read.found.step, fault, read.url))


def parts_of_files(url: str, files: Files, found: FoundStep, shared: SharedParts, numbers: "NumbersOf") -> StepParts:
    """The same of a checkpoint that was opened, of any format."""
    manifest = files.manifest
    rest = rest_of_manifest(manifest)
    structure = shared.structure(rest.digest, lambda: manifest)
    names = [] if manifest.save_id else [files.name_of(file.rank) for file in manifest.files]
    table = _table(rest, names, older_files(files, rest.older, shared.headers))
    return _parts(rest, url, structure, found, shared, numbers, table, manifest.format)


def _older(read: ReadStep, rest: Rest, shared: "SharedParts") -> list[PageOlderFile]:
    """The files of earlier saves that a step of a run needs."""
    if not rest.older or read.place is None:
        return []
    files = Files(read.place, parse(read.url, read.generation, read.data, unseal_brief))
    return older_files(files, rest.older, shared.headers)


def _parts(
    rest: Rest,
    url: str,
    structure: int,
    found: FoundStep,
    shared: SharedParts,
    numbers: "NumbersOf",
    table: FileTable,
    form: str = "milepost",
) -> StepParts:
    metadata = plain(rest.metadata)
    metadata = metadata if isinstance(metadata, dict) else {"metadata": metadata}
    health, summary = rest.health, found.summary
    state = "whole" if health is None or health.ok else "unhealthy"
    step = PageStep(
        name=found.name,
        state=state if summary is None else summary.state,
        step=found.step,
        reason="" if summary is None or summary.state == "unhealthy" else summary.reason,
        url=url,
        format=form,
        generation=rest.generation,
        save_id=rest.save_id,
        created=rest.created or (summary.created if summary else None) or "",
        writer=rest.writer,
        world=rest.world,
        block_bytes=rest.block_bytes,
        size_bytes=sum(file.size_bytes for file in (*rest.files, *rest.older)),
        new_bytes=None if summary is None else summary.new_bytes,
        reused=reused_of(rest.older),
        structure=structure,
        files=shared.table(table),
        phases=tuple(map(_phase, rest.timings)),
        metrics=_metrics(metadata),
        metadata=metadata,
        healthy=None if health is None else health.ok,
        unhealthy_because="" if health is None else health.reason,
    )
    if structure < 0:
        return StepParts(step)
    values = tuple(text(value.value) for value in _VALUES.unpack(memoryview(rest.values)))
    found_numbers = numbers(rest, shared.structures[structure]) if has_numbers(rest) else None
    return StepParts(step, values, found_numbers, lacks_numbers=has_numbers(rest) and found_numbers is None)


NumbersOf = Callable[[Rest, Structure], StepNumbers | None]
"""Gives the statistics of a step for the page; None where they are left out."""


def has_numbers(rest: Rest) -> bool:
    """Whether a manifest has statistics."""
    return len(rest.statistics) > len(b"[]")


def numbers_of(rest: Rest, structure: Structure, *, exact: bool) -> StepNumbers:
    """The statistics of a step. `exact`: with all digits and with histograms."""
    keys = structure.tensors.keys
    order = {key: index for index, key in enumerate(keys)}
    rows = {order[row.key]: row for row in _STATISTICS.unpack(memoryview(rest.statistics)) if row.key in order}
    columns = statistics_columns(rows, len(keys), exact=exact)
    histograms = {i: list(row.histogram) for i, row in rows.items() if row.histogram} if exact else {}
    odd = [(i, row.nan, row.inf) for i, row in rows.items() if row.nan or row.inf]
    size_bytes = packed_bytes(columns + _encoded((odd, histograms)))
    return StepNumbers(columns, len(keys), odd, exact, histograms, size_bytes)


def _table(rest: Rest, names: list[str], older: list[PageOlderFile]) -> FileTable:
    parts = [file.part_bytes for file in rest.files]
    return FileTable(
        rank=[file.rank for file in rest.files],
        size_bytes=[file.size_bytes for file in rest.files],
        header_bytes=[file.header_bytes for file in rest.files],
        part_bytes=parts if any(parts) else [],
        names=names,
        older=older,
    )


def _without_entries(table: FileTable) -> FileTable:
    older = [msgspec.structs.replace(file, entries=None) for file in table.older]
    return msgspec.structs.replace(table, older=older)


def _phase(time: PhaseTime) -> PagePhase:
    return PagePhase(time.phase, time.median_s, time.slowest_s, time.slowest_rank)


def _metrics(metadata: dict[str, Any]) -> dict[str, float | None]:
    """The metrics that a Checkpointer kept with a step: numbers; None for NaN and infinite ones."""
    found = metadata.get("metrics")
    if not isinstance(found, dict):
        return {}
    kept = {name: value for name, value in found.items() if not isinstance(value, bool)}
    numbers = {name: float(value) for name, value in kept.items() if isinstance(value, (int, float))}
    return {**numbers, **{name: None for name, value in kept.items() if value in ("nan", "inf", "-inf")}}


def _encoded(content: Any) -> bytes:
    return msgspec.json.encode(content)
