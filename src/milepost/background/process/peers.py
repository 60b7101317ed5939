"""The writing processes of all ranks, as one rank sees them."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from milepost.background.process.client import Link
from milepost.background.process.messages import FINISHED, Order, Ranks
from milepost.comm import Announcement, BoardComm, Call, Comm, broadcast, depart, together
from milepost.comm.distributed import TorchBoard, key_value_store
from milepost.core.agreement import Plans
from milepost.core.wire import Wire
from milepost.errors import CheckpointError, WriterDied
from milepost.events.operation import OperationSeed
from milepost.events.records import Event
from milepost.saving.describe import Described
from milepost.saving.options import SaveOptions
from milepost.saving.pipeline import Receipt
from milepost.state.values import Codec

_STARTING = Announcement("starting the writing processes", Wire(tuple[str, int]), "starting")


class Writers:
    """The writing process of this rank, and the place where those of all ranks meet. All ranks make it together.

    `comm` is that place: a save that the process of this rank cannot do, the trainer does there in its stead.
    `own_address`: where the other ranks reach this machine.
    """

    def __init__(self, link: Link, comm: Comm, own_address: str) -> None:
        self.comm: Comm = comm
        self.link = link
        self.shared_version = 0
        self._store: Any = None
        try:
            self._bring_up(comm, own_address)
        except BaseException:
            self.close()
            raise

    def _bring_up(self, comm: Comm, own_address: str) -> None:
        if comm.size == 1:
            self.link.meet(Ranks(0, 1, 0, comm.timeout_s, None))
            return
        call = Call("saving in", "the background")
        address = broadcast(comm, call, _STARTING, lambda: self._start(comm, own_address))
        step = "connecting the writing processes"
        together(comm, call, step, lambda: self._connect(comm, address), "starting")
        self._store = key_value_store(address)
        board = TorchBoard(self._store, comm.size)
        self.comm = BoardComm(board, comm.rank, comm.size, comm.timeout_s, comm.index_of, comm.coordinator)

    def _start(self, comm: Comm, own_address: str) -> tuple[str, int]:
        port = self.link.meet(Ranks(comm.rank, comm.size, comm.coordinator, comm.timeout_s, None))
        return own_address, port

    def _connect(self, comm: Comm, address: tuple[str, int]) -> None:
        if comm.rank != comm.coordinator:
            self.link.meet(Ranks(comm.rank, comm.size, comm.coordinator, comm.timeout_s, address))

    def share(self, handle: int, size_bytes: int, version: int) -> None:
        """Let the process map this memory in place of the memory it had. If it is dead, the other ranks hear of it."""
        with self._in_touch():
            self.link.share(handle, size_bytes)
        self.shared_version = version

    def hand_over(
        self, url: str, store: bytes, described: Described, options: SaveOptions, operation: OperationSeed
    ) -> int:
        """Give a save to the process, which will do it even if the trainer dies. Returns the number of the order.

        If the process is dead, the other ranks hear of it.
        """
        number = self.link.next_number()
        has_rule = callable(options.healthy)
        plain = replace(options, metadata={}, codec=Codec(), plans=Plans(), progress=None, cancelled=None)
        plain = replace(plain, healthy=options.healthy is True)
        tells = options.progress is not None
        with self._in_touch():
            self.link.hand_over(Order(number, url, store, described, plain, tells, has_rule, operation))
        return number

    def outcome(self, number: int, options: SaveOptions, relay: Callable[[Event], None]) -> Receipt:
        """Wait for the end of a save, and `relay` its events. If the process dies, the other ranks hear of it."""
        with self._in_touch():
            return self.link.outcome(number, options, relay)

    @contextlib.contextmanager
    def _in_touch(self) -> Iterator[None]:
        try:
            yield
        except WriterDied as error:
            if isinstance(self.comm, BoardComm) and not error.failures:  # with failures, it is another rank's error
                with contextlib.suppress(Exception):  # the place where they meet may have been in that process
                    depart(self.comm, error)
                    self._store.add(FINISHED, 1)
            raise

    def close(self, broken: BaseException | None = None) -> None:
        """Wait until the process has ended. `broken`: why; other ranks may wait for the process, and it tells them."""
        self.link.close(broken)


def is_broken(error: BaseException) -> bool:
    """Whether the writing processes must be started again after this error. The same on every rank."""
    if getattr(error, "ranks_apart", False):
        return True
    kinds = {failure.kind for failure in getattr(error, "failures", {}).values()} | {type(error).__name__}
    return isinstance(error, CheckpointError) and bool(kinds & {"WriterDied", "RanksMissing"})
