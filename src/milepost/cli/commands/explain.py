"""`milepost explain`."""

from collections.abc import Iterator

import click
import msgspec

from milepost.cli import words
from milepost.cli.blocks import Block, Cell, Column, TextTable, line
from milepost.cli.command import command as make_command
from milepost.cli.output import print_record
from milepost.cli.places import PLACE, opened
from milepost.cli.session import Session
from milepost.cli.statuses import Status
from milepost.core.ranks import pack_ranks
from milepost.inspection.load_plan import NewMesh, PlannedLoad, RankReads, files_of, plan_load

_RANKS = [
    Column("RANKS"),
    Column("READ BY EACH", right=True),
    Column("PIECES", right=True),
    Column("FILES", right=True),
]
_FILES = [Column("FILE"), Column("READ", right=True), Column("PIECES", right=True)]


@make_command(PlannedLoad)
@click.argument("path", type=PLACE)
@click.option("--ranks", type=click.IntRange(min=1), metavar="N", help="How many ranks would load.")
@click.option("--mesh", metavar="MESH", help="Their mesh: 2x3, or with names dp=2,tp=3.")
@click.option("--cuts", metavar="CUTS", help="What each axis does: replicate,shard0 or dp=replicate,tp=shard0.")
@click.option("--rule", "rules", metavar="PATTERN:CUTS", multiple=True, help="Other cuts for the keys that match.")
@click.option("--keys", metavar="PATTERN", default="*", help="Only the keys that match.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Also list what this rank reads from each file.")
def command(
    session: Session,
    path: str,
    ranks: int | None,
    mesh: str | None,
    cuts: str | None,
    rules: tuple[str, ...],
    keys: str,
    rank: int | None,
) -> Status:
    """Say what a load on other ranks would read.

    By default the last axis of the mesh cuts dimension 0 of every tensor, as FSDP does, and the others replicate. A
    tensor without that dimension is held whole. Of the checkpoint the manifest is read; for --rank also headers, where
    data lies in files of earlier saves.
    """
    new = NewMesh.parse(ranks, mesh, cuts, rules)
    with opened(path) as checkpoint:
        plan = plan_load(checkpoint.manifest, checkpoint.url, new, keys)
        if rank is not None:
            found = files_of(checkpoint.manifest, checkpoint.file_name, new, rank, keys)
            plan = msgspec.structs.replace(plan, files_of=found)
    print_record(plan, session.json, lambda: _blocks(plan, rank))
    return Status.FINE


def _blocks(plan: PlannedLoad, rank: int | None) -> Iterator[Block]:
    axes = [f"{name}={size}" if name else str(size) for name, size in zip(plan.axes, plan.mesh, strict=True)]
    cuts = ["replicate" if cut < 0 else f"shard{cut}" for cut in plan.cuts]
    yield line(Cell(plan.url, "bold"), f": saved on {words.count(plan.saved_ranks, 'rank')}")
    yield line(f"loaded on {words.count(len(plan.ranks), 'rank')}: mesh {' x '.join(axes)}, cuts {', '.join(cuts)}")
    yield line("")
    yield TextTable(_RANKS, [_row(group) for group in _groups(plan.ranks)])
    yield line("")
    times = plan.read_bytes / plan.tensor_bytes if plan.tensor_bytes else 0.0
    held = f"{words.count(plan.tensors, 'tensor')} of {words.size(plan.tensor_bytes)}"
    yield line(f"all ranks together read {words.size(plan.read_bytes)}: {times:.2f} x the {held}")
    if plan.extra_bytes:
        yield line(f"about {words.size(plan.extra_bytes)} beside that is read too: data is verified in whole blocks")
    if plan.swaps:
        yield line("ranks of several machines read each byte once instead, and send it to those that want it")
    if rank is not None:
        yield line("")
        yield line(f"rank {rank} reads {'from' if plan.files_of else 'nothing'}")
        yield TextTable(_FILES, [[one.file, words.size(one.bytes), f"{one.reads:,}"] for one in plan.files_of])


def _groups(rows: tuple[RankReads, ...]) -> Iterator[list[RankReads]]:
    """The ranks that read equally much, together, in the order of the first of each."""
    alike: dict[tuple[int, int, int], list[RankReads]] = {}
    for row in rows:
        alike.setdefault((row.bytes, row.reads, row.files), []).append(row)
    yield from alike.values()


def _row(group: list[RankReads]) -> list[Cell | str]:
    first = group[0]
    ranks = pack_ranks(row.rank for row in group)
    return [ranks, words.size(first.bytes), f"{first.reads:,}", f"{first.files:,}"]
