"""The load pipeline: open, match, read, apply. Every rank runs it; each step succeeds on all ranks or on none."""

import itertools
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache, partial
from types import NoneType
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch
import xxhash

from milepost.comm import (
    Announcement,
    Call,
    Comm,
    Deferred,
    Meeting,
    broadcast,
    calling,
    defer,
    mark_told,
    meet,
    operating_on,
    together,
)
from milepost.commit.find import find, newest_generation, parse, read_manifest
from milepost.core.limits import BLOCK_BYTES, KIB
from milepost.core.manifest import Manifest
from milepost.core.printable import printable
from milepost.core.ranks import unpack_ranks
from milepost.core.seal import may_be_unhealthy
from milepost.core.tree import Parts, Path, restore, show_path
from milepost.core.versions import set_versions
from milepost.core.wire import Wire
from milepost.data.collection_pause import CollectionPaused
from milepost.data.pieces import Placement
from milepost.data.place import place_all
from milepost.data.read import Files
from milepost.data.threads import Latch
from milepost.data.transfer import Meter, Transfer
from milepost.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    CheckpointUnhealthy,
    InvalidState,
    StateMismatch,
)
from milepost.events.operation import phasing
from milepost.formats.read.recognise import recognise
from milepost.loading.match import Matcher, keys_of
from milepost.loading.meta import give_memory, same_objects, warn_of_meta
from milepost.loading.options import LoadOptions
from milepost.loading.overlaps import check_doubles
from milepost.loading.private import check_world, read_private_values
from milepost.loading.rank_match import RankMatch
from milepost.loading.report import LoadReport, merge_reports
from milepost.loading.share_reads import Buffers, Exchange, agree_to_share, check_arrival
from milepost.loading.swap_boxes import BoxSwap, Swapped, agree_to_swap
from milepost.loading.target import LongBytes, Match, Target, allocate, shared_parts, swapped_parts
from milepost.loading.way import Way, choose_way
from milepost.state.composite import compose, is_composite
from milepost.state.take_apart import PerRank, Remap, is_stateful
from milepost.state.tensors import Describer, Memory, memory_of, refuse_fake_mode
from milepost.state.values import Codec
from milepost.state.wrappers import load_module
from milepost.store import Store

_SMALL = 64 * KIB
"""Manifests up to this size travel with the announcement: one read instead of one for each rank."""
_PARTS_OF_SWAP = 4
"""The memory of a swap in parts: three are for the swap itself (`Rounds.within`), one is for reading."""
_REOPENED = 3
"""How often a load starts again because a newer save replaced what it was reading."""
_PARTLY_FILLED = "The load had begun to write: the state may be partly filled. Load again before you use it."
_log = logging.getLogger("milepost")


class _Opened(msgspec.Struct, frozen=True, array_like=True):
    """What the coordinator found: a generation (0: a checkpoint in another format), its digest, and small manifests."""

    generation: int
    digest: bytes
    data: bytes


class _Judgement(msgspec.Struct, frozen=True, array_like=True):
    """Why the checkpoint does not fit the states of all ranks (empty: it does); and how the ranks read."""

    problems: str
    way: Way


# The steps of a load.
_OPENING = Announcement("opening", Wire(_Opened))
_REOPENING = Announcement("opening again", Wire(bool), "opening")
_MATCHING = Meeting("matching", Wire(RankMatch), Wire(_Judgement))
_SHARING_OUT = Meeting("sharing out", Wire(dict[str, bytes]), Wire(bool), "sharing")
_SENDING = Meeting("sending", Wire(dict[str, bytes]), Wire(NoneType), "sharing")
_SWAPPING = "swapping"
_READING, _APPLYING = "reading", "applying"
_EXPLAINING = Meeting("matching", Wire(RankMatch), Wire(LoadReport))


