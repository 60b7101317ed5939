"""What users call to save while training goes on: `AsyncSaver`, `async_save`, `prewarm`, `close_async`."""

import inspect
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils._pytree import tree_map_only

from milepost.background import Background, BackgroundSaver, PendingSave, WhenBusy, Work, finish
from milepost.background.staging import Way
from milepost.comm import TIMEOUT_S, Comm
from milepost.comm.distributed import ranks_of
from milepost.errors import InvalidRequest
from milepost.planning.default import DefaultSavePlanner
from milepost.planning.protocol import SavePlanner, StorageWriter
from milepost.planning.protocol_run import place_of
from milepost.planning.route import is_plain, noted, opened, options_with, save_by_plans
from milepost.planning.storage import CheckpointWriter
from milepost.saving.describe import Described, describe
from milepost.saving.pipeline import Receipt, SaveOptions, make_options
from milepost.store import Location, store_at

_log = logging.getLogger("milepost")
OPTIONS = frozenset(inspect.signature(make_options).parameters)
_WAYS = ("auto", "host", "device", "overlap")


class AsyncSaver:
    """Saves in the background, one at a time, and keeps for the next save what took time to make: memory, and a process.

    `background`: "thread", or "process": one with low priority that Python's lock does not slow down, and that finishes
    the checkpoint even if this process is killed, once `staged()` says so.
    `stage`: how the state is copied. "host": into host memory, before the call returns. "device": on the GPU, from where it
    goes to host memory in the background. "overlap": the call returns at once, and the copy is made while the next forward
    and backward run: nobody may change the state before `wait_staged()`; pass `optimizer=` to `save`, and its `step` waits by
    itself, and all that it does not own is copied before the call returns. "auto": "device" where the GPU has room (for two
    copies before the first such save, so that later ones find it too), else "overlap" if there is an `optimizer=`, else "host".
    `staging_bytes`: the most host memory for copies; by default what is free. What does not fit is written first, from where
    it is, while the caller waits.
    `when_busy`: what a save does while another is under way: "wait", or "refuse" (raise SaveInFlight, on all ranks alike).
    `process_group`, `timeout_s`: as for `milepost.save`. Nothing in the background uses the process group.
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
        _one_of("background", background, ("thread", "process"))
        _one_of("when_busy", when_busy, ("wait", "refuse"))
        self._stage: Way = _one_of("stage", stage, _WAYS)
        if staging_bytes is not None and staging_bytes < 0:
            raise InvalidRequest(f"staging_bytes is not negative, as {staging_bytes} is")
        comm = ranks_of(process_group, timeout_s)
        self._saver = BackgroundSaver(comm, background, staging_bytes, when_busy)

    def save(
        self,
        state: Any,
        path: Location | None = None,
        *,
        stage: Way | None = None,
        optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None" = None,
        planner: SavePlanner | None = None,
        storage_writer: StorageWriter | None = None,
        then: Callable[[Comm], None] | None = None,
        **options: Any,
    ) -> PendingSave:
        """Begin to save `state` at `path`, from every rank. Returns when the caller may go on, as `stage` says.

        What is saved is the state as it is now, whatever happens to it afterwards. If an earlier save failed and nobody
        asked, its error is raised here, and nothing is saved. What goes wrong in this one is in its `result()`, the same on
        every rank; in a job of one process, a state that cannot be saved is refused here.

        `stage`: for this save. `optimizer`: those that change the state; their `step` waits until it is copied.
        `then`: called on every rank, in the background, after the commit. Further options are those of `milepost.save`. A
        `planner` or `storage_writer` of another kind than the default gets a copy of the state dict, in a thread.
        """
        unknown = sorted(options.keys() - OPTIONS)
        if unknown:
            raise InvalidRequest(f"{', '.join(unknown)}: no option of a save; there are {', '.join(sorted(OPTIONS))}")
        options.setdefault("plans", self._saver.plans)
        made = make_options(**options)
        way: Way = self._stage if stage is None else _one_of("stage", stage, _WAYS)
        optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        if planner is not None or storage_writer is not None:
            return self._save_with(state, path, planner, storage_writer, made, way, optimizers, then)
        if path is None:
            raise InvalidRequest("say where: a path, a URL or a Store")
        return self._saver.save(Work(store_at(path), made, _describing(state, made), then), way, optimizers)

    def _save_with(
        self,
        state: Any,
        path: Location | None,
        planner: SavePlanner | None,
        storage_writer: StorageWriter | None,
        options: SaveOptions,
        way: Way,
        optimizers: "Sequence[torch.optim.Optimizer]",
        then: Callable[[Comm], None] | None,
    ) -> PendingSave:
        from milepost.planning.torch_adapters import adapted_save_planner, adapted_writer  # noqa: PLC0415  # slow to import

        if storage_writer is None:
            if path is None:
                raise InvalidRequest("say where: a path, a URL or a Store")
            storage_writer = CheckpointWriter(
                path,
                overwrite=options.overwrite,
                metadata=options.metadata,
                transfer=options.transfer,
                progress=options.progress,
            )
        self._saver.check_open()
        writer, own = adapted_writer(storage_writer), adapted_save_planner(planner) or DefaultSavePlanner()
        if is_plain(writer, own):
            assert isinstance(own, DefaultSavePlanner)
            writer.reset(path)
            options = options_with(options, own, writer)
            pending = self._saver.save(Work(writer.store, options, _describing(state, options), then), way, optimizers)
            pending.add_done_callback(lambda ended: _note(writer, ended))
            return pending

        def write(copied: Callable[[], Any], comm: Comm) -> Receipt:
            writer.reset(path)  # type: ignore[arg-type]  # whoever passes a writer passes a place that it knows
            receipt = save_by_plans(copied(), writer, own, comm, options)
            finish(comm, receipt.url, then)
            return receipt

        place = str(path) if path is not None else place_of(writer)
        return self._saver.save_copied(place, lambda: copied_state(state), write)

    def refuse(self, path: Location, error: BaseException) -> None:
        """Take part in the save that the other ranks begin, in order to fail it with this error, on all of them."""
        options = make_options()
        self._saver.refuse(Work(store_at(path), options, _describing({}, options)), error)

    def prewarm(self, state: Any, **options: Any) -> None:
        """Make the memory that `state` needs, and start the process, so that the first save takes no longer than others.

        Every rank calls it. Options are those of `save` that a state needs to be described (`types`, `allow_pickle`).
        """
        self._saver.prewarm(_describing(state, make_options(**options)))

    def wait(self) -> None:
        """Return when no save is under way. Raises what the last one met, if nobody has asked."""
        self._saver.wait()

    def take_error(self) -> BaseException | None:
        """Wait until no save is under way. Gives what the last one met, if nobody has asked: now somebody has."""
        return self._saver.take_error()

    def join(self) -> None:
        """Return when no save is under way, however it ended."""
        self._saver.join()

    def close(self) -> None:
        """Wait, let go of memory and process, and raise what the last save met, if nobody has asked. May be called twice."""
        self._saver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failed:  # noqa: BLE001  # the error that is on its way must not be hidden
            _log.error("a save in the background failed too: %s", failed, exc_info=failed)


def _note(writer: CheckpointWriter, ended: PendingSave) -> None:
    receipt = ended.receipt
    if receipt is not None:
        noted(writer, receipt)


def _describing(state: Any, options: SaveOptions) -> Callable[[Comm], Described]:
    return lambda comm: describe(state, comm, options.codec, options.metadata, options.reduce_partial)


def copied_state(state: Any) -> dict[str, Any]:
    """A copy of a state dict in new host memory, for planners and storage that need one."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        # Torch's stager copies the memory behind a conjugate, and forgets that it is one.
        plain = tree_map_only(torch.Tensor, _worked_out, opened(state))
        copied: Any = stager.stage(plain)
        return dict(copied)
    finally:
        stager.close()


