"""Targets: the state that a load writes into, matched with what the checkpoint holds.

Plain containers and modules must hold what the checkpoint holds. For any other stateful object the checkpoint decides:
it gets exactly the state dict that was saved, built around the tensors that it already has, so that sharded tensors
stay sharded; an optimizer that has not stepped yet gets new state, cut like its parameters. The same holds for the
extra state of modules.
"""

import platform
import reprlib
from collections.abc import Callable, Mapping
from functools import cache, cached_property, partial
from pathlib import Path as File
from typing import Any

import torch
import xxhash
from msgspec.structs import replace

from milepost.core.box import Shape
from milepost.core.dtypes import Convert, may_convert
from milepost.core.manifest import FORMAT, Manifest, Tensor
from milepost.core.tree import COMPOSITES, LEAVES, Branch, Flat, Node, Parts, Path, build, exact_path, grow, show_path
from milepost.data.place import Placement
from milepost.errors import CheckpointDamaged, CheckpointError, InvalidState
from milepost.loading.report import RankMatch, bits_of
from milepost.loading.target import Match, has_no_memory, placements_for
from milepost.state.composite import is_composite, kind_of
from milepost.state.take_apart import PerRank, state_dict_of, take_apart
from milepost.state.tensors import (
    Describer,
    dtype_of,
    is_tensor,
    new_saved,
    new_tensor,
    torch_dtype,
    why_not_filled,
)
from milepost.state.values import Codec
from milepost.state.wrappers import is_extra_state, named_as_saved

NOWHERE = "\0nowhere\0"
"""Stands for the saved key of what was not saved."""


_FIXED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(COMPOSITES, ("shape",)),
    "quantized": ("axis",),
    "jagged": ("ragged_dim",),
    "subclass": ("class", "description", "shape"),
}
"""The parts of composite tensors that a target and a checkpoint must have in common."""


class _Placeholder:
    """Stands where a value will come."""


