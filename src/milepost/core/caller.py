"""Who makes a call, and whether that has ended without a word."""

from types import FrameType


class Caller:
    """A function that is at work in this thread, by its frame.

    A signal handler that raises can end it between any two instructions, and even the code that cleans up after it. So
    whoever needs to know looks whether the function still runs. The frame is not that of a generator.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame: FrameType | None = frame

    def is_lost(self) -> bool:
        """Whether it has ended. False once it is forgotten. Any thread may ask."""
        frame = self._frame
        if frame is None:
            return False
        try:
            # Python refuses that for a function that runs. (To look through the stacks of all threads, by
            # `sys._current_frames`, can block for ever: in Python 3.11 two threads that do it wait for each other.)
            frame.clear()
        except RuntimeError:
            return False
        return True

    def forget(self) -> None:
        """Let go of the frame, which keeps all that the function holds."""
        self._frame = None