def load_state(state: Any, store: Store, comm: Comm, options: LoadOptions) -> Any:
    """Load into `state` on all ranks of `comm`, and give it back. Raises the same error on every rank.

    A newer save may replace a checkpoint while it is being read, and sweep it. Then the newer one is loaded. It fills
    all that the first one would have filled, except with `allow_missing`: there the error is raised.
    """
    with calling(comm, Call("loading", store.url)) as call, operating_on(comm, "load", store.url):
        for left in reversed(range(_REOPENED + 1)):
            opened = open_together(store, comm, call, options.allow_unhealthy)
            try:
                return _load(state, opened, comm, call, options)
            except CheckpointDamaged:
                # The coordinator decides for all. Every rank is here: the error was raised by a step, on all of them.
                found = opened.result
                if not left or not broadcast(comm, call, _REOPENING, lambda: _may_reopen(store, found, options)):  # noqa: B023
                    raise
    raise AssertionError


def _may_reopen(store: Store, opened: Files | None, options: LoadOptions) -> bool:
    """Whether a newer checkpoint has replaced the one that was opened, and a load of it would leave nothing of that."""
    return (
        opened is not None and not options.allow_missing and 0 < opened.manifest.generation < newest_generation(store)
    )


def _load(state: Any, opened: Deferred[Files], comm: Comm, call: Call, options: LoadOptions) -> Any:
    """Load the checkpoint that the ranks have opened."""
    describer = Describer(comm)
    match, way = _match(state, opened, comm, call, options)
    files = opened.get()
    meter = Meter("load", call.place, options.progress if comm.rank == comm.coordinator else None)
    with phasing("allocating"):
        target = defer(comm, lambda: allocate(match, describer, options.device))
    transfer, lossy = options.transfer, options.convert_dtype == "lossy"
    exchanges = _share_out(target, describer, comm, call, transfer.memory_bytes) if way == "replicas" else []
    swap, transfer = _agree_to_swap(way, target, describer, match.manifest, comm, call, transfer)
    place = partial(place_all, files, transfer=transfer, verify=options.verify, lossy=lossy)

    def read() -> dict[str, Any]:
        shared = {key for exchange in exchanges for key in exchange.keys}
        if swap is not None:
            shared |= swap.get().keys
            meter.expect_later(swap.get().size_bytes)
        own = (p for p in target.get().placements if p.item.key not in shared)
        placements = itertools.chain(own, *(exchange.own(match.manifest) for exchange in exchanges))
        place(placements, meter=meter)
        values = _read_values(match, files, comm, options.codec)
        memory: Buffers = {}
        for exchange in exchanges:
            exchange.prepare(memory)
        return values

    def send() -> dict[str, bytes]:
        # Half: a rank whose message never comes must be back in time for the meeting that says why.
        return {exchange.name: exchange.run(comm.timeout_s / 2) for exchange in exchanges}

    def apply() -> Any:
        check_doubles(target.get().doubles, match.manifest, files, transfer)
        strict = not (options.allow_missing or options.allow_unexpected)
        return _apply(state, target.get(), values, options.codec, strict=strict)

    try:
        values = together(comm, call, _READING, read)
        if way == "replicas":
            meet(comm, call, _SENDING, send, check_arrival)
        if swap is not None:
            together(comm, call, _SWAPPING, lambda: _trade(swap.get(), place, meter, comm, call, lossy), "sharing")
        loaded = together(comm, call, _APPLYING, apply)
    except BaseException as error:
        error.add_note(_PARTLY_FILLED)
        raise
    finally:
        files.close()
    meter.finish()
    warn_of_meta(match.owners.modules)
    return loaded


def explain_state(state: Any, store: Store, comm: Comm, options: LoadOptions) -> LoadReport:
    """The report that a load would act on, on every rank. Reads the manifest and nothing else; changes nothing."""
    with calling(comm, Call("explaining", store.url)) as call:
        opened = open_together(store, comm, call)
        return meet(
            comm,
            call,
            _EXPLAINING,
            lambda: _matched(state, opened.get().manifest, comm, options).report,
            lambda found: merge_reports(store.url, keys_of(opened.get().manifest), found),
        )


