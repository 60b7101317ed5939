"""What a load writes into. Each stage hands the next one a new record: `Match`, then `Target`."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from milepost.core.box import Box
from milepost.core.division import read_plan
from milepost.core.manifest import FORMAT, Manifest, Tensor
from milepost.core.swap_plan import WantRow, may_swap
from milepost.core.tree import Flat, Path, show_path
from milepost.core.versions import Versions
from milepost.data.pieces import Placement, placement_of
from milepost.loading.optimizers import OptimizerPlan
from milepost.loading.overlaps import Double, find_doubles
from milepost.loading.rank_match import RankMatch
from milepost.loading.share_reads import SharedPart
from milepost.loading.swap_boxes import Swapped
from milepost.state.tensors import (
    Describer,
    LocalTensor,
    Memory,
    Part,
    Sharers,
    dtype_name,
    is_sharded_tensor,
    materialise,
    memory_of,
    new_saved,
    why_not_filled,
)


@dataclass(frozen=True, slots=True)
class Owners:
    """The objects of a state that hold tensors themselves, and the versions of saved state dicts, by path.

    `upgraded`: the modules that get old keys, which their own code has to turn into new ones; for each, the tensors on
    the meta device that only this code can fill. `named`: what optimizers get that were saved by name.
    """

    modules: Mapping[Path, torch.nn.Module]
    optimizers: Mapping[Path, torch.optim.Optimizer]
    versions: Mapping[Path, Versions]
    upgraded: Mapping[Path, tuple[Any, ...]]
    named: Mapping[Path, OptimizerPlan]


@dataclass(frozen=True, slots=True)
class Match:
    """A rank's state, matched with a checkpoint. Nothing is read or allocated yet.

    `opened`: the state dicts that stand for stateful objects, by path. `saved` maps the state's keys to those of the
    checkpoint, which may be spelled otherwise. `placements`: the reads into memory that exists. `without_memory`: the
    keys of tensors that have no memory to read into yet. `found`: what this rank holds of the others, and how each was
    saved. `tied`: keys of tensors that are one tensor with that of an earlier key.
    """

    manifest: Manifest
    flat: Flat
    opened: Mapping[Path, Any]
    report: RankMatch
    saved: Mapping[str, str]
    placements: tuple[Placement, ...]
    without_memory: tuple[str, ...]
    found: Mapping[str, tuple[Tensor, LocalTensor]]
    tied: Mapping[str, str]
    owners: Owners


@dataclass(frozen=True, slots=True)
class Target:
    """A match in which every tensor has memory: `made` holds the new memory, `placements` all the reads.

    `doubles`: what shares memory with something else, and is compared with it after the reads. `blank`: memory, not
    set to anything, for tensors on the meta device that get what a module's own code makes of an old state.
    """

    match: Match
    placements: tuple[Placement, ...]
    made: Mapping[str, Any]
    doubles: tuple[Double, ...]
    blank: Mapping[Memory, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LongBytes:
    """Bytes that are being read like a tensor: the object, and a tensor over its memory."""

    value: bytes | bytearray
    buffer: torch.Tensor


@torch.inference_mode(mode=False)  # tensors that were made in inference mode cannot be trained
def allocate(match: Match, describer: Describer, device: torch.device | str | None) -> Target:
    """Give memory to what has none (tensors on the meta device, some arrays, long bytes), and plan its reads."""
    tensors = {t.key: t for t in match.manifest.tensors}
    placements, found = list(match.placements), dict(match.found)
    made: dict[str, Any] = _views(match, device)
    for key in match.without_memory:
        saved, first = tensors[match.saved[key]], match.tied.get(key)
        if key not in made:
            made[key] = made[first] if first else _new_memory(match.flat.leaves[key], saved, key, device)
        local = describer.describe(_memory(made[key]), key)
        found[key] = saved, local
        if not first:
            placements.extend(placements_for(match.manifest, saved, local, describer))
    blank = {}
    for path, left in match.owners.upgraded.items():
        for leaf in left:
            memory = memory_of(leaf)
            if memory is not None:
                blank[memory] = materialise(leaf, dtype_name(leaf.dtype, show_path(path)), tuple(leaf.shape), device)
    return Target(match, tuple(placements), made, tuple(find_doubles(found, match.tied)), blank)


def _views(match: Match, device: torch.device | str | None) -> dict[str, Any]:
    """New memory for tensors on the meta device that are different views of one memory there: they stay such views."""
    groups: dict[Any, dict[str, torch.Tensor]] = {}
    for key in match.without_memory:
        leaf = match.flat.leaves[key]
        memory = memory_of(leaf) if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.numel() else None
        if memory is not None and key not in match.tied:
            storage, _, _, _, *kind = memory
            groups.setdefault((storage, *kind), {})[key] = leaf
    made: dict[str, Any] = {}
    for leaves in groups.values():
        if len(leaves) > 1:
            made.update(_views_of_one(leaves, device))
    return made


def _views_of_one(leaves: Mapping[str, torch.Tensor], device: torch.device | str | None) -> dict[str, torch.Tensor]:
    first = min(leaf.storage_offset() for leaf in leaves.values())
    stop = max(
        leaf.storage_offset() + 1 + sum((n - 1) * step for n, step in zip(leaf.shape, leaf.stride(), strict=True))
        for leaf in leaves.values()
    )
    dtype = next(iter(leaves.values())).dtype
    memory = torch.empty(stop - first, dtype=dtype, device=device or "cpu")
    made = {}
    for key, leaf in leaves.items():
        view = memory.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset() - first)
        made[key] = torch.nn.Parameter(view, leaf.requires_grad) if isinstance(leaf, torch.nn.Parameter) else view
    return made


def _new_memory(leaf: Any, saved: Tensor, key: str, device: torch.device | str | None) -> Any:
    if saved.is_bytes:
        return LongBytes(*new_saved(saved))
    if isinstance(leaf, torch.Tensor):
        return materialise(leaf, dtype_name(leaf.dtype, key), saved.shape, device)
    return np.empty_like(leaf)


def _memory(value: Any) -> Any:
    return value.buffer if isinstance(value, LongBytes) else value


def shared_parts(target: Target, describer: Describer) -> dict[Sharers, list[SharedPart]]:
    """The tensors of a target, with their memory, that other ranks want too, by the ranks that do."""
    match = target.match
    tensors = {t.key: t for t in match.manifest.tensors}
    shared: dict[Sharers, list[SharedPart]] = {}
    wishes = Counter(match.saved.values())
    for key, leaf in match.flat.leaves.items():
        saved = tensors.get(match.saved[key])
        if saved is None or wishes[saved.key] > 1 or key in match.tied:
            continue
        value = _memory(target.made.get(key, leaf))
        local = describer.describe(value, key)
        sharers = describer.sharers(value, local)
        if sharers is not None:
            shared.setdefault(sharers, []).extend(SharedPart(saved, part) for part in local.parts)
    return shared


def swapped_parts(target: Target, describer: Describer) -> dict[str, Swapped]:
    """The tensors of a target that can be read by any rank and sent here, with their memory, by their saved keys."""
    match = target.match
    if match.manifest.format != FORMAT:
        return {}
    tensors = {t.key: t for t in match.manifest.tensors}
    wishes = Counter(saved for key, saved in match.saved.items() if key not in match.tied)
    found: dict[str, Swapped] = {}
    for key, leaf in match.flat.leaves.items():
        saved = tensors.get(match.saved[key])
        if saved is None or wishes[saved.key] > 1 or key in match.tied or not may_swap(saved):
            continue
        local = describer.describe(_memory(target.made.get(key, leaf)), key)
        found[saved.key] = Swapped(saved, WantRow(saved.key, local.layout), local.parts)
    return found


def placements_for(manifest: Manifest, saved: Tensor, local: LocalTensor, describer: Describer) -> list[Placement]:
    """The reads that fill this rank's parts of a tensor."""
    alone = describer.is_alone(local)
    return [
        placement_of(item, saved.dtype, _window(part, item.box), alone)
        for part in local.parts
        for item in read_plan(manifest, saved, part.box)
    ]


def _window(part: Part, box: Box) -> torch.Tensor:
    """The memory of a part that holds a box of it."""
    return part.data if box is part.box or box == part.box else part.data[box.within(part.box).slices]


def what_hinders(local: LocalTensor) -> str | None:
    """Why this rank's part of a tensor cannot be filled where it is; None where it can."""
    for part in local.parts:
        if why := why_not_filled(part.data):
            return why
    return None


def has_no_memory(leaf: Any) -> bool:
    """Whether a leaf is a tensor or array that nothing can be read into: torch knows no steps backwards."""
    if type(leaf) is torch.Tensor or type(leaf) is torch.nn.Parameter:  # of which there may be very many
        return leaf.is_meta
    if is_sharded_tensor(leaf):
        return any(shard.tensor.is_meta for shard in leaf.local_shards())  # a rank may have none, or several
    if isinstance(leaf, torch.Tensor):
        return leaf.is_meta
    return isinstance(leaf, np.ndarray) and (not leaf.flags.writeable or min(leaf.strides, default=0) < 0)
