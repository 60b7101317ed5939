"""The writer of Hugging Face's format: files appear when all ranks have written theirs, and the index last.

1. The coordinator decides which rank writes which files, and sweeps what unfinished saves left.
2. Each rank writes its files under temporary names, and makes them durable.
3. The coordinator gives them their names. Each file says which save wrote it, and how many files there are, so that
   readers refuse a mixture of two saves: files of ranks have no index that would tell.
"""

import contextlib
import importlib
import json
import os
import secrets
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.futures import Future

from milepost.core.shardfile import NewEntry
from milepost.data.transfer import Transfer
from milepost.dcp._consolidate_hf_safetensors import consolidate_safetensors_files
from milepost.dcp._engine.hf_names import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
    SHARDED_DIR_NAME,
    gen_file_name,
    local_path,
)
from milepost.dcp._engine.stagers import BlockingAsyncStager
from milepost.dcp.filesystem import FileSystem, SerializationFormat
from milepost.errors import InvalidRequest, StorageError
from milepost.formats.read.huggingface import LABEL, SaveLabel, pack_label
from milepost.formats.read.names import INDEX, SHARDED, SINGLE
from milepost.formats.write.files import NewFiles, owned, refuse_existing
from milepost.formats.write.huggingface import MODEL, HfFile, index_json, make_file, refuse_unknown
from milepost.planning.protocol import SavePlanner, StorageWriter
from milepost.planning.records import Metadata, SavePlan, StorageMeta, WriteItem, WriteResult
from milepost.planning.storage import resolved_tensor
from milepost.state.tensors import bytes_of, dtype_name

_AT_ONCE_BYTES = 4 << 20
_LISTED = 20
_ATTEMPT = "attempt"