def refuse_load(store: Store, comm: Comm, error: Exception, action: str = "loading") -> NoReturn:
    """Join a load that the other ranks make in order to fail it: raises this rank's error on all of them.

    `action`: "loading", or "explaining" for an `explain`.
    """

    def fail() -> NoReturn:
        raise error

    if comm.size > 1:
        told = operating_on(comm, "load", store.url) if action == "loading" else nullcontext()
        with calling(comm, Call(action, store.url)) as call, told:
            open_together(store, comm, call)
            together(comm, call, _MATCHING.step, fail)
    raise error


def open_together(store: Store, comm: Comm, call: Call, allow_unhealthy: bool = True) -> Deferred[Files]:
    """The files of the newest checkpoint: the coordinator finds it, and all ranks load that generation.

    Small manifests travel with the announcement, larger ones are read by each rank. An error on one rank after that
    is raised at the next step. Raises CheckpointUnhealthy if the coordinator does not allow an unhealthy one.
    """
    foreign = cache(partial(recognise, store))  # for the coordinator, which looks twice
    found_here = b""  # on the coordinator: it need not read a large manifest again

    def look() -> _Opened:
        nonlocal found_here
        try:
            generation, data = find(store)
        except CheckpointNotFound:
            found = foreign()
            if found is None:
                raise
            return _Opened(0, found.digest, found.format.encode())
        found_here = data
        if may_be_unhealthy(data):
            look_healthy(store.url, parse(store.url, generation, data), allow_unhealthy)
        return _Opened(generation, xxhash.xxh3_64_digest(data), data if len(data) <= _SMALL else b"")

    opened = broadcast(comm, call, _OPENING, look)

    def open_here() -> Files:
        if opened.generation == 0:
            found = foreign()
            if found is None or found.digest != opened.digest:
                raise _another(store, comm, "checkpoint")
            return found.files
        data = opened.data or found_here or read_manifest(store, opened.generation) or b""
        if xxhash.xxh3_64_digest(data) != opened.digest:
            raise _another(store, comm, f"manifest of generation {opened.generation}")
        return Files(store, parse(store.url, opened.generation, data))

    with phasing("opening"):
        return defer(comm, open_here)


def look_healthy(url: str, manifest: Manifest, allow_unhealthy: bool) -> None:
    """Raise CheckpointUnhealthy if a rule found this checkpoint unhealthy when it was saved; or log it, if allowed."""
    if manifest.health is None or manifest.health.ok:
        return
    text = f"{url} was unhealthy when it was saved: {manifest.health.reason}"
    if not allow_unhealthy:
        raise CheckpointUnhealthy(text)
    _log.warning("%s", printable(text))


def _another(store: Store, comm: Comm, what: str) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"{store.url}: rank {comm.rank} does not find the {what} that rank {comm.coordinator} found. "
        "Was it replaced meanwhile, or do the ranks see different places?"
    )


@CollectionPaused()
@torch.inference_mode(mode=False)  # tensors that were made in inference mode cannot be trained
def _matched(state: Any, manifest: Manifest, comm: Comm, options: LoadOptions) -> Match:
    refuse_fake_mode()
    return Matcher(manifest, options.codec, Describer(comm), options.convert_dtype).match(state)


def _match(state: Any, opened: Deferred[Files], comm: Comm, call: Call, options: LoadOptions) -> tuple[Match, Way]:
    """Match each rank's state with the manifest, and decide how the ranks read.

    Raises StateMismatch, with all differences on all ranks, on every rank.
    """
    with phasing("matching"):
        match = defer(comm, lambda: _matched(state, opened.get().manifest, comm, options))

    def judge(found: list[RankMatch]) -> _Judgement:
        report = merge_reports(call.place, keys_of(opened.get().manifest), found)
        permissions = (options.allow_missing, options.allow_unexpected, options.convert_dtype)
        if report.fits(*permissions):
            return _Judgement("", choose_way(found, options.share_reads))
        return _Judgement("\n".join(report.problems(*permissions)), "apart")

    judgement = meet(comm, call, _MATCHING, lambda: match.get().report, judge)
    if judgement.problems:
        raise mark_told(StateMismatch(f"the checkpoint at {call.place} does not fit the state:\n{judgement.problems}"))
    return match.get(), judgement.way


