"""Targets: the state that a load writes into, matched with what the checkpoint holds.

Plain containers and modules must hold what the checkpoint holds. For any other stateful object the checkpoint decides:
it gets exactly the state dict that was saved, built around the tensors that it already has, so that sharded tensors
stay sharded; an optimizer that has not stepped yet gets new state, cut like its parameters. The same holds for the
extra state of modules. An object is asked for the tensors that it has only where that can matter: see `_is_asked`.
"""

import reprlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any

import torch
from msgspec.structs import replace

from milepost.core.box import Shape
from milepost.core.division import extra_bytes
from milepost.core.dtypes import DTYPES, Convert, may_convert
from milepost.core.layout import Whole
from milepost.core.manifest import FORMAT, Manifest, Tensor
from milepost.core.swap_plan import may_swap
from milepost.core.tree import COMPOSITES, LEAVES, Branch, Flat, Node, Parts, Path, build, exact_path, grow, show_path
from milepost.core.versions import Versions, changed_prefixes, without_wrappers
from milepost.data.pieces import Placement
from milepost.loading.optimizers import OptimizerMatch, OptimizerMatcher, OptimizerPlan
from milepost.loading.rank_match import RankMatch
from milepost.loading.report import bits_of
from milepost.loading.saved_optimizers import SavedOptimizers
from milepost.loading.saved_tree import find_branch, leaves_of, lookup, name_of, named_like, spellings
from milepost.loading.share_reads import host_id
from milepost.loading.target import Match, Owners, has_no_memory, placements_for, what_hinders
from milepost.state.composite import is_composite, kind_of
from milepost.state.optimizers import OwnerNames
from milepost.state.take_apart import PerRank, state_dict_of, take_apart
from milepost.state.tensors import (
    Describer,
    LocalTensor,
    Memory,
    dtype_of,
    is_tensor,
    memory_of,
    new_saved,
    new_tensor,
    torch_dtype,
)
from milepost.state.values import Codec
from milepost.state.wrappers import is_extra_state, modules_of, named_as_saved

