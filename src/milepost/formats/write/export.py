"""`milepost.export_safetensors`: a running job writes its state to a Hugging Face folder, each rank its own bytes."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from milepost.comm import TIMEOUT_S, Announcement, Call, Comm, broadcast, calling, defer, operating_on, together
from milepost.comm.distributed import ranks_of
from milepost.core.agreement import Plans
from milepost.core.box import Box, Shape, strides_of
from milepost.core.division import written_by
from milepost.core.option_values import check_values
from milepost.core.shardfile import NewEntry
from milepost.core.tree import Node
from milepost.core.wire import Wire
from milepost.data.memory import Block, copy_run, needs_pinned
from milepost.data.transfer import HOST_MEMORY_BYTES, Meter, Transfer, Watcher, run_all
from milepost.errors import InvalidRequest
from milepost.events.operation import moved
from milepost.formats.read.names import SINGLE
from milepost.formats.write.chosen import Rename, choose
from milepost.formats.write.convert import MAX_SHARD_BYTES, local_folder, within
from milepost.formats.write.converted import Converted
from milepost.formats.write.files import FolderAttempt, FolderPlan, NewFiles, Sums
from milepost.formats.write.huggingface import HfFile, HfNames, hf_layout, notes_of, plan_of
from milepost.formats.write.torchfile import plain_value
from milepost.saving.agree import agree
from milepost.saving.describe import Described, describe
from milepost.state.tensors import find_part
from milepost.state.values import Codec
from milepost.store import Location, store_at
from milepost.store.local import LocalWriter

if TYPE_CHECKING:
    import torch.distributed as dist


class _ExportTerms(msgspec.Struct, frozen=True):
    """What the coordinator announces: all tensors under their new keys, the old key of each, and the header's notes."""

    tensors: list[NewEntry]
    old: dict[str, str]
    notes: dict[str, str]


_NAMING = Announcement("naming the tensors", Wire(_ExportTerms))


class _SlabWrite(NamedTuple):
    """A slab of a tensor: its memory, and where the whole tensor starts in its file."""

    data: torch.Tensor
    slab: Box
    shape: Shape
    start: int


def export_safetensors(
    state: Any,
    path: Location,
    *,
    rename: Rename | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    file_name: str = SINGLE,
    drop_values: bool = False,
    overwrite: bool = False,
    host_memory_bytes: int = HOST_MEMORY_BYTES,
    transfer: Transfer | None = None,
    progress: Watcher | None = None,
    process_group: "dist.ProcessGroup | Comm | None" = None,
    timeout_s: float = TIMEOUT_S,
) -> Converted:
    """Write the tensors of a live state to a Hugging Face folder, from every rank of the job, or from one process.

    Every rank writes its own bytes to their place in the final files; nothing is gathered, and there is no second pass.
    Returns once all files are whole and durable; the folder does not look whole before. Replicas are assumed to be
    equal, and each writes a share. Where a tensor is not cut along its first dimension, its rows are written one by
    one. Options are as for `convert`.

    >>> milepost.export_safetensors({"w": torch.ones(3)}, "exported").data_bytes
    12
    """
    comm, store = ranks_of(process_group, timeout_s), store_at(path)

    def check() -> FolderAttempt:
        check_values({"max_shard_bytes": max_shard_bytes, "drop_values": drop_values, "overwrite": overwrite})
        check_values({"rename": rename, "progress": progress, "file_name": file_name})
        limited = within(transfer, host_memory_bytes)
        return FolderAttempt(local_folder(store, "safetensors"), comm, limited, overwrite)

    target_call = Call("converting to", store.url)
    with calling(comm, target_call) as call, operating_on(comm, "convert", store.url) as operation:
        attempt = together(comm, call, "checking the options", check)
        meter = Meter("save", store.url, progress if comm.rank == comm.coordinator else None)
        terms = _export(state, attempt, meter, rename, drop_values, HfNames(max_shard_bytes, file_name))
        total = sum(tensor.size_bytes for tensor in terms.tensors)
        operation.commit(0, total)
    return Converted(store.url, "safetensors", len(terms.tensors), total)


