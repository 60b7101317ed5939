"""Copying into staging memory: by threads from the CPU, by a stream of its own from a GPU."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

import torch

from milepost.core.box import Box
from milepost.core.limits import MIB
from milepost.data.device import Moment
from milepost.data.memory import address_of, as_bits, copy_bytes
from milepost.data.transfer import run_all
from milepost.saving.describe import no_callback

_AT_ONCE_BYTES = 8 * MIB
_PIECE_BYTES = 64 * MIB
_BATCH_COPIES = 32
_BATCH_BYTES = 256 * MIB
_ORDINARY = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8}
_SLAB_BYTES = 1024 * MIB
_LARGE_BYTES = 4 * MIB
_ALIGN_BYTES = 512
_THREADS = 4


class Copy(NamedTuple):
    """A tensor, and the memory of the same type and shape, in one run, that it is copied into."""

    source: torch.Tensor
    target: torch.Tensor


class Copier:
    """Copies, with a stream on each GPU that is kept from one save to the next."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, copies: list[Copy], moment: Moment, check: Callable[[], None] = no_callback) -> None:
        """Return when all are copied, as they were at that moment. Waiting for a GPU lets other threads run.

        `check` is called now and then. If it raises, nothing is read any more when that leaves here.
        """
        by_device: dict[torch.device, list[Copy]] = {}
        for one in copies:
            by_device.setdefault(one.source.device, []).append(one)
        here = by_device.pop(torch.device("cpu"), [])
        try:
            for device, theirs in by_device.items():
                if device.type == "cuda":
                    self._begin(device, theirs, moment, check)
            for device, theirs in by_device.items():
                if device.type != "cuda":
                    _copy_from(theirs, check)
            _copy_here(here, check)
        finally:
            for device in by_device:
                if device in self._streams:
                    self._streams[device].synchronize()

    def _begin(self, device: torch.device, copies: list[Copy], moment: Moment, check: Callable[[], None]) -> None:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        moment.before(stream)
        queue = _StreamQueue(stream)
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
            for batch in _batches(copies):
                # In one call: each call hands Python's lock over, and the training thread would wait for it every time.
                torch._foreach_copy_([one.target for one in batch], [one.source for one in batch], non_blocking=True)
                queue.wait_a_little()
                check()


