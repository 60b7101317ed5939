"""One checkpoint, from one place to another: what is there already, and the commit of what is not."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from milepost.checkpoint import files_at
from milepost.commit.attempt import Attempt, take_aim
from milepost.commit.beside import indices_beside
from milepost.commit.find import newest_generation
from milepost.copying.equality import holds_the_same
from milepost.copying.file_copy import FileCopy
from milepost.copying.flow import Flow, flow_between
from milepost.core.manifest import Manifest, ShardFile
from milepost.data.read import Files
from milepost.data.transfer import HOST_MEMORY_BYTES, Meter, Transfer, new_pages, run_all
from milepost.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, InvalidRequest, StorageError
from milepost.events.operation import moved, operating, phasing
from milepost.store import Store

_TRIES = 4
"""How often a copy starts because a newer save replaced what it was reading, as a load does."""
Found = Literal["nothing", "the same", "another"]


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """How copies are made."""

    overwrite: bool = False
    host_memory_bytes: int = HOST_MEMORY_BYTES
    transfer: Transfer | None = None


@dataclass(frozen=True, slots=True)
class CheckpointCopy:
    """What came of one copy. `made`: False where the same was there already."""

    made: bool
    generation: int
    data_bytes: int
    files: int
    seconds: float


def copy_checkpoint(source: Store, target: Store, options: CopyOptions, meter: Meter) -> CheckpointCopy:
    """Copy the newest checkpoint at `source` to `target`, unless the same is there. Atomic and durable, as a save is.

    Every byte is checked on its way. What a newer save replaces meanwhile is given up, and that save is copied. Raises
    InvalidRequest if another checkpoint is there and may not be replaced, CheckpointNotFound, CheckpointDamaged,
    StorageError, SaveConflict.
    """
    for left in reversed(range(_TRIES)):
        with open_own(source) as files:
            try:
                return _copy(files, target, options, meter)
            except CheckpointDamaged:
                newest = newest_generation(source)
                if not newest:
                    raise CheckpointNotFound(f"{source.url} was removed while it was copied") from None
                if not left or newest <= files.manifest.generation:
                    raise
    raise AssertionError


@contextlib.contextmanager
def open_own(store: Store) -> Iterator[Files]:
    """The files of the newest checkpoint there. Raises InvalidRequest for one of another format."""
    files = files_at(store)
    try:
        refuse_foreign(store.url, files.manifest.format, ours=files.manifest.generation > 0)
        yield files
    finally:
        files.close()


def refuse_foreign(url: str, format_name: str, *, ours: bool = False) -> None:
    """Raise InvalidRequest for a checkpoint of another format."""
    if not ours:
        raise InvalidRequest(
            f"{url} is a checkpoint of the format {format_name}, which has no checksums to copy it by. Convert it "
            "(milepost.convert, or `milepost convert`), or copy its files with another tool"
        )


def what_is_there(files: Files, target: Store) -> Found:
    """What is at the place of a copy. A damaged checkpoint is another one."""
    try:
        found = files_at(target)
    except CheckpointNotFound:
        return "nothing"
    except StorageError:
        raise
    except CheckpointError:
        return "another"
    with contextlib.closing(found):
        same = found.manifest.generation > 0 and holds_the_same(files, found, target)
        return "the same" if same else "another"


def refuse_another(found: Found, target: Store, options: CopyOptions) -> None:
    """Raise InvalidRequest if a copy would replace another checkpoint, and may not."""
    if not options.overwrite and (found == "another" or indices_beside(target)):
        raise InvalidRequest(
            f"{target.url} holds another checkpoint; pass overwrite=True (--overwrite) to replace it, or copy elsewhere"
        )


def _copy(files: Files, target: Store, options: CopyOptions, meter: Meter) -> CheckpointCopy:
    manifest, began = files.manifest, time.monotonic()
    data_bytes = sum(manifest.parts_of(file).data_bytes for file in manifest.stored)
    there = what_is_there(files, target)
    if there == "the same":
        return CheckpointCopy(False, newest_generation(target), data_bytes, len(manifest.stored), 0.0)
    refuse_another(there, target, options)
    with operating("copy", target.url) as operation:
        aim = take_aim(target, overwrite=options.overwrite)
        ranks = tuple(file.rank for file in manifest.files)
        attempt = Attempt(target, aim, 0, 1, decides=True, files_of=ranks)
        try:
            with phasing("writing"), attempt.writing():
                written = _write(files, attempt, options, meter)
                moved(data_bytes)
            attempt.commit_copy(manifest, written)
        except BaseException as error:
            attempt.fail(error)
            raise
        operation.commit(aim.generation, data_bytes)
    return CheckpointCopy(True, aim.generation, data_bytes, len(manifest.stored), time.monotonic() - began)


def _write(files: Files, attempt: Attempt, options: CopyOptions, meter: Meter) -> tuple[ShardFile, ...]:
    """Copy all shard files, many blocks of many files at the same time."""
    manifest, target = files.manifest, attempt.store
    flow = _flow(files, target, options, manifest)
    copies = [FileCopy(files, number, target, attempt.aim.save_id, flow) for number in files.numbers]

    def make_worker() -> Callable[[tuple[FileCopy, int]], None]:
        memory = memoryview(new_pages(flow.block_bytes))

        def move(job: tuple[FileCopy, int]) -> None:
            copy, start = job
            meter.add(copy.move(start, memory))

        return move

    jobs = ((copy, start) for copy in copies for start in copy.starts())
    apart = bool(files.traits.requests or target.traits.requests)
    try:
        run_all(jobs, make_worker, flow.threads, meter, apart=apart)
    finally:
        for copy in copies:
            copy.abort()
    return tuple(copy.written for copy in copies if copy.written is not None)


def _flow(files: Files, target: Store, options: CopyOptions, manifest: Manifest) -> Flow:
    sizes = [manifest.parts_of(file).data_bytes for file in manifest.stored]
    memory, checked = options.host_memory_bytes, manifest.block_bytes
    return flow_between(files.traits, target.traits, options.transfer, memory, sizes, checked)
