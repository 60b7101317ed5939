"""`milepost show`."""

import fnmatch
from collections.abc import Callable, Iterator

import click
import msgspec

from milepost.checkpoint import Checkpoint
from milepost.cli import words
from milepost.cli.blocks import Block, Cell, Column, TextTable, line
from milepost.cli.command import command as make_command
from milepost.cli.complete import complete_keys
from milepost.cli.escape import meant, shown
from milepost.cli.output import is_terminal, print_record
from milepost.cli.places import PLACE, opened
from milepost.cli.session import Session
from milepost.cli.statuses import Status
from milepost.core.statistics import TensorStatistics
from milepost.errors import InvalidRequest
from milepost.inspection.contents import CheckpointContents, EntryDetail, HeldEntry, ReusedData, contents_of, detail_of
from milepost.inspection.patterns import refuse_unmatched

_COLUMNS = [
    Column("KEY"),
    Column("DTYPE"),
    Column("SHAPE"),
    Column("SIZE", right=True, rank=1),
    Column("LAYOUT OR VALUE", rank=2),
]
_ABOUT = [Column(""), Column("")]
_SHORT_S = 0.01
_BOXES = [Column("OFFSET"), Column("SHAPE"), Column("RANK", right=True), Column("FILE")]
_BOXES_SHOWN = 40


@make_command(CheckpointContents, EntryDetail)
@click.argument("path", type=PLACE)
@click.argument("key", required=False, shell_complete=complete_keys)
@click.option("--slice", "index", metavar="INDEX", help="Read a part of the tensor KEY and print it: 0:2,:4")
@click.option("--keys", "pattern", metavar="PATTERN", help="Only keys that match, with * and ? as in a shell.")
@click.option("--tree/--flat", default=None, help="A tree, or whole keys. A terminal gets a tree, a pipe whole keys.")
def command(
    session: Session, path: str, key: str | None, index: str | None, pattern: str | None, tree: bool | None
) -> Status:
    """Show what a checkpoint holds, or one entry of it.

    Without KEY: all keys with their dtypes, shapes, layouts and values, the metadata, how long the save took, and
    whether it was healthy. With KEY: that entry, and which file holds which box of it; or, for the name of a container,
    what is in it. Of a run, the newest step is shown; PATH@3 is generation 3 of a place.
    """
    if index is not None and key is None:
        raise InvalidRequest("--slice needs the KEY of a tensor")
    if key is not None and pattern is not None:
        raise InvalidRequest("pass a KEY or --keys PATTERN, not both")
    with opened(path) as checkpoint:
        key = meant(key) if key is not None and key not in checkpoint else key
        if key is not None and (index is not None or not _is_container(checkpoint, key)):
            detail = _detail(checkpoint, key, index)
            print_record(detail, session.json, lambda: _detail_blocks(detail))
            return Status.FINE
        contents = contents_of(checkpoint)
    if key is not None:
        contents = _only(contents, lambda one: one.startswith(f"{key}."))
    elif pattern is not None:
        refuse_unmatched([pattern], (one.key for one in contents.entries if one.kind != "container"), contents.url)
        contents = _only(contents, lambda one: fnmatch.fnmatchcase(one, pattern))
    as_tree = is_terminal() if tree is None else tree
    print_record(contents, session.json, lambda: _blocks(contents, as_tree))
    return Status.FINE


def _is_container(checkpoint: Checkpoint, key: str) -> bool:
    return key not in checkpoint and any(one.startswith(f"{key}.") for one in checkpoint)


def _detail(checkpoint: Checkpoint, key: str, index: str | None) -> EntryDetail:
    if index is None:
        return detail_of(checkpoint, key)
    from milepost.inspection.slices import values_at  # noqa: PLC0415  # for those who want values

    return values_at(checkpoint, key, index)


def _only(contents: CheckpointContents, chosen: Callable[[str], bool]) -> CheckpointContents:
    """The same with only the leaves whose keys are chosen, and the containers that they are in."""
    leaves = [one for one in contents.entries if one.kind != "container" and chosen(one.key)]
    around = {one.path[:depth] for one in leaves for depth in range(len(one.path))}
    keys = {one.key for one in leaves}
    kept = (one for one in contents.entries if (one.path in around if one.kind == "container" else one.key in keys))
    recorded = tuple(one for one in contents.statistics if one.key in keys)
    return msgspec.structs.replace(contents, entries=tuple(kept), statistics=recorded)


def _blocks(contents: CheckpointContents, tree: bool) -> Iterator[Block]:
    what = f"generation {contents.generation}" if contents.generation else contents.format
    tensors = words.count(contents.tensors, "tensor")
    elements = words.count(contents.elements, "element")
    yield line(Cell(contents.url, "bold"), f": {what}, {tensors}, {elements}, {words.size(contents.data_bytes)}")
    yield TextTable(_ABOUT, [[Cell(name, "dim"), said] for name, said in _about(contents)])
    yield line("")
    entries = contents.entries if tree else [one for one in contents.entries if one.kind != "container"]
    sizes = _sizes(contents.entries) if tree else {}
    yield TextTable(_COLUMNS, [_row(one, tree, sizes) for one in entries if one.path or one.kind != "container"])


