"""Saves in a process: the saving processes of all ranks, started once, and again after one has died."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from milepost.comm import Call, Comm, Meeting, meet, together
from milepost.core.wire import Wire
from milepost.dcp._engine.executors import staged_state
from milepost.dcp._engine.save_process import GroupPlace, ProcessRequest, SaveProcess
from milepost.dcp.api import checkpoint_exception
from milepost.errors import CheckpointError, WriterDied
from milepost.planning.records import Metadata

_LOOKING = Meeting("looking at the saving processes", Wire(bool), Wire(bool))
_CALL = Call("saving in", "a process")
_LOOK_S = 1.0
_DIED = "died"


class GroupProcess:
    """The saving process of this rank for one group of ranks. Saves of the group take turns."""

    def __init__(self) -> None:
        self.process: SaveProcess | None = None

    def save(
        self, staged: Any, request: ProcessRequest, comm: Comm, meet_at: Callable[[Comm], GroupPlace | None]
    ) -> Metadata:
        """Save what is staged, or will be. `meet_at`: chooses where new processes meet; all ranks call it together.

        `comm`: the ranks, apart from the calls in front. Raises what the saving process of this rank met.
        """
        try:
            process = self._at_work(comm, meet_at)
            try:
                request.staged_state_dict = staged_state(staged)
            except Exception as error:  # noqa: BLE001  # raised by the process, on every rank
                process.refuse(error, request.no_dist)
            else:
                process.begin(request)
            return self._outcome(process, comm)
        finally:
            with contextlib.suppress(CheckpointError):  # the job's store may be gone
                comm.close()

    def _at_work(self, comm: Comm, meet_at: Callable[[Comm], GroupPlace | None]) -> SaveProcess:
        """The process, a new one if that of any rank is gone: they form a group, which none can join later."""
        old = self.process
        if meet(comm, _CALL, _LOOKING, lambda: old is not None and old.is_alive, all) and old is not None:
            return old
        if old is not None:
            old.close()
        self.process = None
        place = meet_at(comm)
        started: list[SaveProcess] = []
        own: list[Exception] = []

        def start() -> None:
            try:
                started.append(SaveProcess(place))
            except Exception as error:
                own.append(error)
                raise

        try:
            together(comm, _CALL, "starting the saving processes", start)
        except CheckpointError as error:
            for process in started:
                process.kill()
            raise (own[0] if own else checkpoint_exception("start", error, comm)) from None
        self.process = started[0]
        return started[0]

    def _outcome(self, process: SaveProcess, comm: Comm) -> Metadata:
        """Wait for the end of the save. The death of one process ends the others: they wait for it."""
        try:
            while (metadata := process.outcome(_LOOK_S)) is None:
                (died,) = comm.look([_DIED], 0.0)
                if died is not None:
                    process.kill()
                    raise WriterDied(died.decode())
        except WriterDied as error:
            with contextlib.suppress(CheckpointError):
                comm.post(_DIED, f"rank {comm.rank}: {error}".encode())
            raise
        return metadata


class GroupProcesses:
    """The saving processes of this rank, by the ranks of their groups."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._groups: dict[tuple[int, ...], GroupProcess] = {}

    def of(self, process_group: Any, no_dist: bool) -> GroupProcess:
        """The one for this group; with `no_dist`, or without a group, one that works alone."""
        if self._process != os.getpid():  # a fork has none of its parent's
            self._process, self._groups = os.getpid(), {}
        alone = no_dist or not (dist.is_available() and dist.is_initialized())
        ranks = () if alone else tuple(dist.get_process_group_ranks(process_group))
        return self._groups.setdefault(ranks, GroupProcess())
