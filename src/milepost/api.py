"""What users call: `save`, `load`, `explain`, and `async_save` with `prewarm` and `close_async`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from milepost.background.engine import Background, SaveEngine
from milepost.background.pending import PendingSave
from milepost.background.saver import SaveRequest, begin_save
from milepost.background.shared import SharedSavers
from milepost.background.staging import Way
from milepost.background.ticket import Ticket, unless_interrupted
from milepost.background.writing import Then
from milepost.comm import TIMEOUT_S, Call, Comm, calling
from milepost.comm.distributed import ranks_of
from milepost.core.option_values import check_values
from milepost.loading.options import ExplainKeywords, LoadKeywords, make_explain_options, make_load_options
from milepost.loading.pipeline import explain_state, load_state, refuse_load
from milepost.loading.report import LoadReport
from milepost.planning.protocol import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from milepost.planning.route import GlobalPlanner, LocalPlanner, NoPlanner, ignored_by_load, ignored_by_save, route
from milepost.planning.route_run import load_with_planner, save_with_planner, writer_at
from milepost.planning.stateful_dict import expand_stateful, expand_to_fill
from milepost.planning.storage import CheckpointReader
from milepost.saving.options import SaveKeywords, make_options, one_of
from milepost.saving.pipeline import Receipt, refuse, save_state
from milepost.store import Location, store_at
from milepost.store.location import required, store_to_save
from milepost.store.spelling import shown

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

T = TypeVar("T")
_SAVERS = SharedSavers()


def save(
    state: Any,
    path: Location | None = None,
    *,
    planner: SavePlanner | None = None,
    storage_writer: StorageWriter | None = None,
    process_group: "dist.ProcessGroup | Comm | None" = None,
    timeout_s: float = TIMEOUT_S,
    **options: Unpack[SaveKeywords],
) -> Receipt:
    """Save `state` at `path`, from every rank of the job, or from one process.

    Returns once the checkpoint is committed and survives power loss. Atomic: until then the checkpoint that was at
    `path` stands, even if ranks or the machine die.

    `process_group`: the ranks that save together; by default all of the job. `timeout_s`: how long to wait for them.
    `planner`, `storage_writer`: a `SavePlanner` or `StorageWriter` of your own, for what options cannot say. Options
    that they decide are then refused.

    Options:
    `metadata`: a small dict of plain values to keep with the checkpoint; the coordinator's is kept.
    `overwrite=False`: refuse to replace a checkpoint.
    `on_difference`: what to do if values or replicas that should be equal on several ranks are not. "error" raises;
    "warn" keeps the lowest rank's.
    `compare_replicas=False`: trust that replicated tensors are equal, which saves hashing them.
    `statistics=True`: record the count of NaN and Inf, min, max, mean and rms of each tensor while it is written; with
    "histogram" also a histogram. `milepost.open(path).statistics` has them. The coordinator's option counts.
    `healthy=True`: record whether all numbers are finite. Or a rule: a function that gets a `HealthCheck` and gives
    True, False, or why not. The verdict is in the receipt and in the checkpoint; see `Checkpointer`.
    `base`: a committed checkpoint, such as that of the step before. Tensors and parts of tensors that are equal there
    are not written again: the new checkpoint shares the files that hold them, and stays whole when `base` is removed.
    Data that is older than `max_depth` saves (100), and files of which more than the share `max_waste` (0.5) is not
    used any more, are written again. The coordinator's base counts.
    `reduce_partial=True`: sum DTensors with `Partial` placements (a collective on their mesh) instead of refusing them.
    `types`: enum and dataclass types that occur in the state, and subclasses of Tensor.
    `allow_pickle=True`: pickle values that have no plain form.
    `plans`: one `Plans()` for all saves of a job; a structure that was saved before then needs no planning.
    `host_memory_bytes`: the most memory that this rank uses beyond the state.
    `transfer`: threads and blocks, within that.
    `progress`: called on the coordinator with a `Progress` from time to time; `ProgressBar()` draws one.

    An error on any rank is raised on every rank, and nothing is committed: InvalidRequest for a wrong option,
    InvalidState for a state that cannot be saved, RanksDisagree, StorageError, SaveConflict, RanksMissing, NotDurable.

    >>> milepost.save({"step": 1}, "memory://example").generation
    1
    """
    comm = ranks_of(process_group, timeout_s)
    with calling(comm, Call("saving to", shown(path))):
        check_values({"planner": planner, "storage_writer": storage_writer})
        made, wrong = _checked(make_options, options, comm)
        if planner is None and storage_writer is None:
            store = store_to_save(path)
            return save_state(state, store, comm, made) if wrong is None else refuse(store, comm, wrong)
        writer = storage_writer if storage_writer is not None else writer_at(required(path), made)
        writer.reset(path)  # type: ignore[arg-type]  # a writer of the caller accepts the caller's paths
        chosen = route(writer, planner)
        wrong = wrong or ignored_by_save(options, chosen, own_writer=storage_writer is not None)
        match chosen:
            case NoPlanner():
                if wrong is not None:
                    refuse(chosen.writer.store, comm, wrong)
                return chosen.note(save_state(state, chosen.writer.store, comm, chosen.options(made)))
            case LocalPlanner() | GlobalPlanner():
                return save_with_planner(_unless(wrong, partial(expand_stateful, state)), chosen, comm, made)


def load(
    state: Any,
    path: Location | None = None,
    *,
    planner: LoadPlanner | None = None,
    storage_reader: StorageReader | None = None,
    process_group: "dist.ProcessGroup | Comm | None" = None,
    timeout_s: float = TIMEOUT_S,
    **options: Unpack[LoadKeywords],
) -> Any:
    """Load the checkpoint at `path` into `state`, in place, on any number of ranks and any mesh. Returns `state`.

    Tensors are filled where they are, dicts and lists get their values, stateful objects get `load_state_dict`. Every
    byte is verified.

    `process_group`, `timeout_s`: as for `save`.
    `planner`, `storage_reader`: a `LoadPlanner` or `StorageReader` of your own. With either, the first four options,
    `share_reads`, `types` and `allow_pickle` are refused: the planner decides (by default a `DefaultLoadPlanner`).

    Options:
    `allow_missing=True`: leave what the checkpoint lacks as it is.
    `allow_unexpected=True`: ignore what the state lacks.
    `convert_dtype=True`: convert between floating types, and between integers. A value beyond the range of the target's
    type is an error. `convert_dtype="lossy"`: convert between any types, whatever becomes of the values.
    `device`: where tensors that are on the meta device get their memory (default: the mesh's device, else the CPU).
    `allow_unhealthy=False`: raise CheckpointUnhealthy if the checkpoint was found unhealthy when it was saved.
    `verify=False`: do not check the data; manifest and headers are checked all the same. Use it only where something
    else protects every byte.
    `share_reads`: whether each byte is read once, and sent to the ranks that want it, through the process group. The
    default is to do so where it is faster: over several machines, and between GPUs.
    `types`, `allow_pickle`, `host_memory_bytes`, `transfer`, `progress`: as for `save`.

    An error on any rank is raised on every rank. Before anything is read: InvalidRequest for a wrong option,
    CheckpointNotFound, StateMismatch with all differences between checkpoint and state. An error while reading, such as
    CheckpointDamaged, leaves the state partly filled.

    >>> milepost.load({"step": 0}, "memory://example")
    {'step': 1}
    """
    comm = ranks_of(process_group, timeout_s)
    with calling(comm, Call("loading", shown(path))):
        check_values({"planner": planner, "storage_reader": storage_reader})
        made, wrong = _checked(make_load_options, options, comm)
        if planner is None and storage_reader is None:
            store = store_at(required(path))
            return load_state(state, store, comm, made) if wrong is None else refuse_load(store, comm, wrong)
        wrong = wrong or ignored_by_load(options, own_reader=storage_reader is not None)
        reader = storage_reader
        if reader is None:
            transfer, progress = made.transfer, made.progress
            reader = CheckpointReader(
                required(path),
                verify=made.verify,
                allow_unhealthy=made.allow_unhealthy,
                transfer=transfer,
                progress=progress,
            )
        reader.reset(path)  # type: ignore[arg-type]  # a reader of the caller accepts the caller's paths
        expanded, put_back = expand_to_fill(state)
        load_with_planner(_unless(wrong, expanded), put_back, reader, planner, comm)
        return state


def explain(
    state: Any,
    path: Location,
    *,
    process_group: "dist.ProcessGroup | Comm | None" = None,
    timeout_s: float = TIMEOUT_S,
    **options: Unpack[ExplainKeywords],
) -> LoadReport:
    """What `load` would find: every difference, and the bytes that each rank would read.

    Reads the manifest and no data, and changes nothing. `types`, `process_group`, `timeout_s`: as for `save`. An error
    on any rank is raised on every rank: InvalidRequest for a wrong option, CheckpointNotFound, CheckpointDamaged.

    >>> milepost.explain({"step": 0, "epoch": 0}, "memory://example").missing
    {'epoch': (0,)}
    """
    comm = ranks_of(process_group, timeout_s)
    with calling(comm, Call("explaining", shown(path))):
        made, wrong = _checked(make_explain_options, options, comm)
        store = store_at(path)
        if wrong is not None:
            refuse_load(store, comm, wrong, "explaining")
        return explain_state(state, store, comm, made)


def async_save(
    state: Any,
    path: Location | None = None,
    *,
    background: Background = "thread",
    stage: Way | None = None,
    optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None" = None,
    planner: SavePlanner | None = None,
    storage_writer: StorageWriter | None = None,
    then: Then | None = None,
    process_group: "dist.ProcessGroup | Comm | None" = None,
    timeout_s: float = TIMEOUT_S,
    **options: Unpack[SaveKeywords],
) -> PendingSave:
    """Save `state` at `path` while training goes on. Returns when the state may be changed again.

    The same as `AsyncSaver(background=..., process_group=..., timeout_s=...).save(state, path, ...)`, with a saver that
    is kept from call to call until `close_async`; see there for the arguments and for what is raised. It waits for a
    save that is under way.

    >>> pending = milepost.async_save({"step": 2}, "memory://in-background")
    >>> pending.result().generation
    1
    """
    request = SaveRequest(state, path, stage, optimizer, planner, storage_writer, then)

    def begin(ticket: Ticket) -> PendingSave:
        engine = _shared_engine(ticket, background, process_group, timeout_s, path)
        return begin_save(engine, ticket, request, options)

    return unless_interrupted(begin)


def prewarm(
    state: Any,
    *,
    background: Background = "thread",
    process_group: "dist.ProcessGroup | Comm | None" = None,
    timeout_s: float = TIMEOUT_S,
    **options: Unpack[SaveKeywords],
) -> None:
    """Make what `async_save` of such a state needs, so that the first save is as fast as later ones.

    Every rank calls it, and waits for the others. `options`: those of `save` that say how to describe a state (`types`,
    `allow_pickle`, `reduce_partial`). An error on any rank is raised on every rank, InvalidRequest for a wrong option.

    >>> milepost.prewarm({"step": 2})
    """

    def begin(ticket: Ticket) -> None:
        _shared_engine(ticket, background, process_group, timeout_s, None).prewarm(ticket, state, **options)

    unless_interrupted(begin)


def close_async() -> None:
    """Wait for the saves that `async_save` has begun, and give memory and processes back. May be called twice.

    Raises an error that the caller did not ask for.

    >>> milepost.close_async()
    """
    _SAVERS.close()


def _shared_engine(
    ticket: Ticket, background: Background, group: Any, timeout_s: float, path: Location | None
) -> SaveEngine:
    try:
        one_of("background", background, ("thread", "process"))
    except Exception as error:
        if path is not None:
            # The ranks with a valid option wait for this one, most likely where they met the last time.
            (_SAVERS.last_of(group) or _SAVERS.get(group, "thread", timeout_s)).refuse(ticket, path, error)
        raise
    return _SAVERS.get(group, background, timeout_s)


def _checked(make: Callable[..., T], options: Any, comm: Comm) -> tuple[T, Exception | None]:
    """The options as a record; or the default ones, and the error, which is then raised on all ranks."""
    try:
        return make(**options), None
    except Exception as error:
        if comm.size == 1:
            raise
        return make(), error


def _unless(wrong: Exception | None, make: Callable[[], T]) -> Callable[[], T]:
    """The function; or one that raises instead, on the way to the other ranks."""

    def fail() -> T:
        assert wrong is not None
        raise wrong

    return make if wrong is None else fail
