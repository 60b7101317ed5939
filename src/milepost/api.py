"""What users call: `save`, `load`, `explain`."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from milepost.comm import TIMEOUT_S, Comm
from milepost.comm.distributed import ranks_of
from milepost.core.agreement import Plans
from milepost.data.transfer import HOST_MEMORY_BYTES, Transfer, Watcher
from milepost.errors import InvalidRequest
from milepost.loading.pipeline import LoadOptions, explain_state, load_state
from milepost.loading.report import LoadReport
from milepost.planning.protocol import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from milepost.planning.route import load_by_plans, save_by_plans
from milepost.planning.storage import CheckpointReader, CheckpointWriter
from milepost.saving.pipeline import Receipt, make_options, refuse, save_state
from milepost.state.values import Codec
from milepost.store import Location, store_at

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


def save(
    state: Any,
    path: Location | None = None,
    *,
    planner: SavePlanner | None = None,
    storage_writer: StorageWriter | None = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = True,
    on_difference: Literal["error", "warn"] = "error",
    compare_replicas: bool = True,
    reduce_partial: bool = False,
    types: Iterable[type] = (),
    allow_pickle: bool = False,
    plans: Plans | None = None,
    host_memory_bytes: int = HOST_MEMORY_BYTES,
    transfer: Transfer | None = None,
    progress: Watcher | None = None,
    process_group: "dist.ProcessGroup | Comm | None" = None,
    timeout_s: float = TIMEOUT_S,
) -> Receipt:
    """Save `state` at `path`, from every rank of the job, or from one process.

    Returns once the checkpoint is committed and survives power loss. Atomic: until then, whatever was at `path`
    stands, also when ranks or the machine die. An error on any rank is raised on every rank, and nothing is committed.

    `metadata`: a small dict of plain values to keep with it (the coordinator's counts).
    `overwrite=False`: refuse to replace a checkpoint.
    `on_difference`: what to do when values or replicas that should be equal on several ranks are not; "warn" keeps the
    lowest rank's. `compare_replicas=False` trusts that replicated tensors are equal, and saves hashing them.
    `reduce_partial`: sum DTensors with `Partial` placements instead of refusing them (a collective on their mesh).
    `types`: enum and dataclass types that occur in the state. `allow_pickle`: pickle what has no plain form.
    `plans`: keep one `Plans()` for all saves of a job, and a save of a structure that was saved before needs no planning.
    `host_memory_bytes`: the most that this rank uses beyond the state. `transfer`: threads and blocks, within that.
    `progress`: called on the coordinator with a `Progress` from time to time; `ProgressBar()` draws one.
    `process_group`: the ranks that save together; by default all of the job. `timeout_s`: how long to wait for them.
    `planner`, `storage_writer`: a `SavePlanner` or `StorageWriter` of yours, for what options cannot say.
    """
    comm = ranks_of(process_group, timeout_s)
    by_plans = planner is not None or storage_writer is not None
    try:
        options = make_options(
            metadata=metadata,
            overwrite=overwrite,
            on_difference=on_difference,
            compare_replicas=compare_replicas,
            reduce_partial=reduce_partial,
            types=types,
            allow_pickle=allow_pickle,
            plans=plans,
            host_memory_bytes=host_memory_bytes,
            transfer=transfer,
            progress=progress,
        )
    except InvalidRequest as error:
        if not by_plans:
            refuse(store_at(_given(path)), comm, error)  # the options of other ranks may be right
        raise
    if not by_plans:
        return save_state(state, store_at(_given(path)), comm, options)
    if storage_writer is None:
        storage_writer = CheckpointWriter(
            _given(path), overwrite=overwrite, metadata=metadata, transfer=options.transfer, progress=progress
        )
    storage_writer.reset(path)  # type: ignore[arg-type]  # whoever passes a writer passes a place that it knows
    return save_by_plans(state, storage_writer, planner, comm, options)


def load(
    state: Any,
    path: Location | None = None,
    *,
    planner: LoadPlanner | None = None,
    storage_reader: StorageReader | None = None,
    allow_missing: bool = False,
    allow_unexpected: bool = False,
    convert_dtype: bool = False,
    device: "torch.device | str | None" = None,
    types: Iterable[type] = (),
    allow_pickle: bool = False,
    verify: bool = True,
    share_reads: bool | None = None,
    host_memory_bytes: int = HOST_MEMORY_BYTES,
    transfer: Transfer | None = None,
    progress: Watcher | None = None,
    process_group: "dist.ProcessGroup | Comm | None" = None,
    timeout_s: float = TIMEOUT_S,
) -> Any:
    """Load the checkpoint at `path` into `state`, in place, on any number of ranks and any mesh. Gives `state` back.

    Tensors are filled where they are, dicts and lists get their values, stateful objects get `load_state_dict`.
    Every byte is verified. All differences between checkpoint and state are raised at once, before anything is
    read; an error while reading leaves the state partly filled, and is raised on every rank.

    `allow_missing`: leave what the checkpoint lacks as it is. `allow_unexpected`: ignore what the state lacks.
    `convert_dtype`: convert where the dtype differs.
    `device`: where tensors that are on the meta device get their memory (default: the mesh's device, else the CPU).
    `verify=False`: do not check the data (manifest and headers are). Only where something else protects every byte.
    `share_reads`: let ranks that want the same read it once and send it to each other, through the process group.
    By default that is done where it pays: over several machines, and between GPUs.
    `types`, `allow_pickle`, `host_memory_bytes`, `transfer`, `progress`, `process_group`: as for `save`.
    `planner`, `storage_reader`: a `LoadPlanner` or `StorageReader` of yours; the first four options are the planner's then.
    """
    options = LoadOptions(
        Codec(types, allow_pickle),
        allow_missing,
        allow_unexpected,
        convert_dtype,
        device,
        verify,
        share_reads,
        (transfer or Transfer()).within(host_memory_bytes),
        progress,
    )
    comm = ranks_of(process_group, timeout_s)
    if planner is None and storage_reader is None:
        return load_state(state, store_at(_given(path)), comm, options)
    if storage_reader is None:
        storage_reader = CheckpointReader(_given(path), verify=verify, transfer=options.transfer, progress=progress)
    storage_reader.reset(path)  # type: ignore[arg-type]  # whoever passes a reader passes a place that it knows
    return load_by_plans(state, storage_reader, planner, comm)


def _given(path: Location | None) -> Location:
    if path is None:
        raise InvalidRequest("say where: a path, a URL or a Store")
    return path


def explain(
    state: Any,
    path: Location,
    *,
    types: Iterable[type] = (),
    process_group: "dist.ProcessGroup | Comm | None" = None,
    timeout_s: float = TIMEOUT_S,
) -> LoadReport:
    """What `load` would find: every difference, and the bytes that each rank would read. Reads no data, changes nothing."""
    options = LoadOptions(Codec(types), convert_dtype=True)
    return explain_state(state, store_at(path), ranks_of(process_group, timeout_s), options)