def _worked_out(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise InvalidRequest(f"{name} is one of {', '.join(map(repr, known))}, not {value!r}")
    return value


# One for each group of ranks and way of working, made when first used, until `close_async`.
_savers: dict[tuple[Any, str, float], AsyncSaver] = {}


def async_save(
    state: Any,
    path: Location | None = None,
    *,
    background: Background = "thread",
    process_group: "dist.ProcessGroup | Comm | None" = None,
    timeout_s: float = TIMEOUT_S,
    **options: Any,
) -> PendingSave:
    """Save `state` at `path` while training goes on. Returns when the state may be changed again.

    The same as `AsyncSaver(background=..., process_group=..., timeout_s=...).save(state, path, ...)`, with a saver that
    is kept from call to call; see there for `stage`, `optimizer` and the other options. A save that is under way is waited for.
    """
    return _saver_for(background, process_group, timeout_s).save(state, path, **options)


def prewarm(
    state: Any,
    *,
    background: Background = "thread",
    process_group: "dist.ProcessGroup | Comm | None" = None,
    timeout_s: float = TIMEOUT_S,
    **options: Any,
) -> None:
    """Make what `async_save` of such a state needs, so that the first one takes no longer than others. On every rank."""
    _saver_for(background, process_group, timeout_s).prewarm(state, **options)


def close_async() -> None:
    """Wait for what `async_save` has under way, and let go of its memory and process. Raises what nobody asked for."""
    errors = []
    while _savers:
        try:
            _savers.popitem()[1].close()
        except Exception as error:  # noqa: BLE001  # raised when all are closed
            errors.append(error)
    if errors:
        raise errors[0]


def _saver_for(background: Background, group: Any, timeout_s: float) -> AsyncSaver:
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    key = (group, background, timeout_s)
    if key not in _savers:
        _savers[key] = AsyncSaver(background=background, process_group=group, timeout_s=timeout_s)
    return _savers[key]
