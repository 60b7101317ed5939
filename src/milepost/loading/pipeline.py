"""The load pipeline: open, match, read, apply. Every rank runs it; each step ends with all ranks or with one error."""

import itertools
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from milepost.comm import Comm, Phase, together, told
from milepost.commit.publish import find, parse, read_manifest
from milepost.core.limits import KIB
from milepost.core.manifest import Manifest
from milepost.core.ranks import unpack_ranks
from milepost.core.tree import Path, restore
from milepost.data.collection_pause import CollectionPaused
from milepost.data.place import place_all
from milepost.data.read import Files
from milepost.data.transfer import Meter
from milepost.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, InvalidState, StateMismatch
from milepost.formats.read.recognise import recognise
from milepost.loading.match import LongBytes, Matcher, Target, allocate, check_world, keys_of, shared_parts
from milepost.loading.options import LoadOptions
from milepost.loading.private import read_private_values
from milepost.loading.report import LoadReport, RankMatch, merge_reports
from milepost.loading.share_reads import WORTH_BYTES, Exchange, agree_to_share
from milepost.state.take_apart import PerRank, is_stateful
from milepost.state.tensors import Describer
from milepost.state.values import Codec
from milepost.store import Store

# Made once, when the module is imported: two threads that are the first to decode a type can crash msgspec.
_REPORTS = msgspec.msgpack.Decoder(LoadReport)
_FOUND = msgspec.msgpack.Decoder(RankMatch)
_OFFERS = msgspec.msgpack.Decoder(dict[str, bytes])
_SHARE = b"\0share"
_OPENED = msgspec.msgpack.Decoder(tuple[int, bytes, bytes])
_SMALL = 64 * KIB
"""Manifests up to this size travel with the announcement: one read instead of one for each rank."""


_log = logging.getLogger("milepost")


def load_state(state: Any, store: Store, comm: Comm, options: LoadOptions) -> Any:
    """Load into `state` on all ranks of `comm`, and give it back. Raises the same error on every rank."""
    opened, trouble = open_together(store, comm, "loading")
    target, share = _match(state, opened.manifest if opened is not None else None, store, comm, options, trouble)
    exchanges = _share_out(target, store, comm, options) if share else []
    files = opened
    assert files is not None  # or matching would have raised what is the trouble
    meter = Meter("load", store.url, options.progress if comm.rank == comm.coordinator else None)
    applied: list[Any] = []

    def read() -> bytes:
        if not share:
            allocate(target, Describer(comm), options.device)
        placements = itertools.chain(target.placements, *(e.own(target.manifest) for e in exchanges))
        place_all(files, placements, options.transfer, meter, verify=options.verify)
        _read_values(target, files, comm, options.codec)
        for exchange in exchanges:
            exchange.prepare()
        return b""

    def send() -> bytes:
        for exchange in exchanges:
            # Half: so that whoever waits for a message is back in time to meet those who know why it does not come.
            exchange.run(comm.timeout_s / 2)
        return b""

    def apply() -> bytes:
        applied.append(_apply(state, target))
        return b""

    try:
        together(comm, Phase("loading", store.url, "reading"), read)
    finally:
        files.close()
    if share:
        together(comm, Phase("loading", store.url, "sending"), send)
    together(comm, Phase("loading", store.url, "applying"), apply)
    meter.finish()
    return applied[0]


def explain_state(state: Any, store: Store, comm: Comm, options: LoadOptions) -> LoadReport:
    """The report that a load would act on, on every rank. Reads the manifest and nothing else; changes nothing."""
    opened, trouble = open_together(store, comm, "explaining")
    manifest = opened.manifest if opened is not None else None

    def look() -> bytes:
        return msgspec.msgpack.encode(_matched(state, _checked(manifest, trouble), comm, options).found)

    def merge(packed: list[bytes]) -> bytes:
        assert manifest is not None
        return msgspec.msgpack.encode(_merged(store, manifest, packed))

    answer = together(comm, Phase("explaining", store.url, "matching"), look, merge)
    return _REPORTS.decode(answer)


def open_together(store: Store, comm: Comm, action: str) -> tuple[Files | None, Exception | None]:
    """The files of the newest checkpoint: the coordinator finds it, and all ranks load that generation (0: of another format).

    Small ones travel with the announcement, larger ones are read by each rank. What goes wrong here on one rank is
    told at the next meeting.
    """
    kept: list[Files] = []

    def look() -> bytes:
        try:
            generation, data = find(store)
        except CheckpointNotFound:
            foreign = recognise(store)
            if foreign is None:
                raise
            kept.append(foreign.files)
            return msgspec.msgpack.encode((0, foreign.digest, foreign.format.encode()))
        return msgspec.msgpack.encode((generation, xxhash.xxh3_64_digest(data), data if len(data) <= _SMALL else b""))

    packed = told(comm, Phase(action, store.url, "opening"), look)
    generation, digest, data = _OPENED.decode(packed)
    try:
        if generation == 0:
            return kept[0] if kept else _foreign(store, comm, digest), None
        data = data or read_manifest(store, generation) or b""
        if xxhash.xxh3_64_digest(data) != digest:
            raise CheckpointDamaged(
                f"{store.url}: rank {comm.rank} does not find the manifest of generation {generation} that rank "
                f"{comm.coordinator} found. Was it replaced meanwhile, or do the ranks see different places?"
            )
        return Files(store, parse(store.url, generation, data)), None
    except Exception as error:
        if comm.size == 1:
            raise
        return None, error