_WITHOUT_NAMES = (
    "saved by the names of its parameters, which the optimizer of this state does not have; put the modules that own "
    "its parameters into the state"
)
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
        self._found: dict[str, tuple[Tensor, LocalTensor]] = {}
        self._first: dict[Memory, str] = {}
        self._tied: dict[str, str] = {}
        self._modules: dict[Path, torch.nn.Module] = {}
        self._optimizers: dict[Path, torch.optim.Optimizer] = {}
        self._named: dict[Path, OptimizerMatch] = {}
        self._redirected: dict[Path, str] = {}
        self._reasons: dict[str, str] = {}
        self._upgraded: dict[Path, tuple[Any, ...]] = {}
        self._not_saved: set[Path] = set()
        self._shapes: dict[str, tuple[Shape, Shape]] = {}
        self._dtypes: dict[str, tuple[str, str]] = {}
        self._changed: set[str] = set()  # also where this rank holds nothing of a tensor
        self._kinds: dict[str, str] = {}
        self._read_bytes = self._shared_bytes = self._extra_bytes = 0
        self._on_device = False

    def match(self, state: Any) -> Match:
        """Take the state apart and compare. Nothing is changed or allocated yet."""
        self._names = cache(partial(OwnerNames, state))
        flat, opened = take_apart(state, self._codec, self._open)
        self._find_keys(flat)
        placements = self._compare(flat)
        self._find_tied(flat)
        self._check_optimizers(flat)
        report = RankMatch(
            tuple(self._missing),
            self._shapes,
            self._dtypes,
            self._kinds,
            bits_of(keys_of(self._manifest), set(self._saved.values())),
            self._read_bytes,
            self._shared_bytes,
            self._on_device,
            host_id() if self._shared_bytes or self._extra_bytes else b"",
            {key: self._reasons[key] for key in self._missing if key in self._reasons},
            self._extra_bytes,
        )
        return Match(
            self._manifest,
            flat,
            {path: inner for path, inner in opened.items() if path not in self._not_saved},
            report,
            self._saved,
            tuple(placements),
            tuple(self._without_memory),
            self._found,
            self._tied,
            Owners(self._modules, self._optimizers, self._versions(), self._upgraded, self._plans()),
        )

    def _plans(self) -> dict[Path, OptimizerPlan]:
        plans = {path: found.plan for path, found in self._named.items() if found.plan is not None}
        return {path: plan.with_changed(self._changed) for path, plan in plans.items()}

    @cached_property
    def _root(self) -> Branch:
        return grow(self._manifest.tree)

    @cached_property
    def _has_composites(self) -> bool:
        return any(node.kind.startswith("composite:") for node in self._manifest.tree)

    def _find_keys(self, flat: Flat) -> None:
        """Find the saved key of each leaf: by the exact path, or else by the only path that reads the same."""
        if flat.nodes == self._manifest.tree:  # as for most loads
            self._saved = {key: self._redirected.get(path, key) for key, path in flat.paths.items()}
            return
        exact, plain = spellings(self._root, self._codec)
        for key, path in flat.paths.items():
            self._saved[key] = self._redirected.get(path) or exact.get(
                exact_path(path), plain.get(show_path(path), NOWHERE)
            )

    def _open(self, value: Any, path: Path) -> Any:
        """What stands for a stateful object: a module's state dict; else the saved one, around the tensors it has."""
        branch = find_branch(self._root, path, self._codec)
        if is_composite(value):
            return self._open_composite(value, state_dict_of(value, path), branch, path)
        if isinstance(value, torch.nn.Module):
            self._modules[path] = value
            return self._open_module(value, branch, path)
        if isinstance(value, torch.optim.Optimizer):
            self._optimizers[path] = value
            if self._open_named(value, branch, path):
                return self._named[path].tree
        if branch is None or branch.node.kind in LEAVES:
            return self._open_unsaved(value, path)
        current = state_dict_of(value, path) if self._is_asked(value, branch) else None
        groups = value.param_groups if isinstance(value, torch.optim.Optimizer) else ()
        parameters = [parameter for group in groups for parameter in group["params"]]

        def leaf(node: Node, inner: Path) -> Any:
            existing = lookup(current, inner[len(path) :])
            if not isinstance(value, torch.optim.Optimizer):
                return self._leaf(node, existing)
            return self._leaf(node, existing, _parameter(parameters, inner[len(path) :]), of_optimizer=True)

        compose = self._composer(current, path)
        built = build(branch, lambda name: self._codec.decode(name, show_path(path)), leaf, path, compose)
        return built if self._manifest.format == FORMAT else named_like(current, built)

    def _leaf(self, node: Node, existing: Any, like: Any = None, *, of_optimizer: bool = False) -> Any:
        """What a stateful object gets for a saved leaf. `like`: a tensor that is cut as this one should be."""
        if node.kind == "tensor":
            return self._tensor_target(existing, self._tensors[node.key], like, of_optimizer)
        if node.kind == "per_rank":
            return existing if isinstance(existing, PerRank) else PerRank(None)
        return _Placeholder()

    def _open_named(self, optimizer: torch.optim.Optimizer, branch: Branch | None, path: Path) -> bool:
        """Match an optimizer by the names of its parameters, where both it and what was saved have them."""
        if branch is not None and self._saved_optimizers.at(path) is None:
            return False
        named = self._names().of(optimizer)
        if named is None:
            if branch is not None:
                self._kinds[show_path(path)] = _WITHOUT_NAMES
                self._named[path] = OptimizerMatch()
                self._not_saved.add(path)
            return branch is not None
        make = partial(self._leaf, of_optimizer=True)
        found = OptimizerMatcher(self._saved_optimizers, self._codec, named, path, make, _note_existing).match()
        self._named[path] = found
        self._missing += found.missing
        self._reasons.update(found.missing)
        self._redirected.update(found.redirected)
        if found.problem:
            self._kinds[show_path(path)] = found.problem
        if found.plan is None:
            self._not_saved.add(path)
        return True

    @cached_property
    def _saved_optimizers(self) -> SavedOptimizers:
        return SavedOptimizers(self._root, self._codec, {v.key: v.value for v in self._manifest.values})

    def _composer(self, current: Any, path: Path) -> Callable[[Parts, Path], Any]:
        """Notes which tensor of a state dict the parts of a saved one are for."""

        def note(parts: Parts, inner: Path) -> Parts:
            return _note_existing(parts, lookup(current, inner[len(path) :]))

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
            existing = lookup(current, inner[len(path) :])
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
        return built if self._manifest.format == FORMAT else named_like(current, built)

    def _open_unsaved(self, value: Any, path: Path) -> Any:
        """A stateful object of which nothing was saved: it is left as it is. An optimizer is asked for its keys."""
        if isinstance(value, torch.optim.Optimizer):
            return value.state_dict()
        self._missing.append(show_path(path))
        self._not_saved.add(path)
        return {}

    def _is_asked(self, value: Any, branch: Branch) -> bool:
        """Whether an object is asked for its state dict before it gets the saved one.

        It is, where tensors can be read into those that it has. What can be iterated over (a data loader, a sampler, a
        data set) is not: asking can start its workers, or use it up. It holds no tensors that are cut over ranks; if
        some were saved, it is asked after all.
        """
        if isinstance(value, torch.optim.Optimizer):
            return True
        leaves = list(leaves_of(branch))
        tensors = [self._tensors[node.key] for node in leaves if node.kind == "tensor"]
        if any(not isinstance(self._manifest.layout_of(tensor), Whole) for tensor in tensors):
            return self._manifest.format == FORMAT or not _is_iterable(value)
        if _is_iterable(value):
            return False
        # Files of other formats have text for all keys, and only the object knows what they were.
        private = any(node.kind == "per_rank" for node in leaves)
        return private or self._manifest.format != FORMAT or any(not tensor.is_bytes for tensor in tensors)

    def _open_module(self, module: torch.nn.Module, branch: Branch | None, path: Path) -> Any:
        """A module's state dict, under the names that were saved, with the saved versions and extra state in it."""
        current = state_dict_of(module, path)
        if branch is None or branch.node.kind in LEAVES:
            return current
        there = {str(child.node.name) for child in branch.children}
        named = named_as_saved(module, current, there)
        owners = modules_of(module, raw=named is not current)
        return self._with_extra_state(self._with_old_keys(owners, named, branch, path), branch, path)

    def _with_old_keys(self, owners: Mapping[str, torch.nn.Module], current: Any, branch: Branch, path: Path) -> Any:
        """The state dict for modules of another version, which may have had other keys, with the saved versions in it.

        Below the prefixes of those that can upgrade old states the dict holds what was saved.
        """
        saved = branch.node.versions
        if not saved or not changed_prefixes(saved, current):
            return current
        there = {str(child.node.name) for child in branch.children}
        changed = [p for p in changed_prefixes(saved, current) if p in owners and _upgrades(owners[p])]
        old = {str(child.node.name): child.node for child in branch.children if child.node.kind in LEAVES}

        def is_old(key: str) -> bool:
            return any(not prefix or key.startswith(f"{prefix}.") for prefix in changed)

        result: OrderedDict[str, Any] = OrderedDict((k, v) for k, v in current.items() if k in there or not is_old(k))
        for name, node in old.items():
            tensor = self._tensors.get(node.key)
            existing = result.get(name)
            if not is_old(name) or (is_tensor(existing) and tensor and tuple(existing.shape) == tensor.shape):
                continue
            result[name] = self._leaf(node, existing)
        left = [value for key, value in current.items() if key not in result and is_tensor(value) and value.is_meta]
        self._upgraded[path] = tuple(left)
        metadata = {p: {**entry, "version": saved.get(without_wrappers(p))} for p, entry in current._metadata.items()}  # noqa: SLF001
        result._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]  # noqa: SLF001
        return result

    def _tensor_target(self, existing: Any, tensor: Tensor, like: Any, of_optimizer: bool) -> Any:
        """What a stateful object gets for one saved tensor: the memory that it has, or new memory."""
        if tensor.is_bytes:
            return _Placeholder()
        has = is_tensor(existing) and not isinstance(existing, (bytes, bytearray))
        # A buffer of another object may have grown; state of a parameter cannot, and is reported.
        if has and (of_optimizer or tuple(existing.shape) == tensor.shape):
            return existing
        if tensor.kind == "numpy":
            return new_tensor(tensor.dtype, tensor.shape).numpy()
        if isinstance(like, torch.Tensor) and tuple(like.shape) == tensor.shape:
            return torch.empty_like(like.detach(), dtype=torch_dtype(tensor.dtype))
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
        branch = find_branch(self._root, path, self._codec) if self._has_composites else None
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
            self._changed.add(key)
        if local.dtype != saved.dtype and local.parts:
            self._dtypes[key] = (saved.dtype, local.dtype)
            if not may_convert(saved.dtype, local.dtype, self._convert_dtype):
                return []
        why = what_hinders(local)
        if why is not None:
            self._kinds[key] = why
            return []
        memory = memory_of(leaf)
        if memory is not None and self._first.setdefault(memory, key) != key:
            self._tied[key] = self._first[memory]
        if not has_no_memory(leaf):
            self._found[key] = saved, local
        placements = placements_for(self._manifest, saved, local, self._describer)
        swaps = self._manifest.format == FORMAT and may_swap(saved)
        for placement in placements:
            self._read_bytes += placement.size_bytes
            if not self._describer.shares:
                continue
            extra = extra_bytes(placement.item, DTYPES[saved.dtype].size_bytes) if swaps else 0
            self._extra_bytes += extra
            if extra or not placement.alone:
                self._shared_bytes += 0 if placement.alone else placement.size_bytes
                self._on_device = self._on_device or placement.target.device.type not in ("cpu", "meta")
        return placements if key not in self._tied else []

    def _find_tied(self, flat: Flat) -> None:
        """What is not in the checkpoint and is one tensor with something that is, is filled with it."""
        for key in list(self._missing):
            first = self._first.get(memory_of(flat.leaves[key]) or ()) if key in flat.leaves else None
            if first is not None:
                self._missing.remove(key)
                self._saved[key], self._tied[key] = self._saved[first], first
                if has_no_memory(flat.leaves[key]):
                    self._without_memory.append(key)

    def _check_optimizers(self, flat: Flat) -> None:
        """Refuse an optimizer whose parameters stay on the meta device: torch would put its state there too."""
        coming = {memory_of(flat.leaves[key]) for key in self._without_memory} - {None}
        for path, optimizer in self._optimizers.items():
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.is_meta]
            if any(memory_of(parameter) not in coming for parameter in parameters):
                self._kinds[show_path(path)] = (
                    "the optimizer's parameters are on the meta device, and nothing in this load gives them memory; "
                    "load their module in the same call, or give it memory first (to_empty)"
                )

    def _versions(self) -> dict[Path, Versions]:
        """The versions of modules in the checkpoint, by the paths of their state dicts."""
        if all(node.versions is None for node in self._manifest.tree):
            return {}
        found: dict[Path, Versions] = {}
        pending: list[tuple[Branch, Path]] = [(self._root, ())]
        while pending:
            branch, path = pending.pop()
            if branch.node.versions is not None:
                found[path] = branch.node.versions
            for i, child in enumerate(branch.children):
                if child.children:
                    pending.append((child, (*path, name_of(branch, i, self._codec))))
        return found


