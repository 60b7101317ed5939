"""Whether all ranks of a job see the same place: each leaves a file there, and looks for those of the others.

The ranks talk through the job's key-value store, not through the place. So they find out also where each sees a disk of
its own. The place is used as a save uses it: files are created by name, and looked for by listing and by name.
"""

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence

import msgspec

from milepost.comm import Announcement, Call, Comm, Meeting, broadcast, calling, meet, together
from milepost.commit.find import can_be_opened
from milepost.core.ranks import show_ranks
from milepost.core.wire import Wire
from milepost.doctor.folder_checks import clock_of
from milepost.doctor.mounts import file_system_of
from milepost.doctor.records import PlaceCheck, RankView
from milepost.doctor.scratch import ScratchCorner, scratch_in, scratch_name
from milepost.doctor.store_checks import content_of
from milepost.errors import AlreadyExists, CheckpointError
from milepost.store import LocalStore, Store

PATIENCE_S = 10.0
"""How long a rank looks for the files of the others: the listing of a network file system may be old."""
_PAUSE_S = 0.05
_APART_S = 2.0
_SHOWN = 5


class _SeenPlace(msgspec.Struct, frozen=True):
    """What a rank saw, and whether it was told that it created the name which all of them create."""

    view: RankView
    won: bool


_NAMING = Announcement("naming", Wire(str))
_SEEING = Meeting("looking", Wire(_SeenPlace), Wire(list[_SeenPlace]))


def look_together(place: Store, comm: Comm) -> tuple[tuple[RankView, ...], list[PlaceCheck]]:
    """Called on every rank: what each of them sees of the place, and what that means. The same on each.

    Raises RanksMissing, which names ranks that do not arrive.
    """
    call, decides = Call("checking", place.url), comm.rank == comm.coordinator
    with calling(comm, call), contextlib.ExitStack() as stack:
        mine = _Corner(place, comm.rank)
        own_name = scratch_name("ranks")
        if decides:  # first: it makes the folders that are missing, and removes them at last
            mine.enter(stack, own_name)
        name = broadcast(comm, call, _NAMING, lambda: own_name)
        if not decides:
            mine.enter(stack, name)
        together(comm, call, "marking", mine.mark)
        seen = meet(comm, call, _SEEING, lambda: mine.look(comm.size), lambda notes: notes)
        if not decides:
            stack.close()
        together(comm, call, "leaving", lambda: None)
    return tuple(one.view for one in seen), [_shared(seen), *_clocks(seen)]


class _Corner:
    """One rank's view of the corner that all of them use. What goes wrong there is kept for the others to hear."""

    def __init__(self, place: Store, rank: int) -> None:
        self._place, self._rank = place, rank
        self._scratch: ScratchCorner | None = None
        self._error, self._won = "", False

    def enter(self, stack: contextlib.ExitStack, name: str) -> None:
        """Make the corner, or find it there."""
        with self._kept():
            self._scratch = stack.enter_context(scratch_in(self._place, "ranks", name))

    def mark(self) -> None:
        """Leave a file of this rank."""
        if self._scratch is not None:
            with self._kept():
                self._scratch.store.create(_mark(self._rank), socket.gethostname().encode())

    def look(self, world: int) -> _SeenPlace:
        """Create what all create, and look for the files of all ranks."""
        unseen: tuple[int, ...] = ()
        clock_s = None
        if self._scratch is not None and not self._error:
            with self._kept():
                self._won = _create_one(self._scratch.store, self._rank)
                unseen = _unseen(self._scratch.store, world)
                if self._scratch.folder is not None:
                    clock_s = round(clock_of(self._scratch.folder / f"clock-{self._rank}"), 3)
        told = file_system_of(self._place.root) if isinstance(self._place, LocalStore) else None
        view = RankView(
            rank=self._rank,
            host=socket.gethostname(),
            file_system=told.text if told is not None else "",
            unseen=unseen,
            clock_s=clock_s,
            error=self._error,
        )
        return _SeenPlace(view, self._won)

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, OSError) as error:
            self._error = self._error or str(error)


def _mark(rank: int) -> str:
    return f"rank-{rank:05d}"


def _create_one(store: Store, rank: int) -> bool:
    """Create the name that all ranks create; whether this rank did."""
    mine = _mark(rank).encode()
    try:
        store.create("one", mine)
    except AlreadyExists:
        return content_of(store, "one") == mine  # the reply was lost
    return True


def _unseen(store: Store, world: int) -> tuple[int, ...]:
    """The ranks whose files are not there, after some patience."""
    missing = set(range(world))
    give_up = time.monotonic() + PATIENCE_S
    while True:
        listed = set(store.list("rank-"))
        missing = {rank for rank in missing if _mark(rank) not in listed and not can_be_opened(store, _mark(rank))}
        if not missing or time.monotonic() > give_up:
            return tuple(sorted(missing))
        time.sleep(_PAUSE_S)


def _shared(seen: Sequence[_SeenPlace]) -> PlaceCheck:
    views = [one.view for one in seen]
    hosts = len({view.host for view in views})
    problems = [f"rank {view.rank} on {view.host}: {view.error}" for view in views if view.error][:_SHOWN]
    problems += _blind(views)[:_SHOWN]
    winners = [one.view.rank for one in seen if one.won]
    if problems:
        advice = "Mount one file system on all machines, at one path; or save to an object store"
    elif len(winners) != 1:
        problems = [f"of {len(views)} ranks that created one name, {len(winners)} were told that they did"]
        advice = "Do not save here: two jobs would destroy each other's checkpoints"
    else:
        found = f"all {len(views)} ranks on {hosts} machine{'s' * (hosts > 1)} see each other's files"
        return PlaceCheck(name="shared by all ranks", state="ok", found=found)
    return PlaceCheck(name="shared by all ranks", state="fail", found="; ".join(problems), advice=advice)


def _blind(views: Sequence[RankView]) -> list[str]:
    """Which ranks do not see which others, those that miss the same together."""
    groups: dict[tuple[int, ...], list[RankView]] = {}
    for view in views:
        if view.unseen and not view.error:
            groups.setdefault(view.unseen, []).append(view)
    lines = []
    for unseen, blind in groups.items():
        hosts = ", ".join(sorted({view.host for view in blind})[:_SHOWN])
        who = show_ranks([view.rank for view in blind])
        lines.append(f"{who} on {hosts} {'does' if len(blind) == 1 else 'do'} not see what {show_ranks(unseen)} wrote")
    return lines


def _clocks(seen: Sequence[_SeenPlace]) -> list[PlaceCheck]:
    """Whether the clocks of the machines agree: each is compared with that of the file system."""
    clocks = {one.view.host: one.view.clock_s for one in seen if one.view.clock_s is not None}
    if len(clocks) < 2:
        return []
    first, last = min(clocks, key=lambda host: clocks[host]), max(clocks, key=lambda host: clocks[host])
    apart = (clocks[last] or 0.0) - (clocks[first] or 0.0)
    numbers = {"apart_s": round(apart, 3)}
    if apart <= _APART_S:
        return [PlaceCheck(name="clocks of all machines", state="ok", found="agree", numbers=numbers)]
    # Where the file system seems furthest behind, the machine's own clock is furthest ahead.
    found = f"that of {first} is {apart:,.1f} s ahead of that of {last}"
    return [
        PlaceCheck(
            name="clocks of all machines",
            state="warn",
            found=found,
            advice="Ages of checkpoints will be wrong, and no promise depends on them. Run NTP on all machines",
            numbers=numbers,
        )
    ]
