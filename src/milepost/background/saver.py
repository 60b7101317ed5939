"""`AsyncSaver`: saves in the background, as their callers see it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, Unpack

import torch
import torch.distributed as dist

from milepost.background.engine import WAYS, Background, SaveEngine, SaveWork, WhenBusy, describing
from milepost.background.pending import PendingSave
from milepost.background.staging import Way
from milepost.background.ticket import Ticket, unless_interrupted
from milepost.background.writing import Then, after_commit
from milepost.comm import TIMEOUT_S, Comm
from milepost.core.agreement import Plans
from milepost.core.option_values import check_values
from milepost.planning.protocol import SavePlanner, StorageWriter
from milepost.planning.protocol_run import place_of
from milepost.planning.route import GlobalPlanner, LocalPlanner, NoPlanner, ignored_by_save, route
from milepost.planning.route_run import save_with_planner, writer_at
from milepost.saving.options import SaveKeywords, SaveOptions, make_options, one_of
from milepost.saving.pipeline import Receipt
from milepost.store import Location
from milepost.store.location import required, store_to_save
from milepost.store.spelling import shown

_log = logging.getLogger("milepost")


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The arguments of a call that saves in the background, as its caller gave them."""

    state: Any
    path: Location | None
    stage: Way | None = None
    optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None" = None
    planner: SavePlanner | None = None
    storage_writer: StorageWriter | None = None
    then: Then | None = None


@dataclass(frozen=True, slots=True)
class _SaveCall:
    """A call of `save`, with its options checked. `wrong`: what is wrong with them, to be raised on all ranks."""

    state: Any
    path: Location | None
    options: SaveOptions
    way: Way
    optimizers: Sequence[torch.optim.Optimizer]
    then: Then | None
    wrong: Exception | None


