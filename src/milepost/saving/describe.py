"""Describing: a rank's state becomes a table, its tensors, and the entries that only it writes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from milepost.comm import Comm
from milepost.core.manifest import Tensor, Value
from milepost.core.private_record import Private
from milepost.core.shardfile import PRIVATE, NewEntry, private_name
from milepost.core.table import Table, TensorRow
from milepost.core.tree import Flat
from milepost.data.collection_pause import CollectionPaused
from milepost.data.write import EntryToWrite
from milepost.errors import InvalidState
from milepost.state.host_memory import tensor_of_bytes
from milepost.state.take_apart import PerRank, opening_by_name, take_apart
from milepost.state.tensors import Describer, LocalTensor, check_data, memory_of, refuse_fake_mode
from milepost.state.values import Codec


def no_callback() -> None:
    """Does nothing: the callback where no caller waits to change the state."""


@dataclass(frozen=True, slots=True)
class Described:
    """A rank's state, taken apart.

    `live`: keys of tensors that a caller waits to change. They are read first; then `released` is called.
    """

    table: Table
    digest: bytes
    tensors: dict[str, LocalTensor]
    private: list[EntryToWrite]
    metadata: Any
    live: frozenset[str] = frozenset()
    released: Callable[[], None] = no_callback

    @property
    def is_live(self) -> bool:
        """Whether a caller waits to change some of it, private values included."""
        return self.released is not no_callback


@CollectionPaused()
def describe(
    state: Any, comm: Comm, codec: Codec, metadata: Mapping[str, Any], reduce_partial: bool = False
) -> Described:
    """What this rank holds. Raises InvalidState, listing all problems at once."""
    refuse_fake_mode()
    flat, _ = take_apart(state, codec, opening_by_name(state))
    describer = Describer(comm, reduce_partial)
    tensors: dict[str, LocalTensor] = {}
    values: list[Value] = []
    problems: list[str] = []
    for key, leaf in flat.leaves.items():
        try:
            if flat.kinds[key] == "tensor":
                tensors[key] = check_data(describer.describe(leaf, key), key)
            elif flat.kinds[key] == "value":
                values.append(Value(key, codec.encode(leaf, key)))
        except InvalidState as error:
            problems.append(str(error))
    private = _private_entries(flat, codec, describer, problems)
    if problems:
        listed = "\n  ".join(problems[:50])
        raise InvalidState(listed if len(problems) == 1 else f"{len(problems)} problems:\n  {listed}")
    rows = tuple(_rows(flat, tensors))
    per_rank = tuple(key for key, kind in flat.kinds.items() if kind == "per_rank")
    table = Table(rows, flat.nodes, tuple(values), per_rank)
    return Described(table, table.digest(), tensors, private, codec.encode(dict(metadata), "metadata"))


def _rows(flat: Flat, tensors: Mapping[str, LocalTensor]) -> Iterator[TensorRow]:
    """A row for each tensor. One that stands under several keys (tied weights) is stored under the first."""
    first: dict[Any, str] = {}
    for key, local in tensors.items():
        memory = memory_of(flat.leaves[key])
        same_as = key
        if memory is not None:
            same_as = first.setdefault((memory, local.shape, local.layout), key)
        yield TensorRow(key, local.dtype, local.shape, local.kind, local.layout, same_as if same_as != key else "")


def _private_entries(flat: Flat, codec: Codec, describer: Describer, problems: list[str]) -> list[EntryToWrite]:
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
            local = check_data(describer.describe(leaf, key), key)
            if local.layout is not None:
                raise InvalidState(f"{key!r} is cut over ranks and cannot be rank-private; take it out of PerRank")
            rows.append(Tensor(key, local.dtype, local.shape, 0, kind=local.kind))
            if local.parts[0].box.elements:
                entries.append(EntryToWrite(NewEntry(private_name(key), local.dtype, local.shape), local.parts[0].data))
        except InvalidState as error:
            problems.append(str(error))
    record = msgspec.json.encode(Private(inner.nodes, tuple(values), tuple(rows)))
    return [*entries, EntryToWrite(NewEntry(PRIVATE, "uint8", (len(record),)), tensor_of_bytes(record))]
