"""Looking inside: a checkpoint opened without a process group, a GPU, or torch until a tensor is asked for."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import replace

from milepost.commit.find import find, parse
from milepost.core.box import Box, Shape
from milepost.core.division import PlannedRead, read_plan
from milepost.core.dtypes import DTYPES
from milepost.core.layout import Layout
from milepost.core.manifest import Manifest, Tensor, TensorKind
from milepost.core.notebook import checkpoint_html, tensor_html
from milepost.core.option_values import check_values
from milepost.core.ranks import unpack_ranks
from milepost.core.statistics import Health, TensorStatistics
from milepost.core.tree import LEAVES, Node, Parts, Path, build, grow, show_path
from milepost.data.read import Damage, Files
from milepost.data.transfer import Meter, Transfer, Watcher, limited_transfer
from milepost.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, StorageError, UnsafeCheckpoint
from milepost.events.operation import moved, operating, phasing
from milepost.state.values import Codec
from milepost.store import Location, Store, store_at

if TYPE_CHECKING:
    import torch

Index = int | slice | EllipsisType
MAX_DAMAGES = 1000
"""How many entries that a manifest promises and no file holds are reported; it can promise millions."""
_ENTRIES_AT_ONCE = 100_000
"""How many entries are grouped by their files at once."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What `Checkpoint.verify` found: how much was read, and every damaged place.

    >>> _ = milepost.save({"w": torch.ones(3)}, "memory://verified")
    >>> found = milepost.open("memory://verified").verify()
    >>> found.ok, found.files, found.damages
    (True, 1, ())
    """

    files: int
    bytes_read: int
    damages: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is what was saved."""
        return not self.damages

    def raise_if_damaged(self) -> None:
        """Raise CheckpointDamaged, listing every damaged place, if there is one."""
        if self.damages:
            lines = "\n  ".join(f"{d.file}: {d.reason}" for d in self.damages[:50])
            raise CheckpointDamaged(f"{len(self.damages)} damaged places:\n  {lines}")


class LazyTensor:
    """A saved tensor that has not been read. Indexing reads just the bytes it needs, from all files that hold them.

    Indices are integers, slices and `...`. What is read is verified; CheckpointDamaged names what is not as saved.

    >>> _ = milepost.save({"w": torch.arange(6.0).view(2, 3)}, "memory://lazy")
    >>> lazy = milepost.open("memory://lazy")["w"]
    >>> lazy
    LazyTensor('w', float32, (2, 3))
    >>> lazy[1, 1:], lazy.dtype
    (tensor([4., 5.]), torch.float32)
    """

    def __init__(self, files: Files, record: Tensor) -> None:
        self._files, self._record = files, record

    @property
    def key(self) -> str:
        """Its key."""
        return self._record.key

    @property
    def shape(self) -> Shape:
        """Its shape."""
        return self._record.shape

    @property
    def dtype(self) -> "torch.dtype":
        """Its dtype. This imports torch; `dtype_name` does not."""
        from milepost.state.tensors import torch_dtype  # noqa: PLC0415  # listing a checkpoint must not wait for torch

        return torch_dtype(self.dtype_name)

    @property
    def dtype_name(self) -> str:
        """The name of its dtype: "bfloat16"."""
        return self._record.dtype

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return Box.whole(self.shape).elements * DTYPES[self.dtype_name].size_bytes

    @property
    def layout(self) -> Layout:
        """How it was cut over the ranks that saved it."""
        return self._files.manifest.layout_of(self._record)

    def __repr__(self) -> str:
        return f"LazyTensor({self.key!r}, {self.dtype_name}, {self.shape})"

    def _repr_html_(self) -> str:
        """What a notebook shows: how it was cut, and where its boxes are. Reads nothing."""
        return tensor_html(self._files.manifest, self._record, self._files.name_of)

    def __getitem__(self, index: "Index | tuple[Index, ...]") -> "torch.Tensor":
        box, rest = _region(index, self.shape)
        whole: torch.Tensor = self._read(box)
        return whole[rest]

    def read(self) -> "torch.Tensor":
        """The whole tensor, on the CPU."""
        whole: torch.Tensor = self._read(Box.whole(self.shape))
        return whole

    def read_as_saved(self) -> Any:
        """All of it, as the kind of object that was saved: a tensor, an array of numpy, or bytes."""
        return self._read(Box.whole(self.shape), self._record.kind)

    def _read(self, box: Box, kind: TensorKind = "tensor") -> Any:
        # These import torch: listing a checkpoint must not wait for it.
        from milepost.data.pieces import placement_of  # noqa: PLC0415
        from milepost.data.place import place_all  # noqa: PLC0415
        from milepost.state.tensors import new_saved  # noqa: PLC0415

        items = []
        for item in read_plan(self._files.manifest, self._record, box):
            if not self._record.transforms:
                # What is missing is reported before memory is taken.
                self._files.holding(item.rank, item.name).entry(item, self.dtype_name)
            items.append(item)
        try:
            result, memory = new_saved(replace(self._record, shape=box.shape, kind=kind))
        except (RuntimeError, MemoryError) as error:
            raise UnsafeCheckpoint(
                f"{self.key[:200]!r} takes {self.size_bytes} bytes, more than the memory; read it in parts: {error}"
            ) from error
        place_all(self._files, (placement_of(i, self.dtype_name, memory[i.box.within(box).slices]) for i in items))
        return result


