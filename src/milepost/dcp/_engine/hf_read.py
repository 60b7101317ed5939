"""The reader of Hugging Face's format: the files of a folder, as its index says, or those of the ranks that wrote them.

Files are opened by `safetensors.safe_open` where that library is installed: programs replace that function to read from
elsewhere. Without the library, Milepost's own reader opens them. Both refuse files that are not whole.
"""

import json
import os
import stat
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.futures import Future

from milepost.core.box import Box
from milepost.core.layout import Boxes, Held
from milepost.core.shardfile import Entry
from milepost.data.transfer import Meter, run_all
from milepost.dcp._engine.hf_names import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY, SUFFIX, HFStorageInfo, local_path
from milepost.dcp.filesystem import FileSystem
from milepost.errors import CheckpointDamaged, CheckpointNotFound, InvalidRequest, InvalidState, UnsafeCheckpoint
from milepost.formats.read.huggingface import LABEL, MAX_INDEX_BYTES, check_one_save, type_of
from milepost.formats.read.names import INDEX
from milepost.formats.read.safetensors_file import SafetensorsFile
from milepost.planning.items import box_of
from milepost.planning.protocol import LoadPlanner, StorageReader
from milepost.planning.records import (
    ChunkStorageMetadata,
    LoadPlan,
    Metadata,
    MetadataIndex,
    ReadItem,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from milepost.state.tensors import torch_dtype


class HuggingFaceStorageReader(StorageReader):
    """Reads safetensors files of a folder, cut in any way.

    `thread_count`: how many files are read at once. An index, where there is one, says which file counts for a tensor.
    Raises CheckpointNotFound, CheckpointDamaged where files or parts are missing or of several saves, and InvalidState
    where a tensor does not fit its target.
    """

    def __init__(self, path: str, thread_count: int = 1) -> None:
        self.fs = FileSystem()
        self.path: Path = local_path(path)
        self.thread_count = thread_count
        self.load_id = str(uuid.uuid4())
        self.storage_data: dict[MetadataIndex, HFStorageInfo] = {}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where it reads."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a path."""
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load."""
        if checkpoint_id:
            self.path = local_path(checkpoint_id)
        self.storage_data, self.load_id = {}, str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the files hold. Raises CheckpointDamaged if they are not a whole checkpoint."""
        del args, kwargs
        files, weights = self._listed()
        found = _FoundParts(weights)
        labels: dict[str, str | None] = {}
        for file in files:
            with self._open(file) as opened:
                notes = opened.metadata() or {}
                labels[os.path.basename(file)] = notes.get(LABEL)
                found.add(file, opened, _offsets_in(notes, file))
        check_one_save(labels, str(self.path))
        return Metadata(
            found.described(str(self.path)),
            storage_data=found.stored,
            storage_meta=StorageMeta(self.checkpoint_id, load_id=self.load_id),
        )

    def _listed(self) -> tuple[list[str], dict[str, str] | None]:
        """The files that count, and the file of each tensor if an index says so."""
        try:
            listed = sorted(map(str, self.fs.ls(self.path)))
        except FileNotFoundError:
            raise CheckpointNotFound(f"there is no folder {self.path}") from None
        names = {os.path.basename(file): file for file in listed}
        files = [file for file in listed if file.endswith(SUFFIX)]
        weights = read_weight_map(names[INDEX]) if INDEX in names else None
        if weights is not None:
            missing = sorted(set(weights.values()) - set(names))
            if missing:
                raise CheckpointDamaged(f"{self.path} lacks {len(missing)} files of its index, first {missing[0]!r}")
            files = [names[name] for name in sorted(set(weights.values()))]
        if not files:
            raise CheckpointNotFound(f"there are no safetensors files in {self.path}")
        return files, weights

    @contextmanager
    def _open(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """A file, open for reading; arguments as for `safe_open`. A failure to open it says which file."""
        file = args[0] if args else kwargs["filename"]
        _refuse_special(file)
        try:
            import safetensors  # noqa: PLC0415  # not a requirement of Milepost
        except ImportError:
            with SafetensorsFile(file) as own:
                yield own
            return
        safe_open: Any = safetensors.safe_open
        try:
            opened = safe_open(*args, framework="pt", **kwargs)
        except FileNotFoundError:
            raise CheckpointNotFound(f"there is no file {file}") from None
        except Exception as error:
            raise CheckpointDamaged(f"{file} is not a whole safetensors file: {error}") from error
        with opened as handle:
            yield handle

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn where the boxes are."""
        del is_coordinator, args, kwargs
        self.storage_data = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add nothing."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Add nothing."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items, file by file."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            stored = self.storage_data.get(item.storage_index)
            if stored is None:
                raise InvalidRequest(f"{self.path} has no {item.storage_index.fqn!r} at {item.storage_index.offset}")
            by_file[stored.relative_path].append(item)

        def read(file: str) -> None:
            with self._open(filename=file) as opened:
                for item in by_file[file]:
                    self._process_read_request(opened, item, planner)

        threads = max(1, min(self.thread_count, len(by_file)))
        run_all(iter(by_file), lambda: read, threads, Meter("load", str(self.path)))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
        """Read one item from an open file into the planner's tensor."""
        target = planner.resolve_tensor(req).detach()
        tensor = self._read_item(f, req)
        if target.shape != tensor.shape or not _fits(tensor.dtype, target.dtype):
            raise InvalidState(
                f"{req.dest_index.fqn!r}: {tensor.dtype} {tuple(tensor.shape)} was read, and the target is "
                f"{target.dtype} {tuple(target.shape)}"
            )
        target.copy_(tensor)
        planner.commit_tensor(req, target)

    def _read_item(self, f: Any, req: ReadItem) -> torch.Tensor:
        found: torch.Tensor = f.get_slice(req.storage_index.fqn)[slices_of(req)]
        return found


def slices_of(req: ReadItem) -> tuple[slice, ...]:
    """The part of the stored box that an item reads."""
    return tuple(slice(start, start + length) for start, length in zip(req.storage_offsets, req.lengths, strict=False))


def _fits(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a conversion keeps the kind of number."""
    return (source.is_complex, source.is_floating_point) == (target.is_complex, target.is_floating_point)


def read_weight_map(file: str | os.PathLike[str]) -> dict[str, str]:
    """The file of each tensor, as an index says. Raises CheckpointDamaged if it is not one."""
    _refuse_special(file)
    if os.path.getsize(file) > MAX_INDEX_BYTES:
        raise UnsafeCheckpoint(f"{file} has {os.path.getsize(file)} bytes; an index has at most {MAX_INDEX_BYTES}")
    try:
        found = json.loads(Path(file).read_bytes())["weight_map"]
        weights = {str(key): str(name) for key, name in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{file} is not a valid index: {type(error).__name__}: {str(error)[:200]}") from None
    if any("/" in name or "\0" in name or name in ("", "..") for name in weights.values()):
        raise UnsafeCheckpoint(f"{file} names files outside of its folder")
    return weights


def _refuse_special(file: str | os.PathLike[str]) -> None:
    """Raise UnsafeCheckpoint for a pipe, a device or a folder: opening a pipe would block. One may not be there."""
    try:
        mode = os.stat(file).st_mode
    except OSError:
        return  # what opens it says so
    if not stat.S_ISREG(mode):
        raise UnsafeCheckpoint(f"{file} is not a file")


def _offsets_in(notes: dict[str, str], file: str) -> dict[str, list[int]]:
    """Where the parts in a file begin in their tensors, if it says so."""
    text = notes.get(CUSTOM_METADATA_KEY)
    if not text:
        return {}
    try:
        return {key: [int(n) for n in about[SAVED_OFFSETS_KEY]] for key, about in json.loads(text).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{file} does not say where its parts begin: {str(error)[:200]}") from None


class _FoundParts:
    """The parts of tensors in the files that were looked at."""

    def __init__(self, weights: dict[str, str] | None) -> None:
        self._weights = weights
        self._parts: dict[str, list[tuple[torch.dtype, ChunkStorageMetadata]]] = defaultdict(list)
        self.stored: dict[MetadataIndex, HFStorageInfo] = {}

    def add(self, file: str, opened: Any, offsets: dict[str, list[int]]) -> None:
        """Add those tensors of an open file for which it counts."""
        for key in opened.keys():  # noqa: SIM118  # not a dict
            if self._weights is not None and self._weights.get(key) != os.path.basename(file):
                continue
            about = opened.get_slice(key)
            entry = Entry(about.get_dtype(), tuple(about.get_shape()))
            name, shape = type_of(entry, f"{key[:200]!r} in {file}")
            begin = torch.Size(offsets.get(key, [0] * len(shape)))
            index = MetadataIndex(key, begin)
            if index in self.stored:
                raise CheckpointDamaged(f"{key[:200]!r} stands in {self.stored[index].relative_path} and in {file}")
            dtype = torch_dtype(name)
            self.stored[index] = HFStorageInfo(file, torch.Size(shape), dtype)
            self._parts[key].append((dtype, ChunkStorageMetadata(begin, torch.Size(shape))))

    def described(self, place: str) -> dict[str, Any]:
        """The metadata of each tensor. Raises CheckpointDamaged where parts are missing."""
        missing = sorted(set(self._weights or ()) - set(self._parts))
        if missing:
            raise CheckpointDamaged(f"{place} lacks {len(missing)} tensors of its index, first {missing[0][:200]!r}")
        return {key: _described(key, parts, place) for key, parts in self._parts.items()}


def _described(key: str, parts: list[tuple[torch.dtype, ChunkStorageMetadata]], place: str) -> TensorStorageMetadata:
    chunks = [chunk for _, chunk in parts]
    kinds = {(dtype, len(chunk.sizes)) for dtype, chunk in parts}
    try:
        boxes = [box_of(chunk) for chunk in chunks]
        size = tuple(map(max, zip(*(box.end for box in boxes), strict=True)))
        if len(kinds) > 1:
            raise ValueError(f"they are of {len(kinds)} kinds")
        if len(boxes) > 1 or boxes[0] != Box.whole(size):
            Boxes(tuple(Held(box, "0") for box in boxes if box.elements)).check(size)
    except ValueError as error:
        raise CheckpointDamaged(f"{place}: the parts of {key[:200]!r} do not make it up: {error}") from None
    return TensorStorageMetadata(TensorProperties(parts[0][0]), torch.Size(size), chunks)
