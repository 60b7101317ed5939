"""Who makes a call, and whether that has ended without a word."""

import sys
import threading
from types import FrameType


class Caller:
    """A function that is at work in this thread, by its frame.

    A signal handler that raises can end it between any two instructions, and even the code that cleans up after it. So
    whoever needs to know looks whether the function is still on the stack of its thread.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame: FrameType | None = frame
        self._thread = threading.get_ident()

    def is_lost(self) -> bool:
        """Whether it has ended. False once it is forgotten."""
        mine, frame = self._frame, sys._current_frames().get(self._thread)  # noqa: SLF001  # public, but for its name
        while frame is not None and mine is not None:
            if frame is mine:
                return False
            frame = frame.f_back
        return mine is not None

    def forget(self) -> None:
        """Let go of the frame, which keeps all that the function holds."""
        self._frame = None
