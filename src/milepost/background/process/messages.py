"""What a trainer and its writing process say to each other."""

import pickle
from dataclasses import dataclass

from milepost.comm.together import failure_of
from milepost.data.transfer import Progress
from milepost.errors import CheckpointError
from milepost.saving.describe import Described
from milepost.saving.options import SaveOptions
from milepost.saving.pipeline import Receipt

LEFT = "milepost/left"
"""Where the processes count, in the store at which they meet, how many of them are done with it."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """To the process: who it is among the others, and where these meet; None: at its own place, which it answers."""

    rank: int
    size: int
    coordinator: int
    timeout_s: float
    address: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class Meeting:
    """From the process: it is ready, and (on the coordinator) this is the port at which the ranks meet."""

    port: int


@dataclass(frozen=True, slots=True)
class Memory:
    """To the process: map this much; the handle follows."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class Order:
    """To the process: save this, from the memory. The description has slots in place of tensors; the store is pickled."""

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
class Told:
    """From the process: how far it is."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class Ended:
    """From the process: the save has ended, with a receipt or a pickled error, and warned of these."""

    number: int
    receipt: Receipt | None
    error: bytes
    warnings: tuple[str, ...]


def pack_error(error: BaseException) -> bytes:
    """An error that can travel: itself where it can be pickled, else one that says the same."""
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)  # noqa: S301  # our own; some can be pickled and not read back
    except Exception:  # noqa: BLE001
        failure = failure_of(error)
        packed = pickle.dumps(CheckpointError(f"{failure.kind}: {failure.message}"))
    return packed


def unpack_error(packed: bytes) -> BaseException:
    """The error again."""
    error = pickle.loads(packed)  # noqa: S301  # from a process that we started
    assert isinstance(error, BaseException)
    return error
