"""What the page shows, as plain records: `collect` makes them, `page` puts them into the file. Pure.

What many steps have in common (tensors, layouts, tree, files) stands once, and steps name it by number. What every
tensor has in every step (statistics, changes) stands in columns of bytes.
"""

from typing import Any

import msgspec

from milepost.inspection.contents import ReusedData

VERSION = 1
"""Of this record. The page refuses any other."""


class PagePhase(msgspec.Struct, frozen=True, array_like=True):
    """The time of a phase: its name, the seconds of the rank in the middle and of the slowest, and which that was."""

    phase: str
    median_s: float
    slowest_s: float
    slowest_rank: int


class PageStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of a run, or the one checkpoint that is shown.

    `structure`, `files`: which of the page's structures and tables of files; -1 where it is not known. `values`: those
    that differ from the next step in the list, by number in the structure; all of them if `values_anew`; None where
    they were left out. `size_bytes`: of all files; `new_bytes`: the data that its own save wrote; `reused`: what lies
    in files of earlier saves.
    """

    name: str
    state: str
    step: int | None = None
    reason: str = ""
    url: str = ""
    format: str = "milepost"
    generation: int = 0
    save_id: str = ""
    created: str = ""
    writer: str = ""
    world: int = 0
    block_bytes: int = 0
    size_bytes: int = 0
    new_bytes: int | None = None
    reused: ReusedData | None = None
    structure: int = -1
    files: int = -1
    phases: tuple[PagePhase, ...] = ()
    metrics: dict[str, float | None] = {}
    metadata: dict[str, Any] = {}
    kept: tuple[str, ...] = ()
    verified: str = ""
    healthy: bool | None = None
    unhealthy_because: str = ""
    values: dict[int, str] | None = {}
    values_anew: bool = False


class PageTensors(msgspec.Struct, frozen=True):
    """Tensors in columns: row i of each belongs to tensor i. `same_as`: the number of a tensor, or -1."""

    keys: list[str]
    dtype: list[int]
    shape: list[int]
    layout: list[int]
    parts: list[int]
    turn: list[int]
    kind: list[int]
    same_as: list[int]


class PageTree(msgspec.Struct, frozen=True):
    """The nodes of a tree in preorder, in columns. `leaf`: the number of the tensor, value or private value, or -1."""

    depth: list[int]
    name: list[str]
    kind: list[int]
    leaf: list[int]


class Structure(msgspec.Struct, frozen=True):
    """What steps of one structure share. `layouts`: as in the manifest; None where one was left out."""

    dtypes: list[str]
    item_bytes: list[int]
    shapes: list[tuple[int, ...]]
    layouts: list[Any]
    tensors: PageTensors
    kinds: list[str]
    tree: PageTree
    value_keys: list[str]
    private: list[tuple[str, str]]


class PageOlderFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of an earlier save, with entries of a rank. `entries`: their names; None where that was left out.

    `folder`: the step beside this one in whose folder it lies; empty: in this one's.
    """

    rank: int
    save_id: str
    writer: int
    folder: str
    size_bytes: int
    header_bytes: int
    entries: list[str] | None = None


class FileTable(msgspec.Struct, frozen=True, omit_defaults=True):
    """The files of a step. `names`: of another library's files; those of ours follow from the save id and the rank.

    `older`: the files of earlier saves that hold data of the step.
    """

    rank: list[int]
    size_bytes: list[int]
    header_bytes: list[int]
    part_bytes: list[int] = []
    names: list[str] = []
    older: list[PageOlderFile] = []


class StatisticsStep(msgspec.Struct, frozen=True):
    """Where the statistics of one step stand: four columns of float32 (min, max, mean, rms), each in four planes.

    `at`: their first byte. `rows`: how many tensors. `odd`: (tensor, NaN, Inf) where there are any. `exact`: whether
    the numbers are as in the manifest, or rounded to about four digits. `histograms`: by number of tensor.
    """

    step: int
    at: int
    rows: int
    odd: list[tuple[int, int, int]]
    exact: bool
    histograms: dict[int, list[tuple[int, int]]]


class Change(msgspec.Struct, frozen=True):
    """What changed between two steps (by number in the list). `at`: one byte for each tensor of the later one.

    0: unchanged; 1..254: the share of blocks that changed, 254 for all; 255: not known, or not in both.
    `changed_bytes`: in blocks that changed; `unknown_bytes`: of tensors of which it is not known.
    """

    before: int
    after: int
    at: int
    rows: int
    changed_bytes: int
    unknown_bytes: int
    bytes_read: int


class Page(msgspec.Struct, frozen=True):
    """All that the page shows. `statistics_bytes` and `changes_bytes`: the columns that the rows point into.

    `file_bytes`: what all steps take together, where what several of them share counts once.
    """

    version: int
    made_by: str
    made: str
    source: str
    is_run: bool
    steps: list[PageStep]
    structures: list[Structure]
    files: list[FileTable]
    notes: list[str]
    statistics: list[StatisticsStep]
    changes: list[Change]
    statistics_bytes: bytes = b""
    changes_bytes: bytes = b""
    file_bytes: int = 0
