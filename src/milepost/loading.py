"""The load pipeline: open, match, read, apply. Every rank runs it; each step ends with all ranks or with one error."""

from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from milepost.comm import Comm, together
from milepost.commit import find, parse
from milepost.core.manifest import Manifest
from milepost.core.ranks import unpack_ranks
from milepost.core.tree import Path, restore
from milepost.errors import CheckpointError, InvalidState, StateMismatch
from milepost.place import place_all
from milepost.privates import read_private_values
from milepost.read import Files
from milepost.report import Found, Report, merge_reports
from milepost.state import PerRank, is_stateful
from milepost.store import Store
from milepost.targets import LongBytes, Matcher, Target, allocate, check_world, keys_of
from milepost.tensors import Describer
from milepost.values import Codec

_LEAD = 0


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load; `milepost.load` explains each."""

    codec: Codec
    allow_missing: bool = False
    allow_unexpected: bool = False
    convert_dtype: bool = False
    device: torch.device | str | None = None


def load_state(state: Any, store: Store, comm: Comm, options: LoadOptions) -> Any:
    """Load into `state` on all ranks of `comm`, and give it back. Raises the same error on every rank."""
    where = f"loading {store.url}"
    manifest = open_together(store, comm, where)
    target, report = match_together(state, manifest, store, comm, options, where)
    permissions = (options.allow_missing, options.allow_unexpected, options.convert_dtype)
    if not report.fits(*permissions):
        problems = "\n".join(report.problems(*permissions))
        raise StateMismatch(f"the checkpoint at {store.url} does not fit the state:\n{problems}")
    files = Files(store, manifest)
    applied: list[Any] = []

    def read() -> bytes:
        allocate(target, Describer(comm), options.device)
        place_all(files, target.placements)
        _read_values(target, files, comm, options.codec)
        return b""

    def apply() -> bytes:
        applied.append(_apply(state, target))
        return b""

    try:
        together(comm, f"{where}: reading", read)
    finally:
        files.close()
    together(comm, f"{where}: applying", apply)
    return applied[0]


def explain_state(state: Any, store: Store, comm: Comm, options: LoadOptions) -> Report:
    """The report that a load would act on, on every rank. Reads the manifest and nothing else; changes nothing."""
    where = f"explaining {store.url}"
    manifest = open_together(store, comm, where)
    return match_together(state, manifest, store, comm, options, where)[1]


def open_together(store: Store, comm: Comm, where: str) -> Manifest:
    """The newest manifest, read by the lead and checked by all: every rank loads the same generation."""

    def look() -> bytes:
        return msgspec.msgpack.encode(find(store)) if comm.rank == _LEAD else b""

    packed = together(comm, f"{where}: opening", look)[_LEAD]
    generation, data = msgspec.msgpack.decode(packed, type=tuple[int, bytes])
    return parse(store.url, generation, data)


def match_together(
    state: Any, manifest: Manifest, store: Store, comm: Comm, options: LoadOptions, where: str
) -> tuple[Target, Report]:
    """Match each rank's state with the manifest, and merge what all found."""
    kept: list[Target] = []

    def match() -> bytes:
        matcher = Matcher(manifest, options.codec, Describer(comm), options.convert_dtype)
        kept.append(matcher.match(state))
        return msgspec.msgpack.encode(kept[0].found)

    packed = together(comm, f"{where}: matching", match)
    found = [msgspec.msgpack.decode(data, type=Found) for data in packed]
    return kept[0], merge_reports(store.url, keys_of(manifest), found)


def _read_values(target: Target, files: Files, comm: Comm, codec: Codec) -> None:
    """Decode every value that the state wants, the rank-private ones included. Still nothing of the state is changed."""
    values = {value.key: value.value for value in target.manifest.values}
    owners = {p.key: unpack_ranks(p.ranks) for p in target.manifest.per_rank}
    for key, leaf in target.flat.leaves.items():
        kind = target.flat.kinds[key]
        if key in values and kind != "per_rank":
            target.results[key] = _decoded(codec, values[key], key)
        elif key in owners and isinstance(leaf, PerRank):
            target.results[key] = _private(target.manifest, files, comm, codec, key, leaf, owners[key])


def _decoded(codec: Codec, data: Any, key: str) -> Any:
    try:
        return codec.decode(data, key)
    except ValueError as error:
        raise error if isinstance(error, CheckpointError) else InvalidState(str(error)) from None


def _private(
    manifest: Manifest, files: Files, comm: Comm, codec: Codec, key: str, leaf: PerRank[Any], owners: tuple[int, ...]
) -> Any:
    if leaf.remap is not None and manifest.world != comm.size:
        old = [read_private_values(files, rank, codec)[key] for rank in owners]
        return leaf.remap(old, comm.rank, comm.size)
    check_world(manifest, key, comm.rank, comm.size)
    if comm.rank not in owners:
        raise InvalidState(f"rank {comm.rank} saved nothing under {key!r}")
    return read_private_values(files, comm.rank, codec)[key]


def _apply(state: Any, target: Target) -> Any:
    """Put what was read into the state. Tensors are filled already; this sets values and feeds stateful objects."""
    keys = {path: key for key, path in target.flat.paths.items()}

    def replace(value: Any, path: Path) -> Any:
        key = keys.get(path)
        if key is not None:
            return _settle(value, target.results.get(key, value))
        if path in target.opened and is_stateful(value):
            _feed(value, restore(target.opened[path], replace_inside(path), path), target, path)
            return value
        return NotImplemented

    def replace_inside(outer: Path) -> Any:
        # The state dict stands at the same path as its owner: it must be entered, not taken for the owner again.
        return lambda value, path: NotImplemented if path == outer else replace(value, path)

    return restore(state, replace)


def _settle(old: Any, new: Any) -> Any:
    if isinstance(new, LongBytes):
        return new.finish()
    if not isinstance(old, PerRank) or isinstance(new, PerRank):
        return new
    if is_stateful(old.value):
        old.value.load_state_dict(new)
    else:
        old.value = new
    return old


def _feed(owner: Any, state_dict: Any, target: Target, path: Path) -> None:
    if not isinstance(owner, torch.nn.Module):
        owner.load_state_dict(state_dict)
        return
    made = any(
        key in target.results and isinstance(target.flat.leaves[key], torch.Tensor)
        for key, where in target.flat.paths.items()
        if where[: len(path)] == path
    )
    # Tensors that were on the meta device have new memory, which the module must take over instead of copying from.
    owner.load_state_dict(state_dict, assign=made)
