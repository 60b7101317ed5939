"""Object stores through a proxy that breaks requests, and a server that dies: Milepost, and DCP with fsspec and s3fs.

Each trial saves to a place of its own on a SeaweedFS, with objects of 128 KiB, so that a small state has several. What
is there afterwards is read past the proxy. Then Milepost saves once more, and nothing but that save may be left.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import milepost
from faults.object_lab import (
    DCP,
    ERRORS,
    MILEPOST,
    NEW,
    NEWER,
    OLD,
    Library,
    ObjectLab,
    each_request,
    found,
    state,
    why_not,
    why_not_dcp,
)
from faults.proxy import Fault, Rule
from faults.rows import Counting, FaultRow, Tally
from faults.servers.seaweed import KEYS, OTHER_KEYS, KeyPair
from milepost.store import CloudOptions, CloudStore

WHOLE = frozenset({"saved, new", "loaded, whole"})
OLD_OR_NEW = WHOLE | {"raised, old", "raised, none", "raised, new"}
TITLES = {
    36: "object store: the reply is lost after the server acted",
    37: "object store: the connection is cut in the middle of a body",
    38: "object store: storms of 503 and 429",
    39: "object store: a connection stalls",
    40: "object store: a reply is too short or too long",
    41: "object store: one bit changes on the way",
    42: "object store: the server is killed and started again",
    43: "object store: credentials expire",
    46: "object store: requests take effect late",
}


def rows(full: bool, folder: Path) -> Iterator[FaultRow]:
    """Rows 36 to 43, and 46."""
    if why_not():
        for number, title in TITLES.items():
            yield FaultRow(number, title, "", Tally({}), frozenset(), note=why_not() or "")
        return
    with ObjectLab(folder) as lab:
        for row in (lost, cut, storms, stalled, wrong_lengths, flipped, killed, expired, late):
            yield row(lab, full)


def row_of(number: int, how: str, good: frozenset[str], tally: Callable[[Library], Tally], note: str = "") -> FaultRow:
    """A row from the tallies of both libraries."""
    missing = why_not_dcp()
    theirs = None if missing else tally(DCP)
    return FaultRow(number, TITLES[number], how, tally(MILEPOST), good, theirs, missing or note)


def each(lab: ObjectLab, library: Library, step: int, *faults: Fault) -> Tally:
    """Every `step`th request of a first save, of an overwrite and of a load meets each fault, one at a time."""
    counting = Counting()
    for fault in faults:
        for first in (True, False):
            for ending in each_request(
                lambda n, f=fault, i=first: lab.save_through(library, i, (Rule(f, skip=n),)), step
            ):
                counting.add(ending)
        for ending in each_request(lambda n, f=fault: lab.load_through(library, (Rule(f, skip=n),)), step):
            counting.add(ending)
    return counting.tally


def step_of(library: Library, full: bool) -> int:
    """Every request, or some. DCP gets fewer trials: each takes seconds."""
    return (1 if library.name == "milepost" else 3) if full else 7


_EACH = "one request of a first save, of an overwrite or of a load"


def lost(lab: ObjectLab, full: bool) -> FaultRow:
    """Row 36."""
    how = f"the reply to {_EACH} is thrown away and the connection closed: puts, gets, listings, deletions"
    return row_of(36, how, WHOLE, lambda library: each(lab, library, step_of(library, full), "lose_reply"))


def cut(lab: ObjectLab, full: bool) -> FaultRow:
    """Row 37."""
    how = f"the server gets half of the body of {_EACH}; or the client gets half of the reply's body"
    return row_of(
        37, how, WHOLE, lambda library: each(lab, library, step_of(library, full), "cut_request", "cut_reply")
    )


def storms(lab: ObjectLab, full: bool) -> FaultRow:
    """Row 38."""

    def tally(library: Library) -> Tally:
        counting = Counting()
        for number in range((20 if library.name == "milepost" else 6) if full else 1):
            status, code = ((503, "SlowDown"), (429, "TooManyRequests"))[number % 2]
            rule = Rule("answer", chance=0.3, times=None, status=status, code=code, retry_after_s=1)
            trials = lab.save_through(library, number % 4 < 2, (rule,)), lab.load_through(library, (rule,))
            for ending in filter(None, trials):
                counting.add(ending)
        for first in (True, False):  # it lasts longer than the patience
            rule = Rule("answer", skip=3, times=None)
            counting.add(lab.save_through(library, first, (rule,), patience_s=2.0) or "it met no fault")
        return counting.tally

    how = (
        "three of ten requests of a save or a load are answered with 503 or 429; or all requests after the third, "
        "longer than the patience of 2 s"
    )
    note = "A save through the longer storm raises, and the same call works after it."
    return row_of(38, how, WHOLE | {"raised, old", "raised, none"}, tally, note)


def stalled(lab: ObjectLab, full: bool) -> FaultRow:
    """Row 39."""
    how = f"{_EACH} gets no reply, before or after the server acted; the time limit is 1 s"
    faults: tuple[Fault, ...] = ("stall", "stall_reply") if full else ("stall_reply",)
    return row_of(39, how, WHOLE, lambda library: each(lab, library, step_of(library, full), *faults))


def wrong_lengths(lab: ObjectLab, full: bool) -> FaultRow:
    """Row 40."""
    how = f"the body of the reply to {_EACH} is half as long, or 64 bytes longer, in a well-formed reply"
    return row_of(
        40, how, WHOLE, lambda library: each(lab, library, step_of(library, full), "short_reply", "long_reply")
    )


def flipped(lab: ObjectLab, full: bool) -> FaultRow:
    """Row 41."""

    def tally(library: Library) -> Tally:
        counting = Counting()
        for _ in range(4 if full and library.name == "milepost" else 1):  # other bits each time
            for name, count in each(lab, library, step_of(library, full), "flip_request", "flip_reply").counts.items():
                counting.counts[name] += count
        return counting.tally

    how = f"one random bit of the body of {_EACH}, or of its reply, is changed"
    return row_of(41, how, OLD_OR_NEW | {"load raised"}, tally, '"load raised": the change was noticed.')


# --- the server dies


def killed(lab: ObjectLab, full: bool) -> FaultRow:
    """Row 42."""

    def tally(library: Library) -> Tally:
        chance, counting = random.Random(42), Counting()
        lab.proxy.set_latency(0.03)
        try:
            for number in range((15 if library.name == "milepost" else 8) if full else 1):
                counting.add(_kill_server(lab, library, number % 2 == 0, chance.uniform(0.0, 0.6)))
        finally:
            lab.proxy.set_latency(0.0)
        return counting.tally

    how = (
        "SIGKILL of SeaweedFS at a random moment of a save (30 ms are added to each request); it is started again with "
        "the same data at once"
    )
    return row_of(42, how, frozenset({"saved, new"}), tally)


def _kill_server(lab: ObjectLab, library: Library, first: bool, moment_s: float) -> str:
    broken, direct = lab.places(timeout_s=5.0, patience_s=60.0)
    if not first:
        library.save(state(OLD), direct)

    def kill_and_start() -> None:
        time.sleep(moment_s)
        lab.server.kill()
        lab.server.start()

    thread = threading.Thread(target=kill_and_start)
    thread.start()
    try:
        library.save(state(NEW), broken)
        ended = "saved"
    except ERRORS:
        ended = "raised"
    thread.join()
    return lab.ending(library, direct, ended, first)


# --- credentials


def expired(lab: ObjectLab, full: bool) -> FaultRow:
    """Row 43."""

    def tally(library: Library) -> Tally:
        counting = Counting()
        for renewed in (True, False) if library.name == "milepost" else (False,):
            step = 1 if full and library.name == "milepost" else 6
            for ending in each_request(lambda n, r=renewed: _expire(lab, library, r, n), step):
                counting.add(f"{ending}, {'renewed' if renewed else 'not renewed'}")
        return counting.tally

    how = (
        "from one request of an overwrite on, the server calls the credentials expired. With a callable for "
        "credentials, the next call of it gives others"
    )
    good = frozenset({"saved, new, renewed", "raised, old, not renewed", "saved, new, not renewed"})
    note = '"saved, new, not renewed": they expired when the checkpoint was committed already. DCP has fixed keys.'
    return row_of(43, how, good, tally, note)


def _expire(lab: ObjectLab, library: Library, renewed: bool, skip: int) -> str | None:
    broken, direct = lab.places(patience_s=5.0)
    library.save(state(OLD), direct)
    given: list[KeyPair] = []

    def credentials() -> dict[str, object]:
        """The first pair, and then the second one."""
        given.append(OTHER_KEYS if given else KEYS)
        return {"access_key_id": given[-1].access, "secret_access_key": given[-1].secret}

    def save() -> None:
        if renewed:
            milepost.save(state(NEW), CloudStore(broken.url, CloudOptions(credentials=credentials)))
        else:
            library.save(state(NEW), broken)

    rule = Rule("answer", header=KEYS.access, skip=skip, times=None, status=400, code="ExpiredToken")
    ended = lab.meet(save, (rule,))
    return None if ended is None else lab.ending(library, direct, "saved" if ended else "raised", first=False)


# --- late requests


def late(lab: ObjectLab, full: bool) -> FaultRow:
    """Row 46."""

    def tally(library: Library) -> Tally:
        counting = Counting()
        for lasts in (1, None):
            for again in (False, True):
                step = step_of(library, full)
                trial = lambda n, o=lasts, a=again: _late(lab, library, Rule("late", skip=n, times=o), a)  # noqa: E731
                for ending in each_request(trial, step):
                    counting.add(ending)
        return counting.tally

    how = (
        "one request of an overwrite, or all from there on, gets no reply, and reaches the server when the save has "
        "ended; in half of the trials after another save of the same place"
    )
    good = {f"{said}, {there}" for said in ("saved", "raised") for there in ("newer", "then new", "then old")}
    note = (
        '"then": what loads when all requests have arrived; "newer": the other save\'s. A save that raises may still '
        "be committed by a late request: its error says so."
    )
    return row_of(46, how, frozenset(good - {"saved, then old"}), tally, note)


def _late(lab: ObjectLab, library: Library, rule: Rule, again: bool) -> str | None:
    broken, direct = lab.places(patience_s=0.5)
    library.save(state(OLD), direct)
    ended = lab.meet(lambda: library.save(state(NEW), broken), (rule,))
    if ended is None:
        return None
    if again:
        library.save(state(NEWER), direct)
    lab.proxy.release()
    now = found(library, direct)
    left = lab.left_by_the_next(library, direct) if library.name == "milepost" else ""
    lab.server.remove(direct.prefix)
    expected = "newer" if again else f"then {now}"
    return f"{'saved' if ended else 'raised'}, {expected if not again or now == 'newer' else f'{now} for newer'}{left}"