def keys_of(manifest: Manifest) -> list[str]:
    """All keys of a checkpoint, in one order."""
    return [*(t.key for t in manifest.tensors), *(v.key for v in manifest.values), *(p.key for p in manifest.per_rank)]


def _upgrades(module: torch.nn.Module) -> bool:
    """Whether a module has code that can change a state dict before it is loaded."""
    own = type(module)._load_from_state_dict is not torch.nn.Module._load_from_state_dict  # noqa: SLF001
    return own or bool(module._load_state_dict_pre_hooks)  # noqa: SLF001


def _is_iterable(value: Any) -> bool:
    return hasattr(type(value), "__iter__") or hasattr(type(value), "__next__")


def _note_existing(parts: Parts, existing: Any) -> Parts:
    parts.like = existing if is_composite(existing) and kind_of(existing) == parts.kind else None
    return parts


def _note_like(like: Any, parts: Parts, path: Path) -> Parts:
    del path
    parts.like = like
    return parts


def _parameter(parameters: Sequence[torch.Tensor], path: Path) -> torch.Tensor | None:
    """The parameter that a piece of optimizer state belongs to: state dicts number them through all groups."""
    if len(path) != 3 or path[0] != "state" or not isinstance(path[1], int):
        return None
    return parameters[path[1]] if 0 <= path[1] < len(parameters) else None
