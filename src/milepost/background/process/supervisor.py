"""Keeps the writing processes of all ranks running: starts them when they are needed, and again after a failure."""

from milepost.background.process.client import Link, start
from milepost.background.process.peers import Writers
from milepost.background.staging.arena import Arena
from milepost.comm import Announcement, Call, Comm, Solo, broadcast
from milepost.core.wire import Wire
from milepost.errors import WriterDied

_CHOOSING = Announcement("choosing the writing processes", Wire(int), "starting")


class WriterSupervisor:
    """The part of this rank in the writing processes of all ranks. Used by one save at a time.

    `address`: where the other ranks reach this machine. `arena`: the memory that the process of this rank maps.
    """

    def __init__(self, comm: Comm, address: str, arena: Arena) -> None:
        self._comm: Comm = comm
        self._address, self._arena = address, arena
        # A process takes some seconds to start: so it begins now.
        self._link: Link | None = start()
        self._starts = 0
        self.writers: Writers | None = None

    def prewarm(self) -> None:
        """Start the processes, with all ranks, and let them map the memory."""
        self.choose("the background")
        self.share(self.started())

    def started(self) -> Writers:
        """The writing processes, which all ranks start together."""
        if self.writers is None:
            self._starts += 1
            link, self._link = self._link or start(), None
            self.writers = Writers(link, self._comm, self._address)
        return self.writers

    def share(self, writers: Writers) -> None:
        """Let the process map the memory, unless it has."""
        arena = self._arena
        if writers.shared_version != arena.version:
            writers.share(arena.handle, arena.capacity, arena.version)

    def choose(self, url: str) -> None:
        """Use the processes that the coordinator uses: those that run, or new ones after it has lost them.

        Raises WriterDied if only this rank has lost its process.
        """
        mine = self._starts if self.writers is not None else self._starts + 1
        try:
            chosen = broadcast(self._comm, Call("saving to", url), _CHOOSING, lambda: mine)
        except BaseException as error:
            self.stop(broken=error)  # the processes of other ranks may be waiting for this save already
            raise
        if chosen > self._starts:
            self.stop(broken=WriterDied("the coordinator lost its writing process, and all ranks start new ones"))
        elif self.writers is None:
            raise WriterDied(
                "the writing process of this rank died at the end of the last save, which other ranks may have "
                "committed. This save fails on all ranks, and the next one starts new processes."
            )

    def stop(self, *, broken: BaseException | None = None) -> None:
        """End this rank's process, if it runs. `broken`: why; other ranks may wait for it, and it tells them."""
        writers, self.writers = self.writers, None
        if writers is not None:
            writers.close(broken)

    def close(self) -> None:
        """End this rank's process, also one that was never used."""
        self.stop()
        if self._link is not None:
            self._link.close()
        self._comm = Solo()