def _foreign(store: Store, comm: Comm, digest: bytes) -> Files:
    """The files of a checkpoint in another library's format, which the coordinator has found."""
    found = recognise(store)
    if found is None or found.digest != digest:
        raise CheckpointDamaged(
            f"{store.url}: rank {comm.rank} does not find the checkpoint that rank {comm.coordinator} found. "
            "Was it replaced meanwhile, or do the ranks see different places?"
        )
    return found.files


def _checked(manifest: Manifest | None, trouble: Exception | None) -> Manifest:
    if manifest is None:
        raise trouble or AssertionError
    return manifest


@CollectionPaused()
def _matched(state: Any, manifest: Manifest, comm: Comm, options: LoadOptions) -> Target:
    return Matcher(manifest, options.codec, Describer(comm), options.convert_dtype).match(state)


def _merged(store: Store, manifest: Manifest, packed: list[bytes]) -> LoadReport:
    found = [_FOUND.decode(data) for data in packed]
    return merge_reports(store.url, keys_of(manifest), found)


def _match(
    state: Any, manifest: Manifest | None, store: Store, comm: Comm, options: LoadOptions, trouble: Exception | None
) -> tuple[Target, bool]:
    """Match each rank's state with the manifest, and decide whether replicas share the reading.

    Raises StateMismatch, with all differences on all ranks, on every rank.
    """
    kept: list[Target] = []

    def match() -> bytes:
        kept.append(_matched(state, _checked(manifest, trouble), comm, options))
        return msgspec.msgpack.encode(kept[0].found)

    def judge(packed: list[bytes]) -> bytes:
        assert manifest is not None
        found = [_FOUND.decode(data) for data in packed]
        report = merge_reports(store.url, keys_of(manifest), found)
        permissions = (options.allow_missing, options.allow_unexpected, options.convert_dtype)
        if report.fits(*permissions):
            return _SHARE if _pays(found, options.share_reads) else b""
        return "\n".join(report.problems(*permissions)).encode()

    answer = together(comm, Phase("loading", store.url, "matching"), match, judge)
    if answer not in (b"", _SHARE):
        raise StateMismatch(f"the checkpoint at {store.url} does not fit the state:\n{answer.decode()}")
    return kept[0], answer == _SHARE


def _pays(found: list[RankMatch], wish: bool | None) -> bool:
    """Whether replicas should share the reading: one reads, and sends it to the others.

    That costs one trip through the network where reading again costs one through the storage. It wins where the ranks
    are on several machines, whose caches do not help each other, and on devices that are linked; it loses on one machine
    with the tensors in its main memory: there the page cache does the same at no cost.
    """
    shared = sum(one.shared_bytes for one in found)
    if wish is not None or shared < WORTH_BYTES:
        return bool(wish) and shared > 0
    sharing = [one for one in found if one.shared_bytes]
    return len({one.host for one in sharing}) > 1 or all(one.on_device for one in sharing)


def _share_out(target: Target, store: Store, comm: Comm, options: LoadOptions) -> list[Exchange]:
    """Agree on who reads what of the tensors that several ranks want. Nothing is shared where the ranks do not agree."""
    exchanges: list[Exchange] = []

    def offer() -> bytes:
        describer = Describer(comm)
        allocate(target, describer, options.device)
        parts = shared_parts(target, describer)
        # In one order over all groups of the job, so that no two groups wait for each other.
        exchanges.extend(Exchange(s, comm.rank, parts[s]) for s in sorted(parts, key=lambda s: s[:2]))
        return msgspec.msgpack.encode({e.name: e.digest() for e in exchanges})

    def decide(packed: list[bytes]) -> bytes:
        return b"yes" if agree_to_share([_OFFERS.decode(data) for data in packed]) else b""

    if not together(comm, Phase("loading", store.url, "sharing out"), offer, decide):
        _log.info("the ranks want different tensors of %s, so each reads its own", store.url)
        return []
    keys = {key for exchange in exchanges for key in exchange.keys}
    target.placements = [p for p in target.placements if p.item.key not in keys]
    return exchanges


@CollectionPaused()
def _read_values(target: Target, files: Files, comm: Comm, codec: Codec) -> None:
    """Decode every value that the state wants, the rank-private ones included. Still nothing of the state is changed."""
    values = {value.key: value.value for value in target.manifest.values}
    owners = {p.key: unpack_ranks(p.ranks) for p in target.manifest.per_rank}

    @cache
    def kept_by(rank: int) -> dict[str, Any]:
        return read_private_values(files, rank, codec)

    for key, leaf in target.flat.leaves.items():
        kind, there = target.flat.kinds[key], target.saved[key]
        if there in values and kind != "per_rank":
            target.results[key] = _decoded(codec, values[there], key)
        elif there in owners and isinstance(leaf, PerRank):
            target.results[key] = _private(target.manifest, kept_by, comm, there, leaf, owners[there])


def _decoded(codec: Codec, data: Any, key: str) -> Any:
    try:
        return codec.decode(data, key)
    except ValueError as error:
        raise error if isinstance(error, CheckpointError) else InvalidState(str(error)) from None


def _private(
    manifest: Manifest,
    kept_by: Callable[[int], dict[str, Any]],
    comm: Comm,
    key: str,
    leaf: PerRank[Any],
    owners: tuple[int, ...],
) -> Any:
    if leaf.remap is not None and manifest.world != comm.size:
        old = [kept_by(rank)[key] for rank in owners]
        return leaf.remap(old, comm.rank, comm.size)
    check_world(manifest, key, comm.rank, comm.size)
    if comm.rank not in owners:
        raise InvalidState(f"rank {comm.rank} saved nothing under {key!r}")
    return kept_by(comm.rank)[key]


@CollectionPaused()
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
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray) and old.flags.writeable:
        old[...] = new  # one that steps backwards, which was read into other memory
        return old
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
