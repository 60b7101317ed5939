"""`milepost convert`."""

import contextlib
import fnmatch
from typing import Literal, get_args

import click

from milepost.checkpoint import files_at
from milepost.cli import words
from milepost.cli.blocks import Cell, line
from milepost.cli.command import command as make_command
from milepost.cli.output import print_record, progress_shown
from milepost.cli.places import PLACE, advising, one_at
from milepost.cli.session import Session
from milepost.cli.statuses import Status
from milepost.formats.write.converted import Converted
from milepost.inspection.patterns import keys_in, refuse_unmatched

Target = Literal["milepost", "dcp", "torch", "safetensors"]
_TORCH = (".pt", ".pth", ".ckpt", ".bin")


@make_command(Converted)
@click.argument("source", type=PLACE)
@click.argument("target", type=PLACE)
@click.option("--to", type=click.Choice(get_args(Target)), help="The format. By default that of TARGET's name.")
@click.option("--keys", metavar="PATTERN", help="Only keys that match, with * and ? as in a shell.")
@click.option("--without", metavar="PATTERN", multiple=True, help="Leave out keys that match; may be given again.")
@click.option("--strip", metavar="PREFIX", default="", help="Leave this out at the start of keys: model.")
@click.option("--drop-values", is_flag=True, help="Leave out what safetensors files cannot hold.")
@click.option("--allow-pickle", is_flag=True, help="Also values that were pickled. That runs code: trust the author.")
@click.option("--overwrite", is_flag=True, help="Replace what is at TARGET.")
def command(
    session: Session,
    source: str,
    target: str,
    to: Target | None,
    keys: str | None,
    without: tuple[str, ...],
    strip: str,
    drop_values: bool,
    allow_pickle: bool,
    overwrite: bool,
) -> Status:
    """Write a checkpoint in another format.

    Formats: milepost, dcp (torch.distributed.checkpoint), torch (a file of torch.save), safetensors (a folder as
    Hugging Face writes it). Without --to: torch for a TARGET that ends in .pt, .pth, .ckpt or .bin, else milepost.
    Every byte is verified on the way, and TARGET looks whole only when it is. Of a run, the newest step is converted.
    """
    place = one_at(source, or_unhealthy=False)
    with advising(place), contextlib.closing(files_at(place)) as files:  # before torch: what is wrong is told at once
        refuse_unmatched([*without, *([] if keys is None else [keys])], keys_in(files.manifest), place.url)
    from milepost.formats.write.convert import convert  # noqa: PLC0415  # imports torch

    def rename(key: str) -> str | None:
        wanted = keys is None or fnmatch.fnmatchcase(key, keys)
        left_out = any(fnmatch.fnmatchcase(key, pattern) for pattern in without)
        return key.removeprefix(strip) if wanted and not left_out else None

    with progress_shown() as bar:
        done = convert(
            place,
            target,
            to or ("torch" if target.endswith(_TORCH) else "milepost"),
            rename=rename if keys is not None or without or strip else None,
            drop_values=drop_values,
            allow_pickle=allow_pickle,
            overwrite=overwrite,
            progress=bar,
        )
    what = f": {done.format}, {words.count(done.tensors, 'tensor')}, {words.size(done.data_bytes)}"
    print_record(done, session.json, lambda: [line(Cell(done.url, "bold"), what)])
    return Status.FINE
