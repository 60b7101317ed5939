"""The save pipeline: describe, agree, write, commit. Every rank runs it; each step ends with all ranks or with one error."""

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
import torch

from milepost.comm import Comm, together
from milepost.commit import aim, exists, generations, publish, sweep
from milepost.core.layout import Layout
from milepost.core.manifest import Tensor, Value, new_manifest, shard_name
from milepost.core.plan import share_out, written_by
from milepost.core.private import Private
from milepost.core.shardfile import PRIVATE, NewEntry, private_name
from milepost.core.table import Merged, Table, TensorRow, merge_tables
from milepost.core.tree import Flat
from milepost.errors import CheckpointError, InvalidRequest, InvalidState, RanksDisagree, SaveConflict, StorageError
from milepost.replicas import ReplicaCheck
from milepost.state import PerRank, take_apart
from milepost.store import Store
from milepost.tensors import Describer, LocalTensor, find_part
from milepost.values import Codec
from milepost.version import __version__
from milepost.write import Entry, Written, write_shard

_log = logging.getLogger("milepost")
_LEAD = 0


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How to save; `milepost.save` explains each."""

    metadata: Mapping[str, Any]
    codec: Codec
    overwrite: bool = True
    on_difference: Literal["error", "warn"] = "error"
    compare_replicas: bool = True
    reduce_partial: bool = False


class Receipt(msgspec.Struct, frozen=True):
    """What a save committed: where, which generation, and how many bytes of tensors all ranks wrote."""

    url: str
    generation: int
    save_id: str
    world: int
    data_bytes: int


class _Hello(msgspec.Struct, frozen=True):
    """What each rank says first: the digest of its table; the lead also says what the save aims at."""

    digest: str
    generation: int = 0
    save_id: str = ""


class _Result(msgspec.Struct, frozen=True):
    written: Written
    replicas: dict[str, str]


@dataclass(frozen=True, slots=True)
class Described:
    """A rank's state, taken apart."""

    table: Table
    tensors: dict[str, LocalTensor]
    private: list[Entry]
    metadata: Any


def save_state(state: Any, store: Store, comm: Comm, options: SaveOptions) -> Receipt:
    """Save `state` from all ranks of `comm`. Atomic and durable; raises the same error on every rank, leaving nothing."""
    where = f"saving to {store.url}"
    described, hello, merged = _agree(state, store, comm, options, where)
    tensors, layouts = share_out(merged.tensors, merged.layouts, comm.size, spread=options.on_difference == "error")
    check = ReplicaCheck(tensors, layouts, comm.rank, described.tensors, enabled=options.compare_replicas)

    def write() -> bytes:
        entries = _entries(tensors, layouts, comm.rank, described)
        written = _write(store, hello, comm.rank, entries)
        return msgspec.msgpack.encode(_Result(written, check.digests()))

    try:
        packed = together(comm, f"{where}: writing", write)
        results = [msgspec.msgpack.decode(data, type=_Result) for data in packed]
        drifted = check.compare(comm, [r.replicas for r in results], where)
        if drifted and options.on_difference == "error":
            raise RanksDisagree(
                f"{drifted}\nWrap what belongs to a rank in PerRank, synchronise the ranks, or pass "
                'on_difference="warn" to keep the lowest rank\'s.'
            )
    except BaseException:
        _discard(store, hello.save_id, comm.rank)
        raise

    manifest = new_manifest(
        hello.generation,
        hello.save_id,
        datetime.now(UTC).isoformat(timespec="seconds"),
        f"milepost {__version__}",
        comm.size,
        metadata=described.metadata,
        layouts=layouts,
        tensors=tensors,
        tree=merged.tree,
        values=merged.values,
        per_rank=merged.per_rank,
        files=tuple(r.written.file for r in results if r.written.file is not None),
    )

    def commit() -> bytes:
        if comm.rank == _LEAD:
            publish(store, manifest)
        return b""

    try:
        together(comm, f"{where}: committing", commit)
    except CheckpointError as error:
        if _failed_for_sure(error, store, hello, comm):
            _discard(store, hello.save_id, comm.rank)
        raise
    if comm.rank == _LEAD:
        sweep(store, manifest)
        # At the very end: where warnings are errors, one must not take the lead away while others wait for it.
        for text in [_differing(merged)] * bool(merged.differing) + [drifted] * bool(drifted):
            warnings.warn(f"{text}\nThe lowest rank's are saved.", RuntimeWarning, stacklevel=3)
    data_bytes = sum(r.written.data_bytes for r in results)
    return Receipt(store.url, hello.generation, hello.save_id, comm.size, data_bytes)


def _agree(state: Any, store: Store, comm: Comm, options: SaveOptions, where: str) -> tuple[Described, _Hello, Merged]:
    """Describe the state on every rank and merge what differs. After this all ranks know the same."""
    kept: list[Described] = []

    def hello() -> bytes:
        described = describe(state, comm, options)
        kept.append(described)
        generation, save_id = _aim(store, options) if comm.rank == _LEAD else (0, "")
        return msgspec.msgpack.encode(_Hello(described.table.digest(), generation, save_id))

    packed = together(comm, f"{where}: describing the state", hello)
    hellos = [msgspec.msgpack.decode(data, type=_Hello) for data in packed]
    groups: dict[str, list[int]] = {}
    for rank, greeting in enumerate(hellos):
        groups.setdefault(greeting.digest, []).append(rank)
    table = kept[0].table
    tables = [(tuple(range(comm.size)), table)]
    if len(groups) > 1:
        speakers = {ranks[0] for ranks in groups.values()}

        def speak() -> bytes:
            return msgspec.json.encode(table) if comm.rank in speakers else b""

        spoken = together(comm, f"{where}: agreeing on the layout", speak)
        tables = [(tuple(ranks), msgspec.json.decode(spoken[ranks[0]], type=Table)) for ranks in groups.values()]
    merged = merge_tables(tables)
    _refuse_problems(merged, options)
    return kept[0], hellos[_LEAD], merged


