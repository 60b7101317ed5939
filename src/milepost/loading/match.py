"""Targets: the state that a load writes into, matched with what the checkpoint holds.

Plain containers and modules must hold what the checkpoint holds. For any other stateful object the checkpoint decides:
it gets exactly the state dict that was saved, built around the tensors that it already has, so that sharded tensors
stay sharded; an optimizer that has not stepped yet gets new state, cut like its parameters.
"""

import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path as File
from typing import Any

import numpy as np
import torch
import xxhash

from milepost.core.box import Box, Shape
from milepost.core.division import read_plan
from milepost.core.manifest import FORMAT, Manifest, Tensor
from milepost.core.tree import LEAVES, Branch, Flat, Node, Path, build, exact_path, grow, show_path
from milepost.data.place import Placement, placement_of
from milepost.errors import CheckpointDamaged, CheckpointError, InvalidState
from milepost.loading.report import RankMatch, bits_of
from milepost.loading.share_reads import SharedPart
from milepost.state.take_apart import PerRank, take_apart
from milepost.state.tensors import (
    Describer,
    LocalTensor,
    Part,
    Sharers,
    dtype_name,
    is_tensor,
    materialise,
    new_tensor,
    torch_dtype,
    why_not_filled,
)
from milepost.state.values import Codec

NOWHERE = "\0nowhere\0"
"""Stands for the saved key of what was not saved."""
_BYTES = {"bytes": bytes, "bytearray": bytearray}


@dataclass
class Target:
    """A state that is being loaded into: its leaves, and for each what will stand there after the load.

    `saved` maps the state's keys to those of the checkpoint, which may be spelled otherwise; `homeless` are the tensors
    that have no memory to read into yet.
    """

    manifest: Manifest
    flat: Flat
    opened: dict[Path, Any]
    found: RankMatch
    saved: dict[str, str] = field(default_factory=dict)
    placements: list[Placement] = field(default_factory=list)
    homeless: list[str] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)


class _Placeholder:
    """Stands where a value will come."""


