"""What an object store is like: whether it answers, how fast, and what its clock says."""

import statistics
import time
from collections.abc import Callable

from milepost.doctor.folder_checks import told_clock
from milepost.doctor.records import PlaceCheck
from milepost.doctor.store_checks import content_of
from milepost.store import Store
from milepost.store.cloud.store import CloudStore

_ASKED = 10
_SLOW_S = 0.5


def check_answer(place: Store) -> PlaceCheck:
    """Whether the service answers, with these credentials. Raises StorageError, which says what is wrong."""
    began = time.perf_counter()
    next(iter(place.list("", shallow=True)), None)
    seconds = time.perf_counter() - began
    settings = ""
    if isinstance(place, CloudStore):
        told = {"endpoint": place.options.endpoint, "region": place.options.region, "account": place.options.account}
        settings = "".join(f", {name} {value}" for name, value in told.items() if value)
    return PlaceCheck(
        name="reachable",
        state="ok",
        found=f"it lists after {seconds:.2f} s{settings}",
        numbers={"first_s": round(seconds, 6)},
    )


def check_requests(store: Store) -> PlaceCheck:
    """How long small reads and listings take."""
    store.create("asked", b"1" * 100)
    reads = [_timed(lambda: content_of(store, "asked")) for _ in range(_ASKED)]
    lists = [_timed(lambda: list(store.list("asked"))) for _ in range(_ASKED)]
    read, listed = statistics.median(reads), statistics.median(lists)
    slow = max(read, listed) > _SLOW_S
    return PlaceCheck(
        name="requests",
        state="warn" if slow else "ok",
        found=f"a small read {read * 1000:.0f} ms, a listing {listed * 1000:.0f} ms (median of {_ASKED})",
        advice="Is the bucket in another region than this machine?" if slow else "",
        numbers={"read_s": round(read, 6), "list_s": round(listed, 6)},
    )


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def check_service_clock(place: Store, corner: Store) -> list[PlaceCheck]:
    """Whether the clock of the service is that of this machine. Services refuse what was signed by a wrong clock."""
    if not isinstance(place, CloudStore):
        return []
    before = time.time()
    corner.create("clock", b"1")
    after = time.time()
    written = place.modified(corner.url.removeprefix(f"{place.url}/") + "/clock").timestamp()
    # The service tells whole seconds, rounded down.
    ahead = written - after if written > after else written + 1 - before if written + 1 < before else 0.0
    return [told_clock(ahead, "service")]