class HuggingFaceStorageWriter(StorageWriter, BlockingAsyncStager):
    """Writes safetensors files as Hugging Face names them. Only tensors; other values are refused.

    `fqn_to_index_mapping`: the number of each tensor's file, from 1; without it there is one file (of each rank).
    `save_distributed`: every rank writes its own parts, to files of its own. Without it, one rank holds all tensors.
    `enable_consolidation`: those files go to the folder "sharded", and files with whole tensors are made from them.
    `overwrite=False` refuses to replace what is there. `thread_count` is taken and has no effect.
    `thread_count_consolidation`: how many threads make the whole files.
    """

    def __init__(
        self,
        path: str,
        fqn_to_index_mapping: dict[str, int] | None = None,
        thread_count: int = 1,
        save_distributed: bool = False,
        enable_consolidation: bool = False,
        thread_count_consolidation: int = 1,
        overwrite: bool = True,
    ) -> None:
        BlockingAsyncStager.__init__(self)
        with contextlib.suppress(ImportError):  # not needed here; programs find it imported after a save with DCP's
            importlib.import_module("safetensors.torch")
        self.fs = FileSystem()
        self.fqn_to_index_mapping, self.save_distributed = fqn_to_index_mapping, save_distributed
        self.enable_consolidation, self.overwrite = enable_consolidation, overwrite
        self.thread_count, self.thread_count_consolidation = thread_count, thread_count_consolidation
        self.serialization_format = SerializationFormat.SAFETENSORS
        self.consolidated_output_path: str | None = None
        self._place(path)
        self.save_id = str(uuid.uuid4())
        self._attempt: str | None = None
        self._written: list[str] = []
        self._ranks = 1

    def _place(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = local_path(path)
        if self.enable_consolidation:
            self.consolidated_output_path, self.path = str(self.path), self.path / SHARDED_DIR_NAME

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where it writes."""
        return self.path

    @property
    def metadata_path(self) -> str:
        """The name of the index."""
        return INDEX

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a path."""
        return "://" not in os.fspath(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """Where this writer writes, and the id of this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save."""
        if checkpoint_id:
            self._place(checkpoint_id)
        self.save_id, self._attempt, self._written = str(uuid.uuid4()), None, []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Forget what an earlier save wrote."""
        del is_coordinator, args, kwargs
        self._attempt, self._written = None, []

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what a safetensors file cannot hold, all of it at once."""
        others = [item.index.fqn for item in plan.items if item.tensor_data is None]
        if others:
            raise InvalidRequest(
                f"a Hugging Face folder holds tensors, and {len(others)} values are none: "
                f"{', '.join(map(repr, others[:_LISTED]))}. Leave them out, or save without this writer"
            )
        refuse_unknown([_entry(item) for item in plan.items])
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its number, and the name of this attempt."""
        mapping = self.fqn_to_index_mapping
        self._check(plans, mapping)
        names = set()
        for rank, plan in enumerate(plans, start=1):
            shard = rank if self.save_distributed else None
            names |= {_file_name(item, mapping, shard) for item in plan.items}
        old, left = owned(self.path, _owns)
        refuse_existing(str(self.path), old, self.overwrite)
        for name in left:
            (self.path / name).unlink(missing_ok=True)
        self._attempt = secrets.token_hex(8)
        added: dict[str, Any] = {} if mapping is None else {"fqn_to_index_mapping": mapping}
        added |= {_ATTEMPT: self._attempt, "files": len(names), "ranks": len(plans)}
        return [
            replace(plan, storage_data=added | ({"shard_index": rank} if self.save_distributed else {}))
            for rank, plan in enumerate(plans, start=1)
        ]

    def _check(self, plans: list[SavePlan], mapping: dict[str, int] | None) -> None:
        busy = [rank for rank, plan in enumerate(plans) if plan.items]
        keys = {item.index.fqn for plan in plans for item in plan.items}
        cut = sorted({i.index.fqn for plan in plans for i in plan.items if i.tensor_data and _is_part(i)})
        if not keys:
            raise InvalidRequest("the state holds no tensors")
        if not self.save_distributed and (len(busy) > 1 or cut):
            what = f"{len(busy)} ranks hold tensors" if len(busy) > 1 else f"{cut[0]!r} is a part of a tensor"
            raise InvalidRequest(
                f"without save_distributed, one rank writes all tensors as a whole, and {what}. Pass "
                "save_distributed=True (with enable_consolidation=True for files of whole tensors)"
            )
        if mapping is not None and keys - set(mapping):
            missing = sorted(keys - set(mapping))
            raise InvalidRequest(f"fqn_to_index_mapping lacks {len(missing)} keys: {missing[:_LISTED]}")

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files."""
        given: dict[str, Any] = plan.storage_data or {}
        mapping, shard = given.get("fqn_to_index_mapping"), given.get("shard_index")
        planned, self._ranks = _ATTEMPT in given, given.get("ranks", 1)
        self._attempt = given.get(_ATTEMPT) or secrets.token_hex(8)
        label = pack_label(SaveLabel(self._attempt, given["files"])) if planned else None
        files = NewFiles(self.path, self._attempt, Transfer())
        groups: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            groups.setdefault(_file_name(item, mapping, shard), []).append(item)
        for name, items in groups.items():
            self._written.append(name)
            _write_file(files, make_file(name, _entries(name, items), _notes(items, shard, label)), items, planner)
        if not planned:  # a plan that did not go through this writer: there is nothing to wait for
            files.publish(list(groups), [], [], set())
            self._attempt = None
        future: Future[list[WriteResult]] = Future()
        future.set_result([_result(item, name) for name, items in groups.items() for item in items])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Give the files of all ranks their names, write the index, and make files of whole tensors if asked for."""
        stored = [result for rank in results for result in rank]
        names = sorted({result.storage_data.relative_path for result in stored})
        files = NewFiles(self.path, self._attempt or secrets.token_hex(8), Transfer())
        last = []
        if not self.save_distributed:
            weight_map = {result.index.fqn: result.storage_data.relative_path for result in stored}
            files.small(INDEX, index_json(weight_map, sum(result.storage_data.length for result in stored)))
            last = [INDEX]
        if self._attempt is None:  # the caller wrote the files
            files.publish([], last, [], set())
            return
        missing = [name for name in names if not (self.path / files.temporary(name)).exists()]
        if missing:
            raise StorageError(
                f"{len(missing)} files that ranks wrote are not in {self.path}, first {missing[0]}. All ranks must see "
                "one folder; is it on a shared file system?"
            )
        files.publish(names, last, [INDEX], owned(self.path, _owns)[0])
        if self.consolidated_output_path is not None and self.save_distributed:
            keys = list(metadata.state_dict_metadata)
            consolidate_safetensors_files(
                str(self.path),
                self.consolidated_output_path,
                self.fqn_to_index_mapping or dict.fromkeys(keys, 1),
                self.thread_count_consolidation,
            )

    def abort(self, error: BaseException) -> None:
        """Remove this rank's temporary files, unless the coordinator may still give them their names."""
        if self._attempt is None or (self._ranks > 1 and not getattr(error, "failures", {})):
            return  # a later save sweeps
        NewFiles(self.path, self._attempt, Transfer()).discard([*self._written, INDEX])


def _owns(name: str) -> bool:
    """Whether a name in the folder is one that this writer makes."""
    return (MODEL.owns(name) and name != SINGLE) or SHARDED.fullmatch(name) is not None


def _file_name(item: WriteItem, mapping: dict[str, int] | None, shard: int | None) -> str:
    if mapping is None:
        return gen_file_name(1, 1, shard)
    return gen_file_name(mapping[item.index.fqn], max(mapping.values()), shard)


def _is_part(item: WriteItem) -> bool:
    assert item.tensor_data is not None
    return tuple(item.tensor_data.chunk.sizes) != tuple(item.tensor_data.size)


def _entry(item: WriteItem) -> NewEntry:
    assert item.tensor_data is not None
    name = item.index.fqn
    return NewEntry(name, dtype_name(item.tensor_data.properties.dtype, name), tuple(item.tensor_data.chunk.sizes))


def _entries(name: str, items: list[WriteItem]) -> list[NewEntry]:
    entries = [_entry(item) for item in items]
    keys = [entry.name for entry in entries]
    twice = sorted({key for key in keys if keys.count(key) > 1}) if len(set(keys)) < len(keys) else []
    if twice:
        raise InvalidRequest(
            f"{name} can hold one part of a tensor, and this rank has several of {len(twice)}: {twice[:_LISTED]}. "
            "Use `milepost.export_safetensors`, which writes whole tensors"
        )
    return entries


def _notes(items: list[WriteItem], shard: int | None, label: str | None) -> dict[str, str]:
    """What a file says about itself: where its parts of tensors begin, and which save wrote it."""
    notes = {DCP_VERSION_KEY: str(HF_DCP_VERSION)} | ({LABEL: label} if label is not None else {})
    if shard is None:
        return notes
    begins = {
        item.index.fqn: {SAVED_OFFSETS_KEY: list(item.tensor_data.chunk.offsets)} for item in items if item.tensor_data
    }
    return notes | {CUSTOM_METADATA_KEY: json.dumps(begins)}


def _write_file(files: NewFiles, file: HfFile, items: list[WriteItem], planner: SavePlanner) -> None:
    files.reserve(file.name, file.size_bytes)
    with files.writer(file.name, file.size_bytes, direct=False) as writer:
        writer.write(0, [file.head])
        for item in items:
            position = file.starts[item.index.fqn]
            for view in bytes_of(resolved_tensor(planner, item), _AT_ONCE_BYTES):
                writer.write(position, [view])
                position += len(view)


def _result(item: WriteItem, name: str) -> WriteResult:
    size = _entry(item).size_bytes
    return WriteResult(item.index, size, _StorageInfo(name, 0, size))