class Matcher:
    """Matches one rank's state with a manifest."""

    def __init__(self, manifest: Manifest, codec: Codec, describer: Describer, convert_dtype: bool) -> None:
        self._manifest, self._codec, self._describer = manifest, codec, describer
        self._convert_dtype = convert_dtype
        self._tensors = {t.key: t for t in manifest.tensors}
        self._values = {v.key for v in manifest.values}
        self._per_rank = {p.key for p in manifest.per_rank}
        self._saved: dict[str, str] = {}
        self._missing: list[str] = []
        self._homeless: list[str] = []
        self._shapes: dict[str, tuple[Shape, Shape]] = {}
        self._dtypes: dict[str, tuple[str, str]] = {}
        self._kinds: dict[str, str] = {}
        self._read_bytes = self._shared_bytes = 0
        self._on_device = False

    def match(self, state: Any) -> Target:
        """Take the state apart and compare. Nothing is changed or allocated yet."""
        flat, opened = take_apart(state, self._codec, self._open)
        self._find_keys(flat)
        placements = self._compare(flat)
        found = RankMatch(
            tuple(self._missing),
            self._shapes,
            self._dtypes,
            self._kinds,
            bits_of(keys_of(self._manifest), set(self._saved.values())),
            self._read_bytes,
            self._shared_bytes,
            self._on_device,
            host_id() if self._shared_bytes else b"",
        )
        return Target(self._manifest, flat, opened, found, self._saved, placements, self._homeless)

    @cached_property
    def _root(self) -> Branch:
        return grow(self._manifest.tree)

    def _find_keys(self, flat: Flat) -> None:
        """Find the saved key of each leaf: by the very path, or else by a path that reads the same and is the only one."""
        if flat.nodes == self._manifest.tree:  # as for most loads
            self._saved = {key: key for key in flat.leaves}
            return
        exact, plain = _spellings(self._root, self._codec)
        for key, path in flat.paths.items():
            self._saved[key] = exact.get(exact_path(path), plain.get(show_path(path), NOWHERE))

    def _open(self, value: Any, path: Path) -> Any:
        """What stands for a stateful object: a module's own state dict; else the saved one, around the tensors it has."""
        current = value.state_dict()
        branch = _find(self._root, path, self._codec)
        if isinstance(value, torch.nn.Module) or branch is None or branch.node.kind in LEAVES:
            return current

        def leaf(node: Node, inner: Path) -> Any:
            existing = _lookup(current, inner[len(path) :])
            if node.kind == "tensor":
                return self._tensor_target(value, existing, self._tensors[node.key], inner[len(path) :])
            if node.kind == "per_rank":
                return existing if isinstance(existing, PerRank) else PerRank(None)
            return _Placeholder()

        built = build(branch, lambda name: self._codec.decode(name, show_path(path)), leaf, path)
        return built if self._manifest.format == FORMAT else _named_like(current, built)

    def _tensor_target(self, owner: Any, existing: Any, tensor: Tensor, path: Path) -> Any:
        """What a stateful object gets for one saved tensor: the memory that it has, or new memory."""
        if tensor.kind in _BYTES:
            return _Placeholder()
        optimizer = owner if isinstance(owner, torch.optim.Optimizer) else None
        has = is_tensor(existing) and not isinstance(existing, (bytes, bytearray))
        # A buffer of another object may have grown; state of a parameter cannot, and is reported.
        if has and (optimizer is not None or tuple(existing.shape) == tensor.shape):
            return existing
        if tensor.kind == "numpy":
            return new_tensor(tensor.dtype, tensor.shape).numpy()
        if optimizer is not None:
            parameter = _parameter(optimizer, path)
            if parameter is not None and tuple(parameter.shape) == tensor.shape:
                return torch.empty_like(parameter.detach(), dtype=torch_dtype(tensor.dtype))
        return new_tensor(tensor.dtype, tensor.shape)

    def _compare(self, flat: Flat) -> list[Placement]:
        placements: list[Placement] = []
        for key, leaf in flat.leaves.items():
            kind, there = flat.kinds[key], self._saved[key]
            saved = self._tensors.get(there)
            if saved is not None and (saved.kind in _BYTES or _is_homeless(leaf)):
                self._homeless.append(key)
            if kind == "tensor" and saved is not None and saved.kind not in _BYTES:
                placements += self._compare_tensor(key, leaf, saved)
            elif kind == "tensor" and saved is not None and not isinstance(leaf, (bytes, bytearray)):
                self._kinds[key] = f"saved as {saved.kind} and the target is a tensor"
            elif there in self._values and kind == "tensor" and not isinstance(leaf, (bytes, bytearray)):
                self._kinds[key] = "saved as a value and the target is a tensor"
            elif kind == "value" and saved is not None and saved.kind not in _BYTES:
                self._kinds[key] = f"saved as a {saved.kind} and the target is a {type(leaf).__name__}"
            elif (there in self._per_rank) != (kind == "per_rank") and self._knows(there):
                self._kinds[key] = (
                    f"saved {'with' if there in self._per_rank else 'without'} PerRank, and the target is the other way"
                )
            elif not self._knows(there):
                self._missing.append(key)
        return placements

    def _knows(self, key: str) -> bool:
        return key in self._tensors or key in self._values or key in self._per_rank

    def _compare_tensor(self, key: str, leaf: Any, saved: Tensor) -> list[Placement]:
        if isinstance(leaf, (bytes, bytearray)):
            self._kinds[key] = f"saved as a {saved.kind} and the target is {type(leaf).__name__}"
            return []
        local = self._describer.describe(leaf, key)
        if local.shape != saved.shape:
            self._shapes[key] = (saved.shape, local.shape)
            return []
        if local.dtype != saved.dtype:
            self._dtypes[key] = (saved.dtype, local.dtype)
            if not self._convert_dtype:
                return []
        why = next(filter(None, (why_not_filled(part.data) for part in local.parts)), None)
        if why is not None:
            self._kinds[key] = why
            return []
        placements = placements_for(self._manifest, saved, local, self._describer)
        for placement in placements:
            self._read_bytes += placement.size_bytes
            if not placement.alone and self._describer.shares:
                self._shared_bytes += placement.size_bytes
                self._on_device = self._on_device or placement.target.device.type not in ("cpu", "meta")
        return placements


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


