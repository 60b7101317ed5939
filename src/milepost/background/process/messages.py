"""The messages between a trainer and its writing process."""

import pickle
from dataclasses import dataclass

from milepost.comm.together import failure_of
from milepost.core.statistics import Health
from milepost.data.transfer import Progress
from milepost.errors import CheckpointError, InvalidRequest
from milepost.events.operation import OperationSeed
from milepost.events.records import Event
from milepost.saving.describe import Described
from milepost.saving.health import HealthCheck
from milepost.saving.options import SaveOptions
from milepost.saving.pipeline import Receipt
from milepost.store import Store

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
    """To the process: save this from the memory. `described` has slots in place of tensors; `store` is pickled.

    `has_rule`: whether the trainer has a rule for healthy checkpoints, which the process asks for (`HealthAsked`).
    """

    number: int
    url: str
    store: bytes
    described: Described
    options: SaveOptions
    tells: bool
    has_rule: bool
    operation: OperationSeed


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
class Relayed:
    """From the process: something happened that listeners of the trainer hear of."""

    event: Event


@dataclass(frozen=True, slots=True)
class HealthAsked:
    """From the process: what does the trainer's rule say of this checkpoint? The process waits for `HealthTold`."""

    number: int
    check: HealthCheck


@dataclass(frozen=True, slots=True)
class HealthTold:
    """To the process: what the rule says."""

    number: int
    verdict: Health


@dataclass(frozen=True, slots=True)
class OrderEnded:
    """From the process: the save has ended, with a receipt or a pickled error, and with these warnings."""

    number: int
    receipt: Receipt | None
    error: bytes
    warnings: tuple[str, ...]


def pack_store(store: Store) -> bytes:
    """The store as bytes. Raises InvalidRequest if it cannot be used in another process."""
    try:
        return pickle.dumps(store)
    except Exception as error:
        raise InvalidRequest(
            f"a process cannot save to {store.url}: a {type(store).__name__} belongs to this one ({error}). "
            'Use background="thread".'
        ) from error


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
