"""Parameters and buffers on the meta device get memory, and stay the same objects.

What holds a parameter (other modules that are tied to it, an optimizer, a hook, a list of the user's) must hold it
after a load too. So the new memory is put into the object that is there. A module is not asked to replace it.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from milepost.core.tree import Path, show_path
from milepost.state.tensors import Memory, memory_of

_SHOWN = 20


class _Place(NamedTuple):
    """Where a module keeps a tensor: one of its dicts, and the name in it."""

    holder: dict[str, Any]
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = self.holder[self.name]
        return tensor


def give_memory(
    modules: Iterable[torch.nn.Module],
    parameters: dict[str, Any],
    optimizers: Iterable[torch.optim.Optimizer],
    made: Mapping[Memory, torch.Tensor],
) -> frozenset[Memory]:
    """Put new memory into each tensor on the meta device that `made` has memory for, and give the memory that is used.

    These are the parameters and buffers of the modules, and `parameters`, which stand in the state by themselves. Where
    torch cannot exchange what is inside of a tensor (something holds a weak reference to it), the modules, the
    optimizers and the dict get a new tensor in its place, and a warning says so.
    """
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    names: list[str] = []
    used: set[Memory] = set()
    with torch.inference_mode(mode=False), torch.no_grad():
        for place in (*_places(modules), *(_Place(parameters, key) for key in parameters)):
            old = place.tensor
            memory = memory_of(old) if old.is_meta and id(old) not in replaced else None
            if memory is not None and memory in made:
                used.add(memory)
                new = _renewed(old, made[memory])
                if new is not old:
                    replaced[id(old)] = old, new
                    names.append(place.name)
            if id(old) in replaced:
                place.holder[place.name] = replaced[id(old)][1]
    if replaced:
        for optimizer in optimizers:
            _replace_in(optimizer, replaced)
        _warn_of_replaced(names)
    return frozenset(used)


@contextlib.contextmanager
def same_objects(
    module: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer], blank: Mapping[Memory, torch.Tensor]
) -> Iterator[None]:
    """Whatever a module puts in the place of its tensors within, it has the same tensors afterwards, with those values.

    `blank`: memory, not set to anything, for tensors on the meta device. One that gets no values stays there.
    """
    before = [(owner, place, place.tensor) for owner in module.modules() for place in _places_of(owner)]
    yield
    kept: dict[int, torch.Tensor] = {}
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    names: list[str] = []
    with torch.inference_mode(mode=False), torch.no_grad():
        for owner, place, old in before:
            new = place.holder.get(place.name)
            if new is old or not isinstance(new, torch.Tensor):
                continue
            if id(old) not in kept:
                kept[id(old)] = _filled(old, new, blank)
                if kept[id(old)] is not old:
                    replaced[id(old)] = old, kept[id(old)]
                    names.append(place.name)
            setattr(owner, place.name, kept[id(old)])  # some modules note it elsewhere too
    if replaced:
        for optimizer in optimizers:
            _replace_in(optimizer, replaced)
        _warn_of_replaced(names)


def _filled(old: torch.Tensor, new: torch.Tensor, blank: Mapping[Memory, torch.Tensor]) -> torch.Tensor:
    """The old tensor with the values of the new one; or another tensor, where torch cannot do that."""
    if new.is_meta:
        return old
    if not old.is_meta:
        old.copy_(new)
        return old
    memory = memory_of(old)
    if memory is None or memory not in blank:
        return _renewed(old, new)
    blank[memory].copy_(new)
    return _renewed(old, blank[memory])


def _renewed(old: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The old tensor with new memory inside; or a new tensor, where torch cannot do that."""
    new = _like(old, memory)
    try:
        _exchange(old, new)
    except RuntimeError:
        return new
    return old


def _replace_in(optimizer: torch.optim.Optimizer, replaced: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [replaced[id(p)][1] if id(p) in replaced else p for p in group["params"]]
    for old, new in replaced.values():
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def _warn_of_replaced(names: list[str]) -> None:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    warnings.warn(
        f"{len(names)} tensors on the meta device were replaced by new ones, because something holds weak references "
        f"to them or uses them in a graph: {', '.join(map(repr, names[:_SHOWN]))}{more}. The modules and optimizers of "
        "this load have the new ones. An optimizer that was made before and is not part of it has the old ones: make "
        "it again.",
        RuntimeWarning,
        stacklevel=5,
    )


def still_on_meta(modules: Mapping[Path, torch.nn.Module]) -> list[str]:
    """The keys of parameters and buffers that have no values, although their module was loaded."""
    found = []
    for path, module in modules.items():
        for prefix, owner in module.named_modules():
            for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):  # noqa: SLF001
                if tensor is not None and tensor.is_meta:
                    found.append(show_path((*path, f"{prefix}.{name}" if prefix else name)))
    return found


def warn_of_meta(modules: Mapping[Path, torch.nn.Module]) -> None:
    """Warn of what a loaded module still has on the meta device: it holds no values."""
    left = still_on_meta(modules)
    if left:
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        warnings.warn(
            f"{len(left)} tensors of loaded modules are still on the meta device, because the checkpoint holds no "
            f"values for them: {', '.join(map(repr, left[:_SHOWN]))}{more}. A buffer with persistent=False is never "
            "saved. Compute these tensors before you use the module.",
            RuntimeWarning,
            stacklevel=5,
        )


def _places(modules: Iterable[torch.nn.Module]) -> Iterator[_Place]:
    for module in modules:
        for owner in module.modules():
            yield from _places_of(owner)


def _places_of(owner: torch.nn.Module) -> Iterator[_Place]:
    for holder in (owner._parameters, owner._buffers):  # noqa: SLF001  # as `torch.nn.Module.to` does
        for name, tensor in list(holder.items()):
            if isinstance(tensor, torch.Tensor):
                yield _Place(holder, name)


def _like(old: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A tensor in new memory that is otherwise as the old one: a parameter or not, its class, its attributes."""
    new = memory.detach()
    if isinstance(old, torch.nn.Parameter):
        new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
    if type(new) is not type(old):
        new.__class__ = type(old)
    for name, value in vars(old).items():
        new.__dict__.setdefault(name, value)
    return new


def _exchange(old: torch.Tensor, new: torch.Tensor) -> None:
    """Put what is inside of `new` into `old`, which keeps its identity and its hooks. Raises RuntimeError."""
    hooks, after = old._backward_hooks, old._post_accumulate_grad_hooks  # noqa: SLF001
    torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
    # The hooks belong to the object, but torch calls those of what is inside. Setting them tells it.
    if hooks:
        old._backward_hooks = hooks  # noqa: SLF001
    if after:
        old._post_accumulate_grad_hooks = after  # noqa: SLF001
