"""Verifying a step before it is loaded: the ranks share the files."""

from milepost.checkpoint import files_at
from milepost.comm import Comm
from milepost.data.transfer import Meter
from milepost.errors import CheckpointDamaged
from milepost.events.operation import moved
from milepost.loading.options import LoadKeywords, make_load_options
from milepost.loading.pipeline import look_healthy
from milepost.store import Store

_DAMAGES_SHOWN = 20


def verify_share(comm: Comm, place: Store, options: LoadKeywords) -> None:
    """Read and check this rank's share of the files. Raises CheckpointDamaged with every damaged place."""
    files = files_at(place)
    if not options.get("allow_unhealthy", True):  # else the load itself tells of it
        look_healthy(place.url, files.manifest, allow_unhealthy=False)
    transfer = make_load_options(**options).transfer
    reasons: list[str] = []
    mine = files.numbers[comm.rank :: comm.size]
    size_bytes = sum(files.record(number).size_bytes for number in mine)
    meter = Meter("verify", place.url, options.get("progress") if comm.rank == comm.coordinator else None)
    meter.expect(size_bytes)
    try:
        for number in mine:
            reasons.extend(damage.reason for damage in files.of(number).check_all(transfer, meter))
    finally:
        files.close()
    meter.finish()
    moved(size_bytes)
    if reasons:
        shown = "\n  ".join(reasons[:_DAMAGES_SHOWN])
        raise CheckpointDamaged(f"{len(reasons)} damaged blocks:\n  {shown}")