class AsyncSaver:
    """Saves in the background, one at a time. Keeps for the next save what takes time to make: memory, and a process.

    Every rank makes one, with the same arguments, and makes the same calls.

    `background`: "thread", or "process": one with low priority that Python's lock does not slow down. It finishes the
    checkpoint even if this process is killed, once `staged()` is true.
    `stage`: how the state is copied. "host": into host memory, before the call returns. "device": on the GPU, and from
    there to host memory in the background. "overlap": the call returns at once, and the copy is made while the next
    forward and backward run. The state must not change before `wait_staged()`. With `optimizer=`, `step` waits by
    itself, and what the optimizer does not own is copied before the call returns. "auto": "device" if the GPU has room
    (for two copies before the first such save, so that later ones find it too), else "overlap" if there is an
    `optimizer=`, else "host".
    `staging_bytes`: the most host memory for copies; by default what is free. What does not fit is written first, from
    where it is, while the caller waits.
    `when_busy`: what a save does while another is under way: "wait", or "refuse" (raise SaveInFlight, on all ranks).
    `process_group`, `timeout_s`: as for `milepost.save`. Nothing in the background uses the process group.

    Raises InvalidRequest for arguments that are wrong.

    >>> with milepost.AsyncSaver() as saver:
    ...     pending = saver.save({"step": 1}, "memory://saver")
    ...     receipt = pending.result()
    >>> milepost.open("memory://saver")["step"]
    1
    """

    def __init__(
        self,
        *,
        background: Background = "thread",
        stage: Way = "auto",
        staging_bytes: int | None = None,
        when_busy: WhenBusy = "wait",
        process_group: "dist.ProcessGroup | Comm | None" = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._engine = SaveEngine(
            background=background,
            stage=stage,
            staging_bytes=staging_bytes,
            when_busy=when_busy,
            process_group=process_group,
            timeout_s=timeout_s,
        )

    @property
    def plans(self) -> Plans:
        """What the ranks have agreed on, for later saves of the same structure."""
        return self._engine.plans

    def save(
        self,
        state: Any,
        path: Location | None = None,
        *,
        stage: Way | None = None,
        optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None" = None,
        planner: SavePlanner | None = None,
        storage_writer: StorageWriter | None = None,
        then: Then | None = None,
        **options: Unpack[SaveKeywords],
    ) -> PendingSave:
        """Begin to save `state` at `path`, from every rank. Returns when the caller may go on, as `stage` says.

        The state is saved as it is now; later changes do not matter.

        `stage`: for this save. `optimizer`: those that change the state; their `step` waits until it is copied.
        `then`: called on every rank, in the background, after the commit. `options`: those of `milepost.save`.
        `planner`, `storage_writer`: as for `milepost.save`; other kinds than the default ones get a copy of the state
        dict, in a thread.

        Raises the error of an earlier save that the caller did not ask for; then nothing is saved. Raises
        InvalidRequest for a wrong option; the other ranks get it from `result()`. All other errors are in `result()`,
        the same on every rank; in a job of one process, a state that cannot be saved is refused here.

        If the call is interrupted (Ctrl-C, or a signal handler that raises), nothing is committed, and nothing reads
        the state any more when the exception leaves it. The other ranks get SaveCancelled from `result()`.
        """
        request = SaveRequest(state, path, stage, optimizer, planner, storage_writer, then)
        return unless_interrupted(lambda ticket: begin_save(self._engine, ticket, request, options))

    def prewarm(self, state: Any, **options: Unpack[SaveKeywords]) -> None:
        """Make the memory that `state` needs, and start the process, so that the first save is as fast as later ones.

        Every rank calls it, and waits for the others. `options`: those of `save` that say how to describe a state
        (`types`, `allow_pickle`, `reduce_partial`). Raises the error of any rank on every rank, among these
        InvalidRequest for a wrong option, and the error of an earlier save that the caller did not ask for.
        """
        unless_interrupted(lambda ticket: self._engine.prewarm(ticket, state, **options))

    def wait(self) -> None:
        """Return when no save is under way. Raises the error of the last one, if the caller did not ask for it."""
        self._engine.check_open()
        error = self._engine.take_error()
        if error is not None:
            raise error

    def join(self) -> None:
        """Return when no save is under way, however it ended."""
        self._engine.join()

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._engine.busy

    @property
    def failed(self) -> bool:
        """Whether the last save has failed, and the caller did not ask for its error."""
        return self._engine.failed

    def close(self) -> None:
        """Wait, and give memory and process back. May be called twice; then saves raise InvalidRequest.

        Raises the error of the last save, if the caller did not ask for it.
        """
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_after(self._engine, error)


def close_after(engine: SaveEngine, error: BaseException | None) -> None:
    """Close at the end of a `with` block. An error that ends the block must not be hidden by another."""
    if error is None:
        engine.close()
        return
    try:
        engine.close()
    except Exception as failed:  # noqa: BLE001  # logged
        _log.error("a save in the background failed too: %s", failed, exc_info=failed)


def begin_save(engine: SaveEngine, ticket: Ticket, request: SaveRequest, options: SaveKeywords) -> PendingSave:
    """Begin to save, as `AsyncSaver.save` says."""
    wrong: Exception | None = None
    try:
        check_values(
            {
                "then": request.then,
                "optimizer": request.optimizer,
                "planner": request.planner,
                "storage_writer": request.storage_writer,
            }
        )
        way: Way = engine.stage if request.stage is None else one_of("stage", request.stage, WAYS)
        keywords: SaveKeywords = {"plans": engine.plans, **options}
        made = make_options(**keywords)
    except Exception as error:  # noqa: BLE001  # raised below, once the other ranks can hear of it
        way, made, wrong = engine.stage, make_options(), error
    given = request.optimizer
    optimizers = [] if given is None else list(given) if isinstance(given, Sequence) else [given]
    call = _SaveCall(request.state, request.path, made, way, optimizers, request.then, wrong)
    if request.planner is None and request.storage_writer is None:
        work = SaveWork(store_to_save(call.path), made, describing(call.state, made), call.then)
        return engine.begin(ticket, work, way, optimizers, refused=wrong)
    return _save_with(engine, ticket, call, request, options)


def _save_with(
    engine: SaveEngine,
    ticket: Ticket,
    call: _SaveCall,
    request: SaveRequest,
    given: SaveKeywords,
) -> PendingSave:
    engine.check_open()
    own_writer = request.storage_writer is not None
    writer = request.storage_writer if own_writer else writer_at(required(call.path), call.options)
    chosen = route(writer, request.planner)
    call = replace(call, wrong=call.wrong or ignored_by_save(given, chosen, own_writer=own_writer))
    match chosen:
        case NoPlanner():
            chosen.writer.reset(call.path)
            made = chosen.options(call.options)
            work = SaveWork(chosen.writer.store, made, describing(call.state, made), call.then)
            pending = engine.begin(ticket, work, call.way, call.optimizers, refused=call.wrong)
            pending.add_done_callback(lambda ended: _note(chosen, ended))
            return pending
        case LocalPlanner() | GlobalPlanner():
            return _save_planned(engine, ticket, call, chosen)


def _save_planned(
    engine: SaveEngine, ticket: Ticket, call: _SaveCall, chosen: LocalPlanner | GlobalPlanner
) -> PendingSave:
    from milepost.background.staging.state_copy import copied_state  # noqa: PLC0415  # slow to import

    state, path, options, then = call.state, call.path, call.options, call.then

    def write(copied: Callable[[], Any], comm: Comm) -> Receipt:
        chosen.writer.reset(path)  # type: ignore[arg-type]  # a writer of the caller accepts the caller's paths
        receipt = save_with_planner(copied, chosen, comm, options)
        after_commit(comm, receipt.url, then)
        return receipt

    place = shown(path) if path is not None else place_of(chosen.writer)
    return engine.begin_copied(ticket, place, lambda: copied_state(state), write, refused=call.wrong)


def _note(chosen: NoPlanner, ended: PendingSave) -> None:
    if ended.receipt is not None:
        chosen.note(ended.receipt)