def _share_out(
    target: Deferred[Target], describer: Describer, comm: Comm, call: Call, memory_bytes: int
) -> list[Exchange]:
    """Agree on which rank reads what of the tensors that several ranks want. If the ranks differ, nothing is shared."""

    def make() -> list[Exchange]:
        parts = shared_parts(target.get(), describer)
        # In one order over all groups of the job, so that no two groups wait for each other.
        return [Exchange(s, comm.rank, parts[s], memory_bytes) for s in sorted(parts, key=lambda s: s[:2])]

    with phasing("sharing"):
        exchanges = defer(comm, make)
    if meet(comm, call, _SHARING_OUT, lambda: {e.name: e.digest() for e in exchanges.get()}, agree_to_share):
        return exchanges.get()
    _log.info("the ranks want different tensors of %s, so each reads its own", call.place)
    return []


def _agree_to_swap(
    way: Way,
    target: Deferred[Target],
    describer: Describer,
    manifest: Manifest,
    comm: Comm,
    call: Call,
    transfer: Transfer,
) -> tuple[Deferred[BoxSwap] | None, Transfer]:
    """Agree on what each rank reads for all, and sends; and what is left to read with. None: each reads for itself."""
    if way != "swap":
        return None, transfer

    def find() -> dict[str, Swapped]:
        return swapped_parts(target.get(), describer)

    with phasing("sharing"):
        swap = agree_to_swap(find, manifest, comm, call, transfer.limit_bytes)
    if swap is None:
        _log.info("the ranks cannot send each other what they read of %s, so each reads its own", call.place)
        return None, transfer
    return swap, transfer.within(max(transfer.limit_bytes // _PARTS_OF_SWAP, BLOCK_BYTES))


def _trade(swap: BoxSwap, place: Callable[..., None], meter: Meter, comm: Comm, call: Call, lossy: bool) -> None:
    def read(placements: list[Placement], stopped: Latch) -> None:
        place(placements, meter=Meter("load", call.place, cancelled=stopped))

    swap.run(read, meter, comm.timeout_s / 2, lossy=lossy)


@CollectionPaused()
def _read_values(match: Match, files: Files, comm: Comm, codec: Codec) -> dict[str, Any]:
    """Decode every value that the state wants, rank-private ones included. The state is not changed yet."""
    values = {value.key: value.value for value in match.manifest.values}
    owners = {p.key: unpack_ranks(p.ranks) for p in match.manifest.per_rank}
    results: dict[str, Any] = {}

    @cache
    def kept_by(rank: int) -> dict[str, Any]:
        return read_private_values(files, rank, codec)

    for key, leaf in match.flat.leaves.items():
        kind, there = match.flat.kinds[key], match.saved[key]
        if there in values and kind != "per_rank":
            results[key] = _decoded(codec, values[there], key)
        elif there in owners and isinstance(leaf, PerRank):
            results[key] = _private(match.manifest, kept_by, comm, there, leaf, owners[there])
    return results


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
    def remapped(remap: Remap) -> Any:
        return remap([kept_by(rank)[key] for rank in owners], comm.rank, comm.size)

    if leaf.remap is not None and manifest.world != comm.size:
        return remapped(leaf.remap)
    check_world(manifest, key, comm.rank, comm.size)
    if comm.rank not in owners:
        raise InvalidState(f"rank {comm.rank} saved nothing under {key!r}")
    own = kept_by(comm.rank)[key]
    return own if leaf.remap is None or leaf.fits(own) else remapped(leaf.remap)


@CollectionPaused()
def _apply(state: Any, target: Target, values: Mapping[str, Any], codec: Codec, *, strict: bool) -> Any:
    """Put what was read into the state. Tensors are filled already; this sets values and feeds stateful objects.

    Modules on the meta device get their memory first, so that an optimizer finds its parameters where they stay.
    """
    match, owners = target.match, target.match.owners
    keys = {path: key for key, path in match.flat.paths.items()}
    results, strangers = _with_memory(target, values)

    def replace(value: Any, path: Path) -> Any:
        key = keys.get(path)
        if key is not None:
            return _merged(value, results.get(key, value))
        if isinstance(value, Parts) or (path in match.opened and is_composite(value)):
            return _composed(value, match.opened.get(path, value), path)
        if path in match.opened and is_stateful(value):
            state_dict = restore(match.opened[path], replace_inside(path), path)
            strict_here = strict or path not in owners.upgraded
            if path in owners.named:
                owners.named[path].load(state_dict)
            elif owners.upgraded.get(path) or any(where[: len(path)] == path for where in strangers):
                _assign(value, state_dict, target, strict=strict_here)
            else:
                _feed(value, state_dict, strict=strict_here)
            return value
        set_versions(value, owners.versions.get(path))
        return NotImplemented

    def _composed(value: Any, parts: Any, path: Path) -> Any:
        filled = restore(parts, replace_inside(path), path)
        return compose(filled, value.like if isinstance(value, Parts) else value, codec, show_path(path))

    def replace_inside(outer: Path) -> Any:
        # The state dict stands at the same path as its owner: it must be entered, not taken for the owner again.
        return lambda value, path: NotImplemented if path == outer else replace(value, path)

    return restore(state, replace)


def _with_memory(target: Target, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """Give memory to what is on the meta device. Gives the new leaves by key, and the paths of those without an owner.

    A tensor of a module's state dict that is none of its parameters and buffers has no owner: the module makes its
    state dict in its own way.
    """
    match, owners = target.match, target.match.owners
    parameters = {key: leaf for key, leaf in match.flat.leaves.items() if isinstance(leaf, torch.nn.Parameter)}
    new: dict[Memory, torch.Tensor] = {}
    where: dict[Memory, list[Path]] = {}
    for key, made in target.made.items():
        memory = memory_of(match.flat.leaves[key])
        if memory is not None:
            new[memory] = made
            where.setdefault(memory, []).append(match.flat.paths[key])
    used = give_memory(owners.modules.values(), parameters, owners.optimizers.values(), new)
    standing = {key: leaf for key, leaf in parameters.items() if key in target.made}
    return {**target.made, **standing, **values}, [path for memory in where.keys() - used for path in where[memory]]


def _merged(old: Any, new: Any) -> Any:
    if isinstance(new, LongBytes):
        return new.value
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray) and old.flags.writeable:
        old[...] = new  # an array with negative strides was read into other memory
        return old
    if not isinstance(old, PerRank) or isinstance(new, PerRank):
        return new
    if is_stateful(old.value):
        _feed(old.value, new, strict=True)
    else:
        old.value = new
    return old


def _assign(owner: Any, state_dict: Any, target: Target, *, strict: bool) -> None:
    """Feed a module that has tensors on the meta device which only its own code can fill."""
    if not isinstance(owner, torch.nn.Module):
        _feed(owner, state_dict, strict=strict)
        return
    with same_objects(owner, target.match.owners.optimizers.values(), target.blank):
        load_module(owner, state_dict, assign=True, strict=strict)


def _feed(owner: Any, state_dict: Any, *, strict: bool) -> None:
    if isinstance(owner, torch.nn.Module):
        load_module(owner, state_dict, strict=strict)
    elif isinstance(owner, torch.optim.Optimizer):
        # What it makes of the state must be fit for training, also where the caller is in inference mode.
        with torch.inference_mode(mode=False):
            owner.load_state_dict(state_dict)
    else:
        owner.load_state_dict(state_dict)