def _export(
    state: Any, attempt: FolderAttempt, meter: Meter, rename: Rename | None, drop_values: bool, named: HfNames
) -> _ExportTerms:
    comm, limited, plans = attempt.comm, attempt.transfer, Plans()
    deferred = defer(comm, lambda: describe(state, comm, Codec(), {}))
    agreed = agree(comm, attempt.call, deferred, plans, True)
    described = deferred.get()

    def name_tensors() -> _ExportTerms:
        everything = plans.overview(agreed.id)
        assert everything is not None
        return _terms(everything.tree, everything.tensors, described, rename, drop_values)

    terms = broadcast(comm, attempt.call, _NAMING, name_tensors)
    layout = hf_layout(terms.tensors, terms.notes, named)
    names = {old: new for new, old in terms.old.items()}
    slabs = [
        (names[tensor.key], tensor.shape, item.box, find_part(described.tensors[tensor.key], item.box))
        for tensor in agreed.tensors
        if tensor.key in names
        for item in written_by(tensor, agreed.layouts[tensor.layout], comm.rank)
    ]
    size = limited.block_bytes

    def work(files: NewFiles, plan: FolderPlan) -> Sums:
        del plan
        meter.expect(sum(data.numel() * data.element_size() for *_, data in slabs))
        for file in layout.files:
            mine = [(file.starts[key], *rest) for key, *rest in slabs if key in file.starts]
            if not mine and comm.rank != comm.coordinator:
                continue
            with files.writer(file.name, file.size_bytes, direct=False) as writer:
                _write_file(writer, file, mine, comm.rank == comm.coordinator, size, limited, meter)
        moved(sum(data.numel() * data.element_size() for *_, data in slabs))
        return {}

    attempt.run(lambda: plan_of(layout, {}, named), work, lambda *_: None)
    meter.finish()
    return terms


def _terms(
    tree: tuple[Node, ...], tensors: Any, described: Described, rename: Rename | None, drop_values: bool
) -> _ExportTerms:
    codec = Codec()
    nodes, names = choose(tree, rename, codec)
    records = {tensor.key: tensor for tensor in tensors}
    found, values = [], {}
    saved = {value.key: value.value for value in described.table.values}
    for node in nodes:
        if not node.key:
            continue
        old = names[node.key]
        if old in records and not records[old].is_bytes:
            found.append(NewEntry(node.key, records[old].dtype, records[old].shape))
        else:
            values[node.key] = plain_value(codec.decode(saved[old], old)) if old in saved else object()
    if not found:
        raise InvalidRequest("the state holds no tensors")
    return _ExportTerms(found, {tensor.name: names[tensor.name] for tensor in found}, notes_of(values, {}, drop_values))


def _write_file(
    writer: LocalWriter,
    file: HfFile,
    mine: "list[Any]",
    is_coordinator: bool,
    block_bytes: int,
    transfer: Transfer,
    meter: Meter,
) -> None:
    """Write this rank's part of one file."""
    if is_coordinator:
        writer.write(0, [file.head])
    pinned = needs_pinned([data for *_, data in mine])
    total = sum(data.numel() * data.element_size() for *_, data in mine)

    def jobs() -> Iterator[_SlabWrite]:
        for start, shape, box, data in mine:
            for slab in box.slabs(max(block_bytes // data.element_size(), 1)):
                yield _SlabWrite(data[slab.within(box).slices], slab, shape, start)

    def make_worker() -> Callable[[_SlabWrite], None]:
        block = Block(min(block_bytes, max(total, 1)), pinned)

        def write(job: _SlabWrite) -> None:
            size = job.data.element_size()
            copy_run(job.data, 0, job.slab.elements * size, block, 0)
            for at, low, length in runs_of(job.slab, job.shape):
                writer.write(job.start + at * size, [block.view[low * size : (low + length) * size]])
            meter.add(job.slab.elements * size)

        return write

    run_all(jobs(), make_worker, transfer.threads_to_write(total, len(mine), cached=True), meter)


def runs_of(box: Box, shape: Shape) -> Iterator[tuple[int, int, int]]:
    """The runs of elements that a box forms in a row-major tensor: (start in the tensor, start in the box, length)."""
    inner = len(shape)
    while inner > 0 and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    # Dimensions from `inner` on are whole; the one before them makes each run longer.
    outer = max(inner - 1, 0)
    length = Box((0,) * (len(shape) - outer), box.shape[outer:]).elements
    strides = strides_of(shape)
    first = sum(a * s for a, s in zip(box.offset, strides, strict=True))
    counts = box.shape[:outer]
    index = [0] * outer
    for low in range(0, box.elements, max(length, 1)):
        yield first + sum(i * s for i, s in zip(index, strides[:outer], strict=True)), low, length
        for dim in reversed(range(outer)):
            index[dim] += 1
            if index[dim] < counts[dim]:
                break
            index[dim] = 0
