"""When a checkpoint was last verified: a note beside its manifest, whose name says it all.

The note of generation 3 is `manifest-00000003.json.verified-20260131T120000Z`. It is no manifest, so readers ignore it.
It starts with the name of its manifest, so a newer save sweeps it, and a removal removes it.
"""

import contextlib
import re
from collections.abc import Iterable
from datetime import UTC, datetime

from milepost.commit.find import can_be_opened
from milepost.core.manifest import manifest_name
from milepost.errors import AlreadyExists, CheckpointNotFound
from milepost.store import Location, Store
from milepost.store.location import store_to_save

_NOTE = re.compile(r"(manifest-[0-9]{8}\.json)\.verified-([0-9]{8}T[0-9]{6}Z)")
_TIME = "%Y%m%dT%H%M%SZ"


def record_verified(path: Location, generation: int) -> str:
    """Note that every byte of this generation was found to be what was saved, now. Gives the time, as in ISO 8601.

    Call it after `Checkpoint.verify` found no damage. Older notes are removed. Raises CheckpointNotFound if the
    checkpoint is gone meanwhile.
    """
    store, now = store_to_save(path), datetime.now(UTC)
    own = f"{manifest_name(generation)}.verified-"
    note, older = f"{own}{now.strftime(_TIME)}", list(store.list(own))
    _refuse_gone(store, generation)
    with contextlib.suppress(AlreadyExists):  # in the same second
        store.create(note, b"")
    try:
        _refuse_gone(store, generation)
    except CheckpointNotFound:
        store.delete(note)
        raise
    store.delete(*(name for name in older if name != note))
    return now.isoformat(timespec="seconds")


def _refuse_gone(store: Store, generation: int) -> None:
    if not can_be_opened(store, manifest_name(generation)):
        raise CheckpointNotFound(
            f"generation {generation} of {store.url} was replaced or removed while it was verified"
        )


def verified_at(names: Iterable[str], generation: int) -> str | None:
    """When a generation was last verified, as in ISO 8601, by the names at its place; None: no note says so."""
    found = (match for match in map(_NOTE.fullmatch, names) if match and match[1] == manifest_name(generation))
    last = max((match[2] for match in found), default=None)
    if last is None:
        return None
    try:
        return datetime.strptime(last, _TIME).replace(tzinfo=UTC).isoformat(timespec="seconds")
    except ValueError:
        return None  # the 99th of a month
