"""The messages between a trainer and its writing process."""

import pickle
from dataclasses import dataclass

from milepost.comm.together import failure_of
from milepost.data.transfer import Progress
from milepost.errors import CheckpointError
from milepost.saving.describe import Described
from milepost.saving.options import SaveOptions
from milepost.saving.pipeline import Receipt

FINISHED = "writers/finished"
"""The counter, in the store at which the processes meet, of those that have finished with the store.

Its name is none that a board has there: those begin otherwise."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """To the process: its rank, and where the ranks meet. None: in this process, which answers with the port."""

    rank: int
    size: int
    coordinator: int
    timeout_s: float
    address: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """From the process: it is ready. On the coordinator, with the port at which the ranks meet."""

    port: int


@dataclass(frozen=True, slots=True)
class Memory:
    """To the process: map memory of this size. The handle follows."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class Order:
    """To the process: save this from the memory. `described` has slots in place of tensors; `store` is pickled."""

    number: int
    url: str
    store: bytes
    described: Described
    options: SaveOptions
    tells: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """To the process: stop the save of this number."""

    number: int


@dataclass(frozen=True, slots=True)
class GivenUp:
    """To the process: this rank starts others, for this reason. Ranks that wait for this process hear the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Told:
    """From the process: its progress."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class Ended:
    """From the process: the save has ended, with a receipt or a pickled error, and with these warnings."""

    number: int
    receipt: Receipt | None
    error: bytes
    warnings: tuple[str, ...]


def pack_error(error: BaseException) -> bytes:
    """The error as bytes: itself if it can be pickled, else one with the same message."""
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)  # noqa: S301  # our own; some can be pickled but not read back
    except Exception:  # noqa: BLE001
        failure = failure_of(error)
        packed = pickle.dumps(CheckpointError(f"{failure.kind}: {failure.message}"))
    return packed


def unpack_error(packed: bytes) -> BaseException:
    """The error again."""
    error = pickle.loads(packed)  # noqa: S301  # from a process that we started
    assert isinstance(error, BaseException)
    return error