class Checkpoint(Mapping[str, Any]):
    """An open checkpoint: a mapping from key to `LazyTensor` or value. Use it as a context manager, or call `close`.

    `milepost.open` makes one. It stays at the generation that it found. Once newer saves have replaced that generation,
    reads raise CheckpointDamaged and say so.

    >>> _ = milepost.save({"w": torch.ones(2), "step": 7}, "memory://open", metadata={"loss": 2.1})
    >>> with milepost.open("memory://open") as checkpoint:
    ...     list(checkpoint), checkpoint["step"], checkpoint.metadata, checkpoint.generation
    (['w', 'step'], 7, {'loss': 2.1}, 1)
    """

    def __init__(self, store: Store, codec: Codec) -> None:
        self._codec = codec
        self._files = files_at(store)
        self._manifest = self._files.manifest
        self._tensors = {t.key: t for t in self._manifest.tensors}
        self._values = {v.key: v.value for v in self._manifest.values}
        self._per_rank = {p.key: unpack_ranks(p.ranks) for p in self._manifest.per_rank}
        self.url = store.url

    @property
    def manifest(self) -> Manifest:
        """The manifest, as a record."""
        return self._manifest

    @property
    def format(self) -> str:
        """Its format: "milepost", or "dcp", "safetensors" or "torch"."""
        return self._manifest.format

    @property
    def generation(self) -> int:
        """Which commit at this place it is, from 1; 0 for other formats."""
        return self._manifest.generation

    @property
    def world(self) -> int:
        """How many ranks saved it."""
        return self._manifest.world

    @property
    def metadata(self) -> dict[str, Any]:
        """What the user passed as `metadata`."""
        decoded = self._decode(self._manifest.metadata, "metadata")
        if not isinstance(decoded, dict):
            raise CheckpointDamaged(f"{self.url}: its metadata is not a dict")
        return decoded

    @property
    def statistics(self) -> dict[str, TensorStatistics]:
        """What was recorded about the numbers of each tensor while it was saved; empty where nothing was.

        Under each key: tied tensors have the statistics of the one that is stored.
        """
        rows = {row.key: row for row in self._manifest.statistics}
        tied = {t.key: rows[t.same_as] for t in self._manifest.tensors if t.same_as in rows} if rows else {}
        return {**rows, **{key: replace(row, key=key) for key, row in tied.items()}}

    @property
    def health(self) -> Health | None:
        """What the rule of the run said when it was saved; None where there was no rule."""
        return self._manifest.health

    @property
    def tensors(self) -> dict[str, LazyTensor]:
        """All tensors by key."""
        return {key: LazyTensor(self._files, record) for key, record in self._tensors.items()}

    def file_name(self, rank: int, entry: str | None = None) -> str:
        """The name of the file that this rank wrote; or of the one, perhaps of an earlier save, with an entry of it."""
        return self._files.name_of(rank if entry is None else self._files.number_of(rank, entry))

    def __iter__(self) -> Iterator[str]:
        return (node.key for node in self._manifest.tree if node.kind in LEAVES)

    def __len__(self) -> int:
        return len(self._tensors) + len(self._values) + len(self._per_rank)

    def __contains__(self, key: object) -> bool:
        # Not by `__getitem__`, as a Mapping would: that reads bytes and values of ranks, and decodes values.
        return key in self._tensors or key in self._values or key in self._per_rank

    def __repr__(self) -> str:
        what = f"generation {self.generation}" if self.generation else self.format
        return f"Checkpoint({self.url!r}, {what}, {len(self)} keys)"

    def _repr_html_(self) -> str:
        """What a notebook shows: a summary, and the first keys. Reads nothing."""
        return checkpoint_html(self.url, self._manifest, age_of(self._manifest))

    def __getitem__(self, key: str) -> Any:
        """A `LazyTensor` for a tensor, the value for a value, a dict from rank to value for rank-private ones."""
        if key in self._tensors:
            record = self._tensors[key]
            lazy = LazyTensor(self._files, record)
            return lazy.read_as_saved() if record.is_bytes else lazy
        if key in self._values:
            return self._decode(self._values[key], key)
        if key in self._per_rank:
            return {rank: self._private(rank)[key] for rank in self._per_rank[key]}
        raise KeyError(key)

    def tree(self) -> Any:
        """The whole state with its containers, types and order; tensors are lazy."""
        return self._build(lambda record: LazyTensor(self._files, record))

    def state(self) -> Any:
        """The whole state, read: tensors on the CPU, containers as they were saved, rank-private values by rank.

        A subclass of Tensor that is not in `types` is a dict of its parts.
        """
        from milepost.state.composite import composed_or_parts  # noqa: PLC0415  # imports torch

        return self._build(
            lambda record: LazyTensor(self._files, record).read_as_saved(),
            lambda parts, path: composed_or_parts(parts, self._codec, show_path(path)),
        )

    def _build(self, tensor: Any, compose: "Callable[[Parts, Path], Any]" = lambda parts, _path: dict(parts)) -> Any:
        def leaf(node: Node, path: Path) -> Any:
            del path
            return tensor(self._tensors[node.key]) if node.kind == "tensor" else self[node.key]

        try:
            return build(grow(self._manifest.tree), lambda name: self._decode(name, "a key"), leaf, (), compose)
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointDamaged(f"{self.url}: {error}") from error

    def _private(self, rank: int) -> dict[str, Any]:
        from milepost.loading.private import read_private_values  # noqa: PLC0415  # imports torch

        return read_private_values(self._files, rank, self._codec)

    def _decode(self, data: Any, key: str) -> Any:
        try:
            return self._codec.decode(data, key)
        except ValueError as error:
            raise CheckpointDamaged(f"{self.url}: {error}") from error

    def verify(self, *, transfer: Transfer | None = None, progress: Watcher | None = None) -> Verification:
        """Read and check every byte. Reports all damage. Raises StorageError if there is none, but what cannot be read.

        `transfer`: threads and memory, as for `load`. `progress`: called with a `Progress` from time to time.
        """
        check_values({"progress": progress})
        with operating("verify", self.url), phasing("verifying"):
            return self._verified(limited_transfer(transfer), Meter("verify", self.url, progress))

    def _verified(self, transfer: Transfer, meter: Meter) -> Verification:
        meter.expect(sum(record.size_bytes for record in self._manifest.stored))
        damages: list[Damage] = []
        unread: list[StorageError] = []
        read = 0
        for number in self._files.numbers:
            try:
                file = self._files.of(number)
                damages.extend(file.check_all(transfer, meter))
                read += self._files.record(number).size_bytes
            except CheckpointError as error:
                if isinstance(error, StorageError) and self._files.traits.requests:
                    raise  # it was waited for, and the other files would be, too
                damages.append(Damage(self._files.name_of(number), str(error)))
                unread += [error] if isinstance(error, StorageError) else []
        if unread and len(unread) == len(damages):
            raise unread[0]  # what cannot be read may be whole
        if not damages:
            damages.extend(islice(self._check_entries(), MAX_DAMAGES))
        meter.finish()
        moved(read)
        return Verification(len(self._manifest.stored), read, tuple(damages))

    def _check_entries(self) -> Iterator[Damage]:
        """Whether the files hold all that the manifest promises. Goes from file to file: each is opened once or so."""
        entries = (
            (item, tensor)
            for tensor in self._manifest.tensors
            for item in read_plan(self._manifest, tensor, Box.whole(tensor.shape))
        )
        while some := list(islice(entries, _ENTRIES_AT_ONCE)):
            by_rank: dict[int, list[tuple[PlannedRead, Tensor]]] = defaultdict(list)
            for item, tensor in some:
                by_rank[item.rank].append((item, tensor))
            for rank in sorted(by_rank):
                yield from self._check_entries_of(by_rank[rank])

    def _check_entries_of(self, entries: Sequence[tuple[PlannedRead, Tensor]]) -> Iterator[Damage]:
        """Whether the files hold what the manifest promises of one rank."""
        by_number: dict[int, list[tuple[PlannedRead, Tensor]]] = defaultdict(list)
        for item, tensor in entries:
            try:
                by_number[self._files.number_of(item.rank, item.name)].append((item, tensor))
            except (CheckpointDamaged, UnsafeCheckpoint) as error:
                yield Damage(self._files.name_of(item.rank), str(error), (item.name,))
        for number, found in by_number.items():
            for item, tensor in found:
                try:
                    file = self._files.of(number)
                    _ = file.packed(item) if tensor.transforms else file.entry(item, tensor.dtype)
                except (CheckpointDamaged, UnsafeCheckpoint) as error:
                    yield Damage(self._files.name_of(number), str(error), (item.name,))

    def close(self) -> None:
        """Close its files. It may still be used: they are opened again."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def age_of(manifest: Manifest) -> float | None:
    """How many seconds ago a checkpoint was saved, by its own clock; None if it does not say."""
    try:
        return time.time() - datetime.fromisoformat(manifest.created).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def files_at(store: Store) -> Files:
    """The files of the newest checkpoint at a place, ours or another library's. Raises CheckpointNotFound."""
    try:
        return Files(store, parse(store.url, *find(store)))
    except CheckpointNotFound:
        from milepost.formats.read.recognise import recognise  # noqa: PLC0415  # not needed for our own

        foreign = recognise(store)
        if foreign is None:
            raise
        return foreign.files