@cache
def host_id() -> bytes:
    """Eight bytes that are the same for processes that share a page cache."""
    try:
        text = File("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = platform.node()
    return xxhash.xxh3_64_digest(text.encode())


def keys_of(manifest: Manifest) -> list[str]:
    """All keys of a checkpoint, in one order."""
    return [*(t.key for t in manifest.tensors), *(v.key for v in manifest.values), *(p.key for p in manifest.per_rank)]


def _is_homeless(leaf: Any) -> bool:
    """Whether a leaf is a tensor or array that nothing can be read into: torch knows no steps backwards."""
    if isinstance(leaf, torch.Tensor):
        return leaf.is_meta
    return isinstance(leaf, np.ndarray) and (not leaf.flags.writeable or min(leaf.strides, default=0) < 0)


def allocate(target: Target, describer: Describer, device: torch.device | str | None) -> None:
    """Give memory to targets that have none (meta device, some arrays, long bytes), and plan their reads anew."""
    if not target.homeless:
        return
    manifest = target.manifest
    tensors = {t.key: t for t in manifest.tensors}
    made: dict[str, Any] = {}
    for key in target.homeless:
        leaf, saved = target.flat.leaves[key], tensors[target.saved[key]]
        if saved.kind in _BYTES:
            made[key] = LongBytes(saved.kind, new_tensor("uint8", saved.shape))
        elif isinstance(leaf, torch.Tensor):
            made[key] = materialise(leaf, dtype_name(leaf.dtype, key), saved.shape, device)
        else:
            made[key] = np.empty_like(leaf)
    anew = {target.saved[key] for key in made}
    target.placements = [p for p in target.placements if p.item.key not in anew]
    for key, value in made.items():
        memory = value.buffer if isinstance(value, LongBytes) else value
        saved = tensors[target.saved[key]]
        target.placements.extend(placements_for(manifest, saved, describer.describe(memory, key), describer))
    target.results.update(made)


def shared_parts(target: Target, describer: Describer) -> dict[Sharers, list[SharedPart]]:
    """The tensors of a target, with their memory, that other ranks want too, by the ranks that do."""
    tensors = {t.key: t for t in target.manifest.tensors}
    shared: dict[Sharers, list[SharedPart]] = {}
    wishes = Counter(target.saved.values())
    for key, leaf in target.flat.leaves.items():
        saved = tensors.get(target.saved[key])
        if saved is None or wishes[saved.key] > 1:
            continue
        value = target.results.get(key, leaf)
        value = value.buffer if isinstance(value, LongBytes) else value
        local = describer.describe(value, key)
        sharers = describer.sharers(value, local)
        if sharers is not None:
            shared.setdefault(sharers, []).extend(SharedPart(saved, part) for part in local.parts)
    return shared


@dataclass(frozen=True, slots=True)
class LongBytes:
    """Bytes that are being read like a tensor."""

    kind: str
    buffer: torch.Tensor

    def finish(self) -> bytes | bytearray:
        """The bytes, as the type that was saved."""
        data: bytes = self.buffer.numpy().tobytes()
        return data if self.kind == "bytes" else bytearray(data)


def _spellings(root: Branch, codec: Codec) -> tuple[dict[str, str], dict[str, str]]:
    """The saved keys by the exact spelling of their paths, and by the plain one where only one path reads so."""
    exact: dict[str, str] = {}
    plain: dict[str, list[str]] = {}

    def leaf(node: Node, path: Path) -> None:
        exact[exact_path(path)] = node.key
        plain.setdefault(show_path(path), []).append(node.key)

    try:
        build(root, lambda name: codec.decode(name, "a key"), leaf)
    except ValueError as error:
        raise (
            error if isinstance(error, CheckpointError) else CheckpointDamaged(f"the tree is not valid: {error}")
        ) from None
    return exact, {text: keys[0] for text, keys in plain.items() if len(keys) == 1}


def _find(root: Branch, path: Path, codec: Codec) -> Branch | None:
    """The branch of a saved tree that stands at `path`."""
    here = root
    for part in path:
        following = None
        for i, child in enumerate(here.children):
            name = i if here.node.kind in ("list", "tuple") else child.node.name
            if not here.node.kind.startswith(("list", "tuple", "namedtuple")):
                name = codec.decode(name, show_path(path))
            if name == part and type(name) is type(part):
                following = child
                break
        if following is None:
            return None
        here = following
    return here


def _named_like(current: Any, built: Any) -> Any:
    """A state dict with the keys of the current one where they read the same: DCP makes text of all keys."""
    if not isinstance(current, Mapping) or not isinstance(built, dict):
        return built
    names = {str(name): name for name in current}
    return {names.get(name, name): _named_like(current.get(names.get(name, name)), v) for name, v in built.items()}


def _lookup(state: Any, path: Path) -> Any:
    """What stands at `path` in a state dict, or None."""
    for part in path:
        try:
            state = getattr(state, str(part)) if hasattr(state, "_fields") else state[part]
        except (KeyError, IndexError, TypeError, AttributeError):
            return None
    return state


def _parameter(optimizer: torch.optim.Optimizer, path: Path) -> torch.Tensor | None:
    """The parameter that a piece of optimizer state belongs to: state dicts number them through all groups."""
    if len(path) != 3 or path[0] != "state" or not isinstance(path[1], int):
        return None
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return parameters[path[1]] if 0 <= path[1] < len(parameters) else None


def check_world(manifest: Manifest, key: str, rank: int, world: int) -> None:
    """Refuse to give a rank another rank's private value."""
    if manifest.world != world:
        raise InvalidState(
            f"{key!r} is rank-private and was saved by {manifest.world} ranks; this job has {world}. Give PerRank a "
            "`remap(old_values, rank, world)` that says what each new rank gets, or take the key out of the state."
        )
    if rank not in {f.rank for f in manifest.files}:
        raise CheckpointDamaged(f"rank {rank} saved no private values")
