"""Every error that Milepost raises, grouped by what the caller does next.

    CheckpointError                     any of them; `failures` tells which ranks failed and how
    |
    |   fix the call
    +-- InvalidState (TypeError)        the state holds something that cannot be saved
    +-- InvalidRequest (ValueError)     an argument is wrong
    +-- RanksDisagree                   ranks describe one key in two ways, or replicas differ
    +-- StateMismatch (KeyError)        the checkpoint and the target state do not fit
    |
    |   fix the target, or retry
    +-- StorageError (OSError)          the disk or object store said no
    |   +-- AlreadyExists               create-if-absent found something there
    |   +-- NotDurable                  a commit could not be synced, and was taken back
    |   +-- NoReply                     no answer came; the request may still take effect
    +-- SaveConflict                    another job committed first
    +-- RanksMissing (TimeoutError)     ranks did not arrive before the deadline
    +-- SaveInFlight                    an earlier save in the background has not ended
    +-- SaveCancelled                   a rank cancelled it
    +-- WriterDied                      the process that writes in the background ended
    |
    |   choose another checkpoint
    +-- CheckpointNotFound (FileNotFoundError)   there is none here
    +-- CheckpointDamaged               bytes are missing or are not what was saved
    +-- CheckpointUnhealthy             a rule of the run found it unhealthy when it was saved
    +-- AmbiguousCheckpoint             another library saved to the same place later
    +-- UnsupportedFormat               a newer format, or one that needs an opt-in
    +-- UnsafeCheckpoint                it tries to leave its folder or to exhaust the reader

A message says what happened, where, and what to do. An error that one rank met is raised on every rank.
"""

from collections.abc import Mapping

import msgspec


class Failure(msgspec.Struct, frozen=True):
    """What one rank met: the name of the exception's type, its message, its traceback as text.

    `original`: the exception itself and its stack summary, pickled, where that can be done. `undecided`: what the
    coordinator was about to decide may have happened all the same, for example a commit.
    """

    kind: str
    message: str
    traceback: str = ""
    original: bytes = b""
    undecided: bool = False


class CheckpointError(Exception):
    """Something about a checkpoint failed; `failures` maps each failing rank to what it met (empty for one process)."""

    def __init__(self, message: str, failures: Mapping[int, Failure] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.failures: dict[int, Failure] = dict(failures or {})
        self.ranks_apart = False
        """Whether the ranks lost each other, and join again before their next call."""

    def __str__(self) -> str:
        return self.message


class InvalidState(CheckpointError, TypeError):
    """The state holds something that cannot be saved as it is."""


class InvalidRequest(CheckpointError, ValueError):
    """An argument of the call is wrong."""


class RanksDisagree(CheckpointError):
    """Ranks describe one key in two ways, or replicas that should be equal are not."""


class StateMismatch(CheckpointError, KeyError):
    """The checkpoint and the target state do not fit; the message lists every difference."""


class StorageError(CheckpointError, OSError):
    """The disk or object store refused an operation."""

    def __init__(self, message: str, failures: Mapping[int, Failure] | None = None, errno: int | None = None) -> None:
        super().__init__(message, failures)
        self.errno = errno


class AlreadyExists(StorageError):
    """A create-if-absent found that the name is taken."""


class NotDurable(StorageError):
    """A commit could not be made durable, and was taken back. Its data stays: a power cut may bring the commit back."""


class NoReply(StorageError):
    """The store gave no definite answer: the request may have taken effect, or may still do so. Data stays."""


class SaveConflict(CheckpointError):
    """Another job committed to the same place first; nothing of this save remains."""


class RanksMissing(CheckpointError, TimeoutError):
    """Ranks did not arrive before the deadline; the message names them and the phase."""


class SaveInFlight(CheckpointError):
    """An earlier save in the background has not ended, and the caller chose not to wait for it."""


class SaveCancelled(CheckpointError):
    """A save in the background was cancelled, on this rank or another; nothing of it remains."""


class WriterDied(CheckpointError):
    """The process that writes in the background ended before its work was done. The next save starts another."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at this place."""


class CheckpointDamaged(CheckpointError):
    """Bytes are missing or are not what was saved; the message names file and tensor."""


class CheckpointUnhealthy(CheckpointError):
    """A rule of the run found the checkpoint unhealthy when it was saved; `restore` found no healthy one."""


class AmbiguousCheckpoint(CheckpointError):
    """Two libraries saved to one place, the other one last; the message names both and says how to choose."""


class UnsupportedFormat(CheckpointError):
    """The checkpoint has a newer format, or holds something that needs an explicit opt-in."""


class UnsafeCheckpoint(CheckpointError):
    """The checkpoint tries to leave its folder, or to make the reader allocate without bound."""


ERRORS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        InvalidState,
        InvalidRequest,
        RanksDisagree,
        StateMismatch,
        StorageError,
        AlreadyExists,
        NotDurable,
        NoReply,
        SaveConflict,
        RanksMissing,
        SaveInFlight,
        SaveCancelled,
        WriterDied,
        CheckpointNotFound,
        CheckpointDamaged,
        CheckpointUnhealthy,
        AmbiguousCheckpoint,
        UnsupportedFormat,
        UnsafeCheckpoint,
    )
}
