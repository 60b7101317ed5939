"""Permission to commit: a save in the background has it only once the call that began it has returned.

A signal handler that raises (Ctrl-C, an alarm, a notebook's interrupt) can end a call between any two instructions,
and even the code that cleans up after it. So nothing here depends on clean-up that runs: the background commits only
what the caller has released, as its last act before it returned. A call that ended in any other way has withdrawn its
save, also if it could not say so: the background looks whether the call still runs.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from milepost.core.caller import Caller
from milepost.data.collection_pause import end_lost_pauses
from milepost.data.threads import Latch
from milepost.data.transfer import check_cancelled

_LOOK_S = 0.05
_TRIES = 1000
T = TypeVar("T")


class Permit:
    """Whether a save may be committed: not before it is granted, and not once it is withdrawn.

    `withdrawn` stops the save at any point. `is_lost` says that nobody is left who could grant it.
    """

    def __init__(self, is_lost: Callable[[], bool] = lambda: False) -> None:
        self.withdrawn = Latch()
        self._decided = Latch()
        self._is_lost = is_lost

    def grant(self) -> None:
        """Allow the commit."""
        self._decided.set()

    def withdraw(self) -> None:
        """Stop the save, and forbid the commit. Too late for a save that was allowed to commit, and has."""
        self.withdrawn.set()
        self._decided.set()

    def wait(self) -> None:
        """Return when the commit is allowed. Raises SaveCancelled once it is forbidden."""
        while not self._decided.wait(_LOOK_S):
            if self._is_lost():
                self.withdraw()
        self.check()

    def check(self) -> None:
        """Raises SaveCancelled if the permit was withdrawn."""
        check_cancelled(self.withdrawn)


def granted() -> Permit:
    """A permit that is granted already."""
    permit = Permit()
    permit.grant()
    return permit


class Ticket:
    """A call that begins a save, from its first line to its return: the permit of its save, and how to take leave.

    `frame`: that of the call.
    """

    def __init__(self, frame: FrameType) -> None:
        self.permit = Permit(self.is_lost)
        self.settled = False
        self._caller = Caller(frame)
        self._awaited: Latch | None = None
        self._on_return: Callable[[], None] | None = None
        self._clean_up: Callable[[], None] | None = None

    def is_lost(self) -> bool:
        """Whether the call has ended."""
        return self._caller.is_lost()

    def on_leave(self, clean_up: Callable[[], None]) -> None:
        """What to do if the call ends early. It may be interrupted itself, and is then called again."""
        self._clean_up = clean_up

    def on_return(self, note: Callable[[], None]) -> None:
        """What to call when the call is about to return, before the commit is allowed."""
        self._on_return = note

    def return_after(self, latch: Latch) -> None:
        """Let the call return not before this has happened; its save is released before."""
        self._awaited = latch

    def release(self) -> None:
        """Allow the commit, as the last act of the call."""
        if self._on_return is not None:
            self._on_return()
        self.permit.grant()
        if self._awaited is not None:
            self._awaited.wait()
        self.settle()

    def settle(self) -> None:
        """Note that nothing is left to clean up."""
        self.settled = True
        self._clean_up = None
        self._caller.forget()

    def leave(self) -> None:
        """Take leave early: forbid the commit, and return when nobody reads the state any more.

        Interrupts are put off until then.
        """
        for _ in range(_TRIES):
            try:
                self.permit.withdraw()
                clean_up = self._clean_up
                if clean_up is not None and not self.settled:
                    clean_up()
                self.settle()
                end_lost_pauses()
                return
            except BaseException:  # noqa: BLE001, S112  # the one that ended the call is raised
                continue


def unless_interrupted(begin: Callable[[Ticket], T]) -> T:
    """Begin a save by `begin`, and release it when that has returned. Whatever else happens, it is withdrawn.

    Every public function that begins a save in the background ends with `return unless_interrupted(...)`: no signal
    handler runs between the two returns.
    """
    ticket = Ticket(sys._getframe())  # noqa: SLF001  # public, but for its name
    try:
        result = begin(ticket)
        ticket.release()
        return result  # in the `try`: an interrupt at the end of `release` withdraws too
    except BaseException:
        ticket.leave()
        raise
