"""The checks of a place, in order: first whether it can be used at all, then what it promises, then how fast it is."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from milepost.comm import Comm
from milepost.core.limits import MIB
from milepost.doctor import folder_checks, store_checks
from milepost.doctor.held import check_held
from milepost.doctor.ranks import look_together
from milepost.doctor.records import Diagnosis, PlaceCheck, RankView
from milepost.doctor.scratch import ScratchCorner, scratch_in
from milepost.errors import CheckpointError, InvalidRequest
from milepost.store import LocalStore, Location, Store, store_at
from milepost.store.advice import explain
from milepost.store.read_only import refuse_read_only

SIZE_BYTES = 256 * MIB
"""How much is written to see how fast that is, unless the caller says otherwise."""
_ROOM_BYTES = 1024 * MIB
"""How much room is asked for, to meet a quota."""
_Trial = tuple[str, Callable[[], PlaceCheck | list[PlaceCheck]]]
"""The name of a check, for the case that it raises, and the check."""


def diagnose(path: Location, *, size_bytes: int = SIZE_BYTES, comm: Comm | None = None) -> Diagnosis | None:
    """Whether a place is fit to hold checkpoints. Everything that is written for that is removed again.

    `size_bytes`: how much to write, and read, to see how fast that is; for some seconds at most. `comm`: the ranks of a
    job, each of which calls this; the coordinator gets the diagnosis, and the others None. What is wrong with the place
    is in the diagnosis, and not raised. Raises RanksMissing, and InvalidRequest for what is no place.
    """
    place = store_at(path)
    views: tuple[RankView, ...] = ()
    together: Sequence[PlaceCheck] = ()
    if comm is not None and comm.size > 1:
        views, together = look_together(place, comm)
        if comm.rank != comm.coordinator:
            return None
    checks = (*_checks_of(place, size_bytes), *together)
    return Diagnosis(
        url=place.url,
        kind="folder" if isinstance(place, LocalStore) else "object store" if place.traits.part_bytes else "other",
        fit=all(check.state != "fail" for check in checks),
        checks=checks,
        ranks=views,
    )


def _checks_of(place: Store, size_bytes: int) -> Iterator[PlaceCheck]:
    first = [check for trial in _before_writing(place) for check in _tried(trial)]
    yield from first
    if all(check.state != "fail" for check in first):
        yield from _with_writing(place, size_bytes)
    else:
        yield PlaceCheck(name="further checks", state="skipped", found="not tried")
    if all(check.state != "fail" or check.name != "reachable" for check in first):
        yield from _tried(("held", lambda: check_held(place)))


def _with_writing(place: Store, size_bytes: int) -> Iterator[PlaceCheck]:
    try:
        with scratch_in(place, "doctor") as corner:
            if corner.folder is not None:
                yield PlaceCheck(name="writable", state="ok", found="folders and files can be made here")
            for trial in _trials(place, corner, size_bytes):
                yield from _tried(trial)
    except (CheckpointError, OSError) as error:
        yield _failed("writable", error)
        yield PlaceCheck(name="further checks", state="skipped", found="nothing can be written")


def _before_writing(place: Store) -> Iterator[_Trial]:
    yield "writable", lambda: _refused(place)
    if isinstance(place, LocalStore):
        yield "reachable", lambda: _check_path(place.root)
        yield "file system", lambda: folder_checks.check_file_system(_nearest(place.root))
        yield "limits", folder_checks.check_limits
    elif place.traits.part_bytes:
        from milepost.doctor.object_checks import check_answer  # noqa: PLC0415  # what talks to a network is slow

        yield "reachable", lambda: check_answer(place)


def _trials(place: Store, corner: ScratchCorner, size_bytes: int) -> Iterator[_Trial]:
    store, folder = corner.store, corner.folder
    if folder is not None:
        yield "links", partial(folder_checks.check_links, folder)
        yield "sync", partial(folder_checks.check_sync, folder)
        yield "space", partial(folder_checks.check_space, folder, _ROOM_BYTES)
    yield "atomic create", partial(store_checks.check_exclusive, store)
    yield "listing", partial(store_checks.check_listing, store)
    yield "delete", partial(store_checks.check_delete, store)
    yield "small writes", partial(store_checks.check_small_writes, store)
    if store.traits.part_bytes:
        from milepost.doctor import object_checks  # noqa: PLC0415

        yield "requests", partial(object_checks.check_requests, store)
        yield "clock", partial(object_checks.check_service_clock, place, store)
    if folder is not None:
        yield "clock", partial(folder_checks.check_clock, folder)
        yield "names", partial(folder_checks.check_names, folder)
        yield "direct I/O", partial(folder_checks.check_direct, folder)
        yield "memory map", partial(folder_checks.check_map, folder)
    yield "large writes", partial(store_checks.check_speed, store, size_bytes)


def _refused(place: Store) -> list[PlaceCheck]:
    """Nothing for a place that may be written to."""
    try:
        refuse_read_only(place)
    except InvalidRequest as error:
        return [_failed("writable", error)]
    return []


def _check_path(root: Path) -> PlaceCheck:
    nearest = _nearest(root)
    if not nearest.is_dir():
        advice = "Name a folder, or move the file away"
        return PlaceCheck(name="reachable", state="fail", found=f"{nearest} is no folder", advice=advice)
    found = "a folder" if nearest == root else f"not there yet: it would be made in {nearest}"
    return PlaceCheck(name="reachable", state="ok", found=found)


def _nearest(path: Path) -> Path:
    """The path, or the nearest above it that exists, as far as this user may see."""
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path


def _tried(trial: _Trial) -> list[PlaceCheck]:
    name, check = trial
    try:
        found = check()
    except (CheckpointError, OSError) as error:
        return [_failed(name, error)]
    return found if isinstance(found, list) else [found]


def _failed(name: str, error: CheckpointError | OSError) -> PlaceCheck:
    """What an error says. Those of stores say themselves what to do."""
    where = "" if isinstance(error, CheckpointError) or not error.filename else f" ({error.filename})"
    found = str(error) if isinstance(error, CheckpointError) else explain(error)
    return PlaceCheck(name=name, state="fail", found=found + where)
