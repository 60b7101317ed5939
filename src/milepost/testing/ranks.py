"""Ranks as threads of one process, and ranks that get into trouble at a chosen step."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from milepost.comm import BoardComm, Comm, MemoryBoard, Phase

T = TypeVar("T")


def run_ranks(
    world: int,
    work: Callable[[Comm], T],
    timeout_s: float = 60.0,
    trouble: Mapping[int, Mapping[str, Callable[[], None]]] | None = None,
) -> list[T]:
    """Run `work(comm)` on `world` ranks that are threads of this process, and give their results in order.

    Pass the comm to `save` and `load` as `process_group`. `trouble` says, for some ranks, what happens at which step:
    `{2: {"writing": stall}}` calls `stall()` on rank 2 when it comes to that step (see `TroubledComm`). If ranks raise,
    the lowest rank's error is raised once all have ended; the others are its notes.
    """
    board = MemoryBoard()
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        comm: Comm = BoardComm(board, rank, world, timeout_s)
        try:
            results[rank] = work(TroubledComm(comm, trouble[rank]) if trouble and rank in trouble else comm)
        except BaseException as error:  # noqa: BLE001  # handed to the caller below
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        first = errors[min(errors)]
        for rank, error in sorted(errors.items()):
            first.add_note(f"rank {rank}: {type(error).__name__}: {error}")
        raise first
    return [results[rank] for rank in range(world)]


class TroubledComm:
    """A comm that calls `hooks[step]()` when this rank comes to a step, before it says anything to the others.

    A hook may raise (the rank leaves without a word), sleep (it is late), or kill the process. Steps of a save:
    "starting", "describing the state", "agreeing on the layout", "writing", "committing"; of a load: "opening",
    "matching", "sharing out", "reading", "sending", "applying".
    """

    def __init__(self, inner: Comm, hooks: Mapping[str, Callable[[], None]]) -> None:
        self._inner, self._hooks = inner, hooks

    def _come_to(self, phase: Phase) -> None:
        hook = self._hooks.get(phase.step)
        if hook is not None:
            hook()

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return self._inner.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._inner.size

    @property
    def coordinator(self) -> int:
        """The rank that collects and decides."""
        return self._inner.coordinator

    @property
    def group(self) -> Any:
        """The process group of these ranks, if there is one."""
        return self._inner.group

    @property
    def timeout_s(self) -> float:
        """The longest that this rank waits for the others."""
        return self._inner.timeout_s

    def meet(self, phase: Phase, payload: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """Run the hook of this step, then meet."""
        self._come_to(phase)
        return self._inner.meet(phase, payload, decide)

    def announce(self, phase: Phase, note: bytes | None) -> bytes:
        """Run the hook of this step, then announce."""
        self._come_to(phase)
        return self._inner.announce(phase, note)

    def hand_out(self, phase: Phase, notes: list[bytes] | None) -> bytes:
        """Run the hook of this step, then hand out."""
        self._come_to(phase)
        return self._inner.hand_out(phase, notes)

    def leave(self, phase: Phase, payload: bytes) -> None:
        """Leave as any rank would."""
        self._inner.leave(phase, payload)

    def post(self, name: str, note: bytes) -> None:
        """Post as any rank would."""
        self._inner.post(name, note)

    def look(self, names: list[str], timeout_s: float) -> list[bytes | None]:
        """Look as any rank would."""
        return self._inner.look(names, timeout_s)

    def index_of(self, global_rank: int) -> int | None:
        """The rank, counted here, of a rank of the whole job."""
        return self._inner.index_of(global_rank)

    def secondary(self) -> "TroubledComm":
        """The same ranks, with the same trouble, for calls that run beside others."""
        return TroubledComm(self._inner.secondary(), self._hooks)
