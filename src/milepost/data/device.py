"""GPUs as a load sees them: streams beside the program's own, and marks in them."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import torch


def gpus_of(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """The GPUs that hold some of these tensors."""
    return {tensor.device for tensor in tensors if tensor.is_cuda}


def streams_of_this_thread(devices: Iterable[torch.device]) -> Callable[[], AbstractContextManager[None]]:
    """For another thread that works for this one: what it launches inside goes where this thread launches now."""
    streams = [torch.cuda.current_stream(device) for device in devices if device.type == "cuda"]

    @contextlib.contextmanager
    def here() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.device(stream.device))
                stack.enter_context(torch.cuda.stream(stream))
            yield

    return here


class Moment:
    """A point in the work of this process's GPUs: what was launched before it happens before it."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events: dict[torch.device, torch.cuda.Event] = {}
        for device in devices:
            if device.type == "cuda":
                self._events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._events[device].record(torch.cuda.current_stream(device))

    def before(self, stream: torch.cuda.Stream) -> None:
        """Let a stream begin after it."""
        self._events[stream.device].wait(stream)

    def wait(self) -> None:
        """Return when it is reached: what other threads launch then, in streams of theirs, comes after it."""
        for event in self._events.values():
            event.synchronize()


class Lane:
    """What one thread does on one device: in order, and beside the work of other threads and of the program."""

    def __init__(self, device: torch.device, moment: Moment) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            moment.before(self._stream)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """What is launched inside goes into this lane."""
        if self._stream is None:
            yield
            return
        # The device first: a thread begins on GPU 0, and to go back there from a stream makes a context there.
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def mark(self) -> "Mark":
        """The point at which all work so far is done."""
        return Mark(self._stream)

    def wait(self) -> None:
        """Return when all work is done."""
        if self._stream is not None:
            self._stream.synchronize()


class Mark:
    """A point in a lane."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._event: torch.cuda.Event | None = None
        if stream is not None:
            # Blocking: a thread that waits leaves its CPU to those that read.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def wait(self) -> None:
        """Return when it is reached. Other threads run meanwhile."""
        if self._event is not None:
            self._event.synchronize()
