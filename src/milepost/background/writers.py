"""The writing processes of all ranks, as one of these sees them."""

from dataclasses import replace
from typing import Any

import msgspec

from milepost.background.link import Link
from milepost.background.messages import Order, Ranks
from milepost.background.pending import PendingSave
from milepost.comm import BoardComm, Comm, Phase, depart, together
from milepost.comm.distributed import TorchBoard, address_for, key_value_store
from milepost.core.agreement import Plans
from milepost.describing import Described
from milepost.errors import CheckpointError, WriterDied
from milepost.saving import Receipt, SaveOptions
from milepost.values import Codec

# Made once, when the module is imported: two threads that are the first to decode a type can crash msgspec.
_ADDRESSES = msgspec.msgpack.Decoder(tuple[str, int])


class Writers:
    """The writing process of this rank, and the place where those of all ranks meet. Made by all ranks at the same time.

    `comm` is that place: what this rank's process cannot do, the trainer does in its stead.
    """

    def __init__(self, comm: Comm, group: Any, timeout_s: float) -> None:
        self.comm: Comm = comm
        self.shared_version = 0
        self._link: Link | None = None
        try:
            self._bring_up(comm, group, timeout_s)
        except BaseException:
            self.close()
            raise

    def _bring_up(self, comm: Comm, group: Any, timeout_s: float) -> None:
        if comm.size == 1:
            self._link = Link()
            self._link.meet(Ranks(0, 1, 0, timeout_s, None))
            return
        phase = Phase("saving in", "the background", "starting the writing processes")
        packed = together(comm, phase, lambda: self._start(comm, group, timeout_s), lambda notes: notes[comm.lead])
        address = _ADDRESSES.decode(packed)
        together(comm, phase._replace(step="connecting them"), lambda: self._connect(comm, address, timeout_s))
        board = TorchBoard(key_value_store(address), comm.size)
        self.comm = BoardComm(board, comm.rank, comm.size, timeout_s, comm.index_of, comm.lead)

    def _start(self, comm: Comm, group: Any, timeout_s: float) -> bytes:
        self._link = Link()
        if comm.rank != comm.lead:
            return b""
        port = self._link.meet(Ranks(comm.rank, comm.size, comm.lead, timeout_s, None))
        return msgspec.msgpack.encode((address_for(group), port))

    def _connect(self, comm: Comm, address: tuple[str, int], timeout_s: float) -> bytes:
        if comm.rank != comm.lead:
            self.link.meet(Ranks(comm.rank, comm.size, comm.lead, timeout_s, address))
        return b""

    @property
    def link(self) -> Link:
        """The connection to this rank's process."""
        assert self._link is not None
        return self._link

    def hand_over(self, url: str, store: bytes, described: Described, options: SaveOptions) -> int:
        """Give a save to the process, which will do it whatever happens to this one. Gives its number."""
        number = self.link.next_number()
        plain = replace(options, metadata={}, codec=Codec(), plans=Plans(), progress=None, cancelled=None)
        self.link.hand_over(Order(number, url, store, described, plain, options.progress is not None))
        return number

    def outcome(self, number: int, options: SaveOptions, pending: PendingSave) -> Receipt:
        """Wait for the end of a save. If the process dies, the others hear of it."""
        try:
            return self.link.outcome(number, options.progress, pending.cancelled)
        except WriterDied as error:
            if isinstance(self.comm, BoardComm):
                depart(self.comm, error)
            raise

    def close(self) -> None:
        """Let the process end, and wait for that."""
        if self._link is not None:
            self._link.close()


def is_broken(error: BaseException) -> bool:
    """Whether the writing processes must be started anew after this error. The same on every rank."""
    kinds = {failure.kind for failure in getattr(error, "failures", {}).values()} | {type(error).__name__}
    return isinstance(error, CheckpointError) and bool(kinds & {"WriterDied", "RanksMissing"})