def _about(contents: CheckpointContents) -> Iterator[tuple[str, Cell | str]]:
    """What is told of a checkpoint as a whole: names, and what each is."""
    saved = [contents.created, contents.writer and f"by {contents.writer}", f"on {words.count(contents.ranks, 'rank')}"]
    yield "saved", " ".join(part for part in saved if part)
    if contents.timings:
        yield "took", _times(contents)
    if contents.older is not None:
        yield "reused", _reused(contents.older)
    metadata = contents.metadata if isinstance(contents.metadata, dict) else {"": contents.metadata}
    for name, value in metadata.items():
        yield "metadata", f"{name}: {value!r}"
    if contents.health is not None:
        ok = contents.health.ok
        yield "health", Cell("healthy" if ok else f"unhealthy: {contents.health.reason}", "good" if ok else "bad")
    if contents.statistics:
        bad = sum(not one.is_finite for one in contents.statistics)
        found = f"{words.count(bad, 'tensor')} with NaN or Inf; see: milepost stats" if bad else "all finite"
        yield "numbers", Cell(found, "bad" if bad else "good")


def _times(contents: CheckpointContents) -> str:
    """The phases that took a while, the longest first."""
    phases = sorted(contents.timings, key=lambda time: -time.slowest_s)
    long = [time for time in phases if time.slowest_s >= _SHORT_S] or phases[:1]
    return ", ".join(
        f"{time.phase} {time.median_s:.2f} s"
        + (f" (rank {time.slowest_rank}: {time.slowest_s:.2f} s)" if contents.ranks > 1 else "")
        for time in long
    )


def _reused(older: ReusedData) -> str:
    """`4.0 MiB in 2 files of 1 earlier save, 3 saves ago`."""
    found = f"{words.size(older.data_bytes)} in {words.count(older.files, 'file')}"
    ago = f"{words.count(older.oldest_age, 'save')} ago"
    return f"{found} of {words.count(older.saves, 'earlier save')}, {'the oldest ' if older.saves > 1 else ''}{ago}"


def _sizes(entries: tuple[HeldEntry, ...]) -> dict[tuple[str, ...], int]:
    """The bytes of all tensors in each container."""
    sizes: dict[tuple[str, ...], int] = {}
    for one in entries:
        for depth in range(len(one.path) if one.size_bytes and not one.same_as else 0):
            sizes[one.path[:depth]] = sizes.get(one.path[:depth], 0) + one.size_bytes
    return sizes


def _row(one: HeldEntry, tree: bool, sizes: dict[tuple[str, ...], int]) -> list[Cell | str]:
    name = f"{'  ' * (len(one.path) - 1)}{shown(one.path[-1])}" if tree and one.path else shown(one.key)
    if one.kind == "container":
        return [Cell(name, "key"), Cell(one.container, "dim"), "", words.size(sizes.get(one.path)), ""]
    if one.kind == "tensor":
        tied = f"same as {shown(one.same_as)}" if one.same_as else one.layout
        size = "" if one.same_as else words.size(one.size_bytes)
        return [name, one.container or one.dtype, words.shape(one.shape), size, Cell(tied, "dim")]
    value = one.text if one.kind == "value" else f"one on each of ranks {one.ranks}"
    return [name, Cell("value" if one.kind == "value" else "per rank", "dim"), "", "", value]


def _detail_blocks(detail: EntryDetail) -> Iterator[Block]:
    one = detail.entry
    if one.kind != "tensor":
        yield line(
            Cell(shown(one.key), "bold"), ": ", one.text if one.kind == "value" else f"one on each of ranks {one.ranks}"
        )
        return
    size = words.size(one.size_bytes)
    yield line(
        Cell(shown(one.key), "bold"), f": {one.container or one.dtype} {words.shape(one.shape)}, {size}, {one.layout}"
    )
    if one.same_as:
        yield line(Cell("tied      ", "dim"), f"the same tensor as {shown(one.same_as)}")
    if one.transforms:
        yield line(Cell("stored    ", "dim"), f"through {', '.join(one.transforms)}")
    if detail.statistics is not None:
        yield line(Cell("numbers   ", "dim"), statistics_words(detail.statistics))
    if detail.values_text:
        yield line(Cell(f"[{detail.index}]", "dim"))
        yield from (line(text) for text in detail.values_text.splitlines())
        return
    yield line("")
    boxes = detail.boxes[:_BOXES_SHOWN]
    yield TextTable(_BOXES, [[words.shape(b.offset), words.shape(b.shape), str(b.rank), b.file] for b in boxes])
    if more := len(detail.boxes) + detail.more_boxes - len(boxes):
        yield line(Cell(f"and {more:,} more; --json lists {'more' if detail.more_boxes else 'all'}", "dim"))


def statistics_words(found: TensorStatistics) -> str:
    """`1,024 elements, 3 NaN, min -1.2, max 3.4, mean 0.01, rms 0.5`."""
    parts = [words.count(found.count, "element")]
    parts += [f"{count:,} {name}" for name, count in (("NaN", found.nan), ("Inf", found.inf)) if count]
    numbers = (("min", found.min), ("max", found.max), ("mean", found.mean), ("rms", found.rms))
    return ", ".join([*parts, *(f"{name} {words.number(value)}" for name, value in numbers if value is not None)])
