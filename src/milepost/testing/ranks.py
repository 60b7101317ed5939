"""Ranks as threads of one process, and ranks that fail or stall at a chosen step."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from milepost.comm import BoardComm, Comm, MemoryBoard, Phase
from milepost.core.caller import Caller

T = TypeVar("T")


def run_ranks(
    world: int,
    work: Callable[[Comm], T],
    timeout_s: float = 60.0,
    trouble: Mapping[int, Mapping[str, Callable[[], None]]] | None = None,
) -> list[T]:
    """Run `work(comm)` on `world` ranks that are threads of this process, and return their results in order of rank.

    Pass the comm to `save` and `load` as `process_group`. `timeout_s` is the longest that a rank waits for the others.
    `trouble` makes ranks fail or stall: `{2: {"writing": stall}}` calls `stall()` when rank 2 reaches that step (see
    `TroubledComm`). If ranks raise, the error of the lowest one is raised after all have ended, with those of the
    others as notes.

    >>> def work(comm):
    ...     half = milepost.Sharded((4,), {(2 * comm.rank,): torch.full((2,), float(comm.rank))})
    ...     _ = milepost.save({"w": half}, "memory://ranks", process_group=comm)
    ...     return comm.rank
    >>> milepost.testing.run_ranks(2, work)
    [0, 1]
    >>> milepost.open("memory://ranks")["w"][:]
    tensor([0., 0., 1., 1.])
    """
    board = MemoryBoard()
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        comm: Comm = BoardComm(board, rank, world, timeout_s)
        try:
            results[rank] = work(TroubledComm(comm, trouble[rank]) if trouble and rank in trouble else comm)
        except BaseException as error:  # noqa: BLE001  # raised below, in the caller's thread
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
    """A comm that calls `hooks[step]()` when this rank reaches a step, before it sends anything to the others.

    A hook may raise (the rank leaves without a word), sleep (the rank is late), or kill the process. Steps of a save:
    "starting", "describing the state", "agreeing on the layout", "writing", "committing"; of a load: "opening",
    "matching", "sharing out", "reading", "sending", "applying". `run_ranks` makes one for each rank in `trouble`.

    >>> def leave():
    ...     raise MemoryError
    >>> def work(comm):
    ...     try:
    ...         milepost.save({"step": 7}, "memory://trouble", process_group=comm)
    ...     except (milepost.RanksMissing, MemoryError) as error:
    ...         return type(error).__name__
    >>> milepost.testing.run_ranks(2, work, timeout_s=0.5, trouble={1: {"writing": leave}})
    ['RanksMissing', 'MemoryError']
    """

    def __init__(self, inner: Comm, hooks: Mapping[str, Callable[[], None]]) -> None:
        self._inner, self._hooks, self._silent = inner, hooks, False

    def _reach(self, phase: Phase) -> None:
        hook = self._hooks.get(phase.step)
        if hook is not None:
            self._silent = True
            hook()
            self._silent = False

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return self._inner.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
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
        """The longest time that this rank waits for the others."""
        return self._inner.timeout_s

    def begin(self, caller: Caller) -> bool:
        """Begin a call; False within another one."""
        self._silent = False
        return self._inner.begin(caller)

    def end(self, caller: Caller) -> None:
        """End a call."""
        self._inner.end(caller)

    def meet(self, phase: Phase, payload: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """Run the hook of this step, then meet."""
        self._reach(phase)
        return self._inner.meet(phase, payload, decide)

    def announce(self, phase: Phase, note: bytes | None) -> bytes:
        """Run the hook of this step, then announce."""
        self._reach(phase)
        return self._inner.announce(phase, note)

    def hand_out(self, phase: Phase, notes: list[bytes] | None) -> bytes:
        """Run the hook of this step, then hand out."""
        self._reach(phase)
        return self._inner.hand_out(phase, notes)

    def leave(self, phase: Phase, payload: bytes) -> None:
        """Leave, without a hook."""
        self._inner.leave(phase, payload)

    def withdraw(self, phase: Phase, payload: bytes) -> None:
        """Withdraw; but not after a hook has raised, for such a rank leaves without a word."""
        if not self._silent:
            self._inner.withdraw(phase, payload)

    def post(self, name: str, note: bytes) -> None:
        """Post, without a hook."""
        self._inner.post(name, note)

    def look(self, names: list[str], timeout_s: float) -> list[bytes | None]:
        """Look, without a hook."""
        return self._inner.look(names, timeout_s)

    def index_of(self, global_rank: int) -> int | None:
        """The number here of a rank of the whole job."""
        return self._inner.index_of(global_rank)

    def secondary(self, purpose: str) -> "TroubledComm":
        """The same ranks with the same hooks, for calls that run beside others."""
        return TroubledComm(self._inner.secondary(purpose), self._hooks)

    def close(self) -> None:
        """Close, without a hook."""
        self._inner.close()
