"""The port for the ranks of a job."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Comm(Protocol):
    """The ranks that save or load together. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def exchange(self, phase: str, payload: bytes) -> list[bytes]:
        """Give every rank the payloads of all, in order of rank. Raises RanksMissing when the deadline passes."""

    def post(self, phase: str, payload: bytes) -> None:
        """Take part in an exchange without waiting for its result: for a rank that is about to leave."""

    def index_of(self, global_rank: int) -> int | None:
        """The rank, counted here, of a rank of the whole job; None if it does not take part."""


class Solo:
    """One process alone."""

    rank = 0
    size = 1

    def exchange(self, phase: str, payload: bytes) -> list[bytes]:
        """The payload itself."""
        del phase
        return [payload]

    def post(self, phase: str, payload: bytes) -> None:
        """Nobody listens."""

    def index_of(self, global_rank: int) -> int | None:
        """Rank 0 is the only one."""
        return 0 if global_rank == 0 else None
