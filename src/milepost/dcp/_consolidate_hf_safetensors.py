"""Whole tensors from the files of a distributed save: a stream, and nothing looks whole before everything is."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.comm import TIMEOUT_S, Comm
from milepost.comm.base import Solo
from milepost.comm.distributed import ranks_of
from milepost.core.box import Box
from milepost.core.shardfile import NewEntry
from milepost.data.late import LateBox
from milepost.data.transfer import Meter, Transfer
from milepost.dcp._engine.hf_names import SUFFIX, gen_file_name, local_path
from milepost.dcp._engine.lent import lend
from milepost.errors import CheckpointNotFound, InvalidRequest
from milepost.formats.read.huggingface import read_files
from milepost.formats.read.names import SHARDED
from milepost.formats.read.virtual import Foreign, virtual
from milepost.formats.write.export import runs_of
from milepost.formats.write.files import FolderAttempt, FolderPlan, write_together
from milepost.formats.write.huggingface import layout_by_name, plan_of
from milepost.formats.write.source import FilesReader
from milepost.store import LocalStore

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["consolidate_safetensors_files", "consolidate_safetensors_files_on_every_rank"]

_LISTED = 20


def consolidate_safetensors_files(
    input_dir: str, output_dir: str, fqn_to_index_mapping: dict[str, int], num_threads: int = 1
) -> None:
    """Make files of whole tensors, in this process alone.

    `fqn_to_index_mapping`: the number of each tensor's file; tensors that it does not name are left out. The index is
    renamed last. Raises CheckpointNotFound, CheckpointDamaged where parts are missing, InvalidRequest for names that
    are not there.
    """
    _consolidate(input_dir, output_dir, fqn_to_index_mapping, num_threads, Solo())


def consolidate_safetensors_files_on_every_rank(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: dict[str, int],
    num_threads: int = 1,
    process_group: "dist.ProcessGroup | None" = None,
) -> None:
    """The same on every rank of a job: each writes an equal share of the bytes. An error reaches all ranks."""
    _consolidate(input_dir, output_dir, fqn_to_index_mapping, num_threads, ranks_of(process_group, TIMEOUT_S))


def _consolidate(source: str, target: str, numbers: dict[str, int], threads: int, comm: Comm) -> None:
    transfer = Transfer(threads=max(threads, 1))
    readers: list[FilesReader] = []

    def plan() -> FolderPlan:
        found = _found(source)
        readers.append(FilesReader(found.files, LocalStore(local_path(source)), transfer))
        return _plan(source, found, readers[0], numbers)

    try:
        meter = Meter("save", target)
        write_together(
            FolderAttempt(Path(os.path.abspath(local_path(target))), comm, transfer, overwrite=True), plan, meter
        )
    finally:
        for reader in readers:
            reader.close()


def _found(source: str) -> Foreign:
    store = LocalStore(local_path(source))
    names = [name for name in store.list("") if "/" not in name and name.endswith(SUFFIX)]
    shards = [name for name in names if SHARDED.fullmatch(name)]  # beside them may lie what was made of them before
    if not names:
        raise CheckpointNotFound(f"there are no safetensors files in {source}")
    return virtual(store, read_files(store, shards or names))


def _plan(source: str, found: Foreign, reader: FilesReader, numbers: dict[str, int]) -> FolderPlan:
    tensors = {tensor.key: tensor for tensor in found.manifest.tensors}
    unknown = sorted(set(numbers) - set(tensors))
    if unknown or not numbers:
        raise InvalidRequest(f"{source} lacks {len(unknown)} of {len(numbers)} tensors: {unknown[:_LISTED]}")
    most = max(numbers.values())
    chosen = {key: tensors[key] for key in numbers}
    names = {
        NewEntry(key, tensor.dtype, tensor.shape): gen_file_name(numbers[key], most) for key, tensor in chosen.items()
    }
    boxes = {key: LateBox(reader, key, tensor.dtype, Box.whole(tensor.shape)) for key, tensor in chosen.items()}
    return plan_of(layout_by_name(names), dict(boxes))


def _calculate_max_contiguous_elements(indices: list[int], sub_tensor_shape: list[int], tensor_shape: list[int]) -> int:
    """How many elements of a box, from `indices` on, follow each other in the whole tensor too."""
    if not indices or not sub_tensor_shape or not tensor_shape:
        raise ValueError("Input lists cannot be empty")
    if not len(indices) == len(sub_tensor_shape) == len(tensor_shape):
        counts = (len(indices), len(sub_tensor_shape), len(tensor_shape))
        raise ValueError(f"All input lists must have the same length, and they have {counts}")
    for dim, (index, length, whole) in enumerate(zip(indices, sub_tensor_shape, tensor_shape, strict=True)):
        if index >= length:
            raise ValueError(
                f"Index {index} at dimension {dim} is out of bounds for sub-tensor shape {sub_tensor_shape}"
            )
        if length > whole:
            raise ValueError(f"Sub-tensor dimension {length} at position {dim} exceeds tensor dimension {whole}")
    run, inner = 1, 1
    for dim in reversed(range(len(indices))):
        run = (sub_tensor_shape[dim] - indices[dim]) * inner
        inner *= sub_tensor_shape[dim]
        if indices[dim] or sub_tensor_shape[dim] != tensor_shape[dim]:
            break
    return run


def _write_sub_tensor_to_file_optimized(
    full_tensor_mv: memoryview,
    sub_tensor_bytes: bytes,
    element_size: int,
    tensor_shape: list[int],
    sub_tensor_offsets: list[int],
    sub_tensor_shape: list[int],
) -> None:
    """Copy the bytes of a box to their places in the bytes of the whole tensor, run by run."""
    box = Box(tuple(sub_tensor_offsets), tuple(sub_tensor_shape))
    for at, low, length in runs_of(box, tuple(tensor_shape)):
        to, start, size = at * element_size, low * element_size, length * element_size
        full_tensor_mv[to : to + size] = sub_tensor_bytes[start : start + size]


lend(
    __name__,
    "logger _FqnData _InputFileData _OutputFileData _consolidate_safetensors_files _parse_input_metadata "
    "_process_output_file _read_tensor_data _write_data _write_metadata _write_overall_metadata_file",
)