class _StreamQueue:
    """The queue of a stream, kept short: if a driver's queue is full, all threads that launch work wait."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._marks: deque[torch.cuda.Event] = deque()

    def wait_a_little(self) -> None:
        """After each batch: return when only this one and the one before are left. Other threads run meanwhile."""
        self._marks.append(self.mark())
        if len(self._marks) > 2:
            self._marks.popleft().synchronize()

    def mark(self) -> torch.cuda.Event:
        """The moment when all work so far is done."""
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def _batches(copies: list[Copy]) -> Iterator[list[Copy]]:
    """The copies in pieces, some at a time."""
    batch: list[Copy] = []
    size_bytes = 0
    for one in copies:
        for part in _parts(one):
            batch.append(part)
            size_bytes += part.target.nbytes
            if len(batch) >= _BATCH_COPIES or size_bytes >= _BATCH_BYTES:
                yield batch
                batch, size_bytes = [], 0
    if batch:
        yield batch


def _parts(one: Copy) -> Iterator[Copy]:
    """The copy in short pieces: other copies get their turn, and little memory is needed to reorder elements."""
    source, target = one
    if source.is_contiguous() and not _is_lazy(source):
        if source.nbytes <= _PIECE_BYTES and source.dtype in _ORDINARY:
            yield one
            return
        source, target = as_bits(source).view(-1), target.view(-1)
    target = as_bits(target)
    for slab in Box.whole(tuple(source.shape)).slabs(max(_PIECE_BYTES // source.element_size(), 1)):
        yield Copy(_bits(source[slab.slices]), target[slab.slices])


def _is_lazy(source: torch.Tensor) -> bool:
    return source.is_conj() or source.is_neg()


def _bits(source: torch.Tensor) -> torch.Tensor:
    """The values under a type that every kernel can copy.

    Conjugates are worked out here: in a copy to the CPU torch would do that there, without waiting for the copy.
    """
    return as_bits(source.resolve_conj().resolve_neg())


def _copy_here(copies: list[Copy], check: Callable[[], None]) -> None:
    """Copy what is on the CPU, large tensors in pieces and small ones together, by several threads."""
    large: list[tuple[int, int, int]] = []
    small: list[Copy] = []
    for one in copies:
        at, size = address_of(one.source), one.target.nbytes
        if at and size >= _AT_ONCE_BYTES:
            to = int(one.target.data_ptr())
            starts = range(0, size, _AT_ONCE_BYTES)
            large.extend((to + start, at + start, min(_AT_ONCE_BYTES, size - start)) for start in starts)
        else:
            small.append(one)

    def worker(job: tuple[int, int, int]) -> None:
        check()
        copy_bytes(*job)

    threads = min(_THREADS, os.cpu_count() or 1, len(large))
    if large:
        run_all(iter(large), lambda: worker, threads)
    for one in small:
        check()
        _copy_small(one, check)


def _copy_small(one: Copy, check: Callable[[], None]) -> None:
    at = address_of(one.source)
    if at:
        copy_bytes(int(one.target.data_ptr()), at, one.target.nbytes)
    else:
        _copy_from([one], check)


def _copy_from(copies: list[Copy], check: Callable[[], None]) -> None:
    """Copy in the way that any device and any strides allow."""
    with torch.no_grad():
        for one in copies:
            for part in _parts(one):
                check()
                part.target.copy_(part.source)


def clone_on_devices(sources: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors on GPUs, each on its own GPU, in the order of the work launched there. Does not wait.

    Raises torch.OutOfMemoryError where there is no room.
    """
    clones: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        plain = [source if source.dtype in _ORDINARY and not _is_lazy(source) else _bits(source) for source in sources]
        groups: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
        for i, source in enumerate(plain):
            groups.setdefault((source.device, source.dtype, source.is_contiguous()), []).append(i)
        for group in groups.values():
            for run in _runs(group, plain):
                clones.update(zip(run, _places_on_device([plain[i] for i in run]), strict=True))
            _copy_on_device([clones[i] for i in group], [plain[i] for i in group])
    return [clones[i].view(source.dtype) for i, source in enumerate(sources)]


def _copy_on_device(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Launch copies between tensors of one type on one GPU, which all lie in one run of memory or all do not.

    The device moves a large one at full speed by a copy of its own, and at half that in a kernel for elements of two
    bytes. Small ones go together: each launch takes Python longer than the copy itself.
    """
    large = [i for i, source in enumerate(sources) if source.nbytes >= _LARGE_BYTES]
    for i in large:
        targets[i].copy_(sources[i], non_blocking=True)
    if len(large) < len(sources):
        small = [i for i, source in enumerate(sources) if source.nbytes < _LARGE_BYTES]
        torch._foreach_copy_([targets[i] for i in small], [sources[i] for i in small])


def _runs(numbers: list[int], sources: list[torch.Tensor]) -> Iterator[list[int]]:
    """The numbers in groups whose tensors share a block."""
    run: list[int] = []
    size_bytes = 0
    for i in numbers:
        if run and size_bytes + sources[i].nbytes > _SLAB_BYTES:
            yield run
            run, size_bytes = [], 0
        run.append(i)
        size_bytes += sources[i].nbytes
    yield run


def _places_on_device(sources: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Memory for a copy of each, cut from one large block; all are on one device and of one type.

    Blocks of the size of each tensor would be those that training has freed and allocates again in its next step. It
    would then have to get new ones from the driver, which took a second.
    """
    align = _ALIGN_BYTES // sources[0].element_size()
    starts = [0, *accumulate(-(-source.numel() // align) * align for source in sources)]
    block = torch.empty(starts[-1], dtype=sources[0].dtype, device=sources[0].device)
    for source, start in zip(sources, starts, strict=False):
        if source.is_contiguous():
            yield block.as_strided(source.shape, source.stride(), start)
        else:
            yield block[start : start + source.numel()].view(source.shape)


def room_on(device: torch.device) -> int:
    """How many bytes of a GPU's memory are likely to stay free: the peak that was ever in use may come again."""
    free, _ = torch.cuda.mem_get_info(device)
    mine = torch.cuda.memory_reserved(device)
    return int(free + mine - torch.cuda.max_memory_allocated(device))