class Matcher:
    """Matches one rank's state with a manifest."""

    def __init__(self, manifest: Manifest, codec: Codec, describer: Describer, convert_dtype: Convert) -> None:
        self._manifest, self._codec, self._describer = manifest, codec, describer
        self._convert_dtype = convert_dtype
        self._tensors = {t.key: t for t in manifest.tensors}
        self._values = {v.key for v in manifest.values}
        self._per_rank = {p.key for p in manifest.per_rank}
        self._saved: dict[str, str] = {}
        self._missing: list[str] = []
        self._without_memory: list[str] = []
        self._shapes: dict[str, tuple[Shape, Shape]] = {}
        self._dtypes: dict[str, tuple[str, str]] = {}
        self._kinds: dict[str, str] = {}
        self._read_bytes = self._shared_bytes = 0
        self._on_device = False

    def match(self, state: Any) -> Match:
        """Take the state apart and compare. Nothing is changed or allocated yet."""
        flat, opened = take_apart(state, self._codec, self._open)
        self._find_keys(flat)
        placements = self._compare(flat)
        report = RankMatch(
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
        return Match(self._manifest, flat, opened, report, self._saved, tuple(placements), tuple(self._without_memory))

    @cached_property
    def _root(self) -> Branch:
        return grow(self._manifest.tree)

    @cached_property
    def _has_composites(self) -> bool:
        return any(node.kind.startswith("composite:") for node in self._manifest.tree)

    def _find_keys(self, flat: Flat) -> None:
        """Find the saved key of each leaf: by the exact path, or else by the only path that reads the same."""
        if flat.nodes == self._manifest.tree:  # as for most loads
            self._saved = {key: key for key in flat.leaves}
            return
        exact, plain = _spellings(self._root, self._codec)
        for key, path in flat.paths.items():
            self._saved[key] = exact.get(exact_path(path), plain.get(show_path(path), NOWHERE))

    def _open(self, value: Any, path: Path) -> Any:
        """What stands for a stateful object: a module's state dict; else the saved one, around the tensors it has."""
        current = state_dict_of(value, path)
        branch = _find(self._root, path, self._codec)
        if isinstance(current, Parts):
            return self._open_composite(value, current, branch, path)
        if branch is None or branch.node.kind in LEAVES:
            return current
        if isinstance(value, torch.nn.Module):
            named = named_as_saved(value, current, {str(child.node.name) for child in branch.children})
            return self._with_extra_state(named, branch, path)

        def leaf(node: Node, inner: Path) -> Any:
            existing = _lookup(current, inner[len(path) :])
            if node.kind == "tensor":
                return self._tensor_target(value, existing, self._tensors[node.key], inner[len(path) :])
            if node.kind == "per_rank":
                return existing if isinstance(existing, PerRank) else PerRank(None)
            return _Placeholder()

        compose = self._composer(current, path)
        built = build(branch, lambda name: self._codec.decode(name, show_path(path)), leaf, path, compose)
        return built if self._manifest.format == FORMAT else _named_like(current, built)

    def _composer(self, current: Any, path: Path) -> Callable[[Parts, Path], Any]:
        """Notes which tensor of a state dict the parts of a saved one are for."""

        def note(parts: Parts, inner: Path) -> Parts:
            existing = _lookup(current, inner[len(path) :])
            parts.like = existing if is_composite(existing) and kind_of(existing) == parts.kind else None
            return parts

        return note

    def _open_composite(self, value: Any, current: Parts, branch: Branch | None, path: Path) -> Any:
        """The parts that a target's tensor gets: of a subclass its own, to be filled; of torch's kinds new ones."""
        key = show_path(path)
        if branch is None or branch.node.kind != f"composite:{current.kind}":
            if branch is not None:
                saved = branch.node.kind.removeprefix("composite:")
                self._kinds[key] = f"saved as a {saved} and the target is a {current.kind} tensor"
            return current
        fixed = _FIXED[current.kind]
        there = {child.node.name: child.node.key for child in branch.children}
        values = {v.key: v.value for v in self._manifest.values if v.key in there.values()}
        for name in fixed:
            was, now = values.get(there.get(name, "")), self._codec.encode(current[name], key)
            if was != now:
                self._kinds[key] = f"saved with the {name} {reprlib.repr(was)} and the target has {reprlib.repr(now)}"
        if current.kind == "subclass":
            return current
        dtypes = {name: dtype_of(part) for name, part in current.items() if isinstance(part, torch.Tensor)}
        return self._as_saved(branch, Parts(current.kind, {}), path, dtypes, value)

    def _with_extra_state(self, current: Any, branch: Branch, path: Path) -> Any:
        """A module's state dict with extra state as it was saved: the module takes it back as a whole."""
        saved = {str(child.node.name): child for child in branch.children}
        for name in [name for name in current if is_extra_state(name) and name in saved]:
            current[name] = self._as_saved(saved[name], current[name], (*path, name))
        return current

    def _as_saved(
        self, branch: Branch, current: Any, path: Path, dtypes: Mapping[str, str | None] | None = None, like: Any = None
    ) -> Any:
        """What was saved at `path`, around the tensors of `current` that are alike; what will be read stands open.

        `dtypes`: the types of new tensors, by name, where they are those of the target.
        """

        def leaf(node: Node, inner: Path) -> Any:
            existing = _lookup(current, inner[len(path) :])
            if node.kind == "per_rank":
                return existing if isinstance(existing, PerRank) else PerRank(None)
            if node.kind == "value" or self._tensors[node.key].is_bytes:
                return _Placeholder()
            tensor = self._tensors[node.key]
            alike = is_tensor(existing) and not isinstance(existing, (bytes, bytearray))
            alike = alike and (tuple(existing.shape), dtype_of(existing)) == (tensor.shape, tensor.dtype)
            wanted = (dtypes or {}).get(str(inner[-1])) or tensor.dtype
            return existing if alike else new_saved(replace(tensor, dtype=wanted))[0]

        compose = self._composer(current, path)
        if like is not None:
            compose = partial(_note_like, like)
        built = build(branch, lambda name: self._codec.decode(name, show_path(path)), leaf, path, compose)
        return built if self._manifest.format == FORMAT else _named_like(current, built)

    def _tensor_target(self, owner: Any, existing: Any, tensor: Tensor, path: Path) -> Any:
        """What a stateful object gets for one saved tensor: the memory that it has, or new memory."""
        if tensor.is_bytes:
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
            if saved is not None and (saved.is_bytes or has_no_memory(leaf)):
                self._without_memory.append(key)
            if kind == "tensor" and saved is not None and not saved.is_bytes:
                reads = self._compare_tensor(key, leaf, saved)
                placements += reads if not has_no_memory(leaf) else []
            elif kind == "tensor" and saved is not None and not isinstance(leaf, (bytes, bytearray)):
                self._kinds[key] = f"saved as {saved.kind} and the target is a tensor"
            elif there in self._values and kind == "tensor" and not isinstance(leaf, (bytes, bytearray)):
                self._kinds[key] = "saved as a value and the target is a tensor"
            elif kind == "value" and saved is not None and not saved.is_bytes:
                self._kinds[key] = f"saved as a {saved.kind} and the target is a {type(leaf).__name__}"
            elif (there in self._per_rank) != (kind == "per_rank") and self._knows(there):
                private = there in self._per_rank
                self._kinds[key] = (
                    f"saved {'with' if private else 'without'} PerRank and the target is {'not ' * private}a PerRank"
                )
            elif not self._knows(there):
                self._miss(key, flat.paths[key], leaf)
        return placements

    def _miss(self, key: str, path: Path, leaf: Any) -> None:
        branch = _find(self._root, path, self._codec) if self._has_composites else None
        kind, _, detail = branch.node.kind.partition(":") if branch is not None else ("", "", "")
        if kind == "composite":
            self._kinds[key] = f"saved as the parts of a {detail} tensor and the target is a {type(leaf).__name__}"
        else:
            self._missing.append(key)

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
            if not may_convert(saved.dtype, local.dtype, self._convert_dtype):
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


def _note_like(like: Any, parts: Parts, path: Path) -> Parts:
    del path
    parts.like = like
    return parts


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