def _aim(store: Store, options: SaveOptions) -> tuple[int, str]:
    if not options.overwrite and exists(store):
        raise InvalidRequest(f"there is a checkpoint at {store.url} already; pass overwrite=True to replace it")
    return aim(store)


def describe(state: Any, comm: Comm, options: SaveOptions) -> Described:
    """What this rank holds: its table, its tensors, and its private entries. Raises InvalidState, listing all problems."""
    flat, _ = take_apart(state, options.codec)
    describer = Describer(comm, options.reduce_partial)
    tensors: dict[str, LocalTensor] = {}
    values: list[Value] = []
    problems: list[str] = []
    for key, leaf in flat.leaves.items():
        try:
            if flat.kinds[key] == "tensor":
                tensors[key] = describer.describe(leaf, key)
            elif flat.kinds[key] == "value":
                values.append(Value(key, options.codec.encode(leaf, key)))
        except InvalidState as error:
            problems.append(str(error))
    private = _private_entries(flat, options.codec, describer, problems)
    if problems:
        raise InvalidState(
            problems[0] if len(problems) == 1 else f"{len(problems)} problems:\n  " + "\n  ".join(problems[:50])
        )
    rows = tuple(TensorRow(k, t.dtype, t.shape, t.kind, t.layout) for k, t in tensors.items())
    per_rank = tuple(key for key, kind in flat.kinds.items() if kind == "per_rank")
    metadata = options.codec.encode(dict(options.metadata), "metadata")
    return Described(Table(rows, flat.nodes, tuple(values), per_rank), tensors, private, metadata)


def _private_entries(flat: Flat, codec: Codec, describer: Describer, problems: list[str]) -> list[Entry]:
    """The rank-private values as entries of this rank's own file: a small record, and the tensors that it names."""
    owned = {key: leaf.value for key, leaf in flat.leaves.items() if isinstance(leaf, PerRank)}
    if not owned:
        return []
    inner, _ = take_apart(owned, codec)
    entries, rows, values = [], [], []
    for key, leaf in inner.leaves.items():
        try:
            if inner.kinds[key] == "per_rank":
                raise InvalidState(f"{key!r}: a PerRank inside a PerRank has no meaning; leave the inner one out")
            if inner.kinds[key] == "value":
                values.append(Value(key, codec.encode(leaf, key)))
                continue
            local = describer.describe(leaf, key)
            if local.layout is not None:
                raise InvalidState(f"{key!r} is cut over ranks and cannot be rank-private; take it out of PerRank")
            rows.append(Tensor(key, local.dtype, local.shape, 0, kind=local.kind))
            if local.parts[0].box.elements:
                entries.append(Entry(NewEntry(private_name(key), local.dtype, local.shape), local.parts[0].data))
        except InvalidState as error:
            problems.append(str(error))
    record = msgspec.json.encode(Private(inner.nodes, tuple(values), tuple(rows)))
    data = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    return [*entries, Entry(NewEntry(PRIVATE, "uint8", (len(record),)), data)]


def _refuse_problems(merged: Merged, options: SaveOptions) -> None:
    if merged.problems:
        raise RanksDisagree("the ranks do not describe one state:\n  " + "\n  ".join(merged.problems[:50]))
    if merged.differing and options.on_difference == "error":
        raise RanksDisagree(
            f"{_differing(merged)}\n"
            'Wrap what belongs to a rank in PerRank, or pass on_difference="warn" to keep the lowest rank\'s.'
        )


def _differing(merged: Merged) -> str:
    return "values that should be equal on all ranks are not:\n  " + "\n  ".join(merged.differing[:50])


def _entries(tensors: tuple[Tensor, ...], layouts: tuple[Layout, ...], rank: int, described: Described) -> list[Entry]:
    """The plan of this rank, with the memory behind each item."""
    entries: list[Entry] = []
    for tensor in tensors:
        local = described.tensors.get(tensor.key)
        if local is None:
            continue
        entries.extend(
            Entry(NewEntry(item.name, item.dtype, item.box.shape), find_part(local, item.box))
            for item in written_by(tensor, layouts[tensor.layout], rank)
        )
    return entries + described.private


def _write(store: Store, hello: _Hello, rank: int, entries: list[Entry]) -> Written:
    try:
        return write_shard(store, hello.save_id, rank, entries)
    except (OSError, CheckpointError) as error:
        # A job that committed this generation first may have swept our files away: say that, not "no such file".
        if isinstance(error, FileNotFoundError) and next(iter(generations(store)), 0) >= hello.generation:
            raise SaveConflict(f"another job committed generation {hello.generation} of {store.url} first") from error
        if isinstance(error, CheckpointError):
            raise
        raise StorageError(f"cannot write to {store.url}: {error}", errno=error.errno) from error


def _failed_for_sure(error: CheckpointError, store: Store, hello: _Hello, comm: Comm) -> bool:
    """Whether a commit that raised can no longer happen. If not, the data must stay: a manifest may name it."""
    if isinstance(error, SaveConflict):
        return True
    if comm.size > 1 and _LEAD not in error.failures:
        return False  # the lead did not answer; it may still commit
    return hello.generation not in generations(store)


def _discard(store: Store, save_id: str, rank: int) -> None:
    try:
        store.delete(shard_name(save_id, rank))
    except (OSError, CheckpointError) as error:
        _log.warning("could not remove what an unfinished save left at %s; a later save will: %s", store.url, error)