def _region(index: "Index | tuple[Index, ...]", shape: Shape) -> "tuple[Box, tuple[int | slice, ...]]":
    """The smallest box that an index touches, and the index to apply inside it."""
    given = index if isinstance(index, tuple) else (index,)
    if sum(part is Ellipsis for part in given) > 1:
        raise IndexError("an index has at most one ellipsis")
    if Ellipsis in given:
        at = given.index(Ellipsis)
        fill = (slice(None),) * (len(shape) - len(given) + 1)
        given = (*given[:at], *fill, *given[at + 1 :])
    if len(given) > len(shape):
        raise IndexError(f"{len(given)} indices for a tensor of {len(shape)} dimensions")
    offset, sizes, rest = [], [], []
    for dim, length in enumerate(shape):
        part = given[dim] if dim < len(given) else slice(None)
        start, size, inner = _one(part, length, dim)
        offset.append(start)
        sizes.append(size)
        rest.append(inner)
    return Box(tuple(offset), tuple(sizes)), tuple(rest)


def _one(part: Any, length: int, dim: int) -> tuple[int, int, int | slice]:
    if isinstance(part, slice):
        start, stop, step = part.indices(length)
        if step < 1:
            raise ValueError("a slice of a tensor has a positive step")
        return start, max(stop - start, 0), slice(None, None, step)
    if hasattr(part, "__index__") and not isinstance(part, bool):
        i = part.__index__()
        if not -length <= i < length:
            raise IndexError(f"index {i} is out of range for dimension {dim} of size {length}")
        return i % length, 1, 0
    raise TypeError(f"a lazy tensor takes integers, slices and ... as index, not {part!r}; read it first for more")


def open_checkpoint(path: Location, *, types: Iterable[type] = (), allow_pickle: bool = False) -> Checkpoint:
    """Open the newest checkpoint at `path`: its keys, values and metadata now, its tensors when they are asked for.

    Needs no process group and no GPU, and runs nothing from the checkpoint. Also reads folders of
    `torch.distributed.checkpoint`, files of `torch.save`, and safetensors files and folders. `types` and `allow_pickle`
    are as for `save`. Raises CheckpointNotFound, or CheckpointDamaged if the manifest is not what was saved.

    >>> _ = milepost.save({"step": 7}, "memory://opened")
    >>> milepost.open("memory://opened")["step"]
    7
    """
    return Checkpoint(store_at(path), Codec(types, allow_pickle))
