"""Modules under the names that they have without wrappers: torch.compile, DDP, FSDP1, activation checkpoints.

A wrapper puts a step of its own into the names of a state dict: `_orig_mod.`, `module.`. Here it is left out, so that a
checkpoint does not depend on how a module was wrapped. A submodule that is really called `module` keeps its name.
"""

import contextlib
import sys
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn


class _Wrapper(NamedTuple):
    """A class that wraps modules: where it is defined, the name of what it wraps, whether that is in state dicts."""

    module: str
    name: str
    inner: str
    in_names: bool = True


_FSDP_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"
# FSDP1 and activation checkpoints take their names out of state dicts, and put them in again, by hooks of their own.
_FSDP = _Wrapper(_FSDP_MODULE, "FullyShardedDataParallel", "_fsdp_wrapped_module", in_names=False)
_WRAPPERS = (
    _Wrapper("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    _Wrapper("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    _Wrapper("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    _FSDP,
    _Wrapper(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
        in_names=False,
    ),
)


def _known() -> list[tuple[type, _Wrapper]]:
    """The classes of wrappers that exist in this process. Those whose module is not imported have no instances."""
    found = ((getattr(sys.modules.get(one.module), one.name, None), one) for one in _WRAPPERS)
    return [(kind, one) for kind, one in found if isinstance(kind, type)]


class _Step(NamedTuple):
    """A module on the way through all of them: what stands before the names of its own parts, with a dot at the end.

    `path`: as torch walks modules; `raw`: in state dicts; `plain`: without wrappers.
    """

    path: str
    raw: str
    plain: str


def _steps(module: nn.Module) -> list[_Step]:
    """All modules, also those that stand in several places. Empty where nothing is wrapped."""
    known = _known()

    def walk(here: nn.Module, at: _Step) -> Iterator[_Step]:
        yield at
        wrapper = next((one for kind, one in known if isinstance(here, kind)), None)
        for name, child in here._modules.items():  # noqa: SLF001  # named_children leaves out what it saw before
            if child is None:
                continue
            wraps = wrapper is not None and name == wrapper.inner
            in_names = not wraps or (wrapper is not None and wrapper.in_names)
            path, raw = f"{at.path}{name}.", f"{at.raw}{name}." if in_names else at.raw
            yield from walk(child, _Step(path, raw, at.plain if wraps else f"{at.plain}{name}."))

    steps = list(walk(module, _Step("", "", "")))
    return steps if any(step.path != step.plain for step in steps) else []


def _plain_keys(steps: list[_Step], keys: Iterable[str]) -> dict[str, str]:
    """Each key without wrappers. All keep their names where two would get the same one."""
    found = _reprefixed({step.raw: step.plain for step in steps}, keys)
    return found if len(set(found.values())) == len(found) else {key: key for key in found}


def module_state(module: nn.Module) -> Any:
    """The state dict of a module under its names without wrappers; FSDP1 gives its shards."""
    with sharded_states(module):
        state = module.state_dict()
    steps = _steps(module)
    if not steps or not isinstance(state, Mapping):
        return state
    keys = _plain_keys(steps, state)
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        versions = {step.plain[:-1]: versions[step.path[:-1]] for step in steps if step.path[:-1] in versions}
    return _renamed(state, keys, versions)


def modules_of(module: nn.Module, *, raw: bool = False) -> dict[str, nn.Module]:
    """All modules by their names without wrappers, or with `raw` as in state dicts; of a wrapper, what it wraps."""
    found = dict(module.named_modules(remove_duplicate=False))
    steps = _steps(module)
    return {(step.raw if raw else step.plain)[:-1]: found[step.path[:-1]] for step in steps} if steps else found


def parameters_of(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All parameters by their names without wrappers, in the order of the modules; a tied one under each of its names.

    The names are those of the module's state dict.
    """
    found = modules_of(module, raw=True)
    named = [
        (f"{prefix}.{name}" if prefix else name, parameter)
        for prefix, owner in found.items()
        for name, parameter in owner._parameters.items()  # noqa: SLF001  # each name, also of tied ones
        if parameter is not None
    ]
    plain = plain_keys_of(module, [name for name, _ in named])
    return [(plain[name], parameter) for name, parameter in named]


def plain_keys_of(module: nn.Module, keys: Iterable[str]) -> dict[str, str]:
    """Keys of a module's own state dict, and what each is called without wrappers."""
    steps = _steps(module)
    return _plain_keys(steps, keys) if steps else {key: key for key in keys}


def load_module(module: nn.Module, state: Any, *, assign: bool = False, strict: bool = True) -> None:
    """`load_state_dict` of a module, with names without wrappers, or with the names that its state dict has."""
    steps = _steps(module)
    if steps and isinstance(state, Mapping):
        raw = _raw_keys(module, steps)
        is_raw = _counts(raw.values(), state) > _counts(raw, state)
        versions = getattr(state, "_metadata", None)
        if versions is not None:
            names = {step.path[:-1]: (step.raw if is_raw else step.plain)[:-1] for step in steps}
            versions = {path: versions[name] for path, name in names.items() if name in versions}
        state = _renamed(state, {} if is_raw else {**_raw_names(steps, state), **raw}, versions)
    with sharded_states(module):
        module.load_state_dict(state, assign=assign, strict=strict)


def named_as_saved(module: nn.Module, state: Any, saved: Collection[Any]) -> Any:
    """The state under the names of the wrapped module, if a checkpoint holds more of those: DCP saves such names."""
    steps = _steps(module)
    if not steps or not isinstance(state, Mapping):
        return state
    raw = _raw_keys(module, steps)
    if _counts(state, saved) >= _counts(raw.values(), saved):
        return state
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        inner = {step.plain[:-1]: step.raw[:-1] for step in steps}  # of a wrapper and what it wraps, the latter
        versions = {inner[name]: entry for name, entry in versions.items() if name in inner}
    return _renamed(state, raw, versions)


def _counts(keys: Iterable[str], there: Collection[Any]) -> int:
    return sum(key in there for key in keys)


def is_extra_state(key: str) -> bool:
    """Whether a key of a module's state dict is what `get_extra_state` of a module in it gave."""
    return key.rpartition(".")[2] == "_extra_state"


def _raw_keys(module: nn.Module, steps: list[_Step]) -> dict[str, str]:
    """The key in the module's own state dict of each name without wrappers."""
    with sharded_states(module):
        keys = list(module.state_dict())
    return {plain: raw for raw, plain in _plain_keys(steps, keys).items()}


def _raw_names(steps: list[_Step], keys: Iterable[str]) -> dict[str, str]:
    """What keys without wrappers are called with them: also keys that the module does not have, or not any more."""
    return _reprefixed({step.plain: step.raw for step in steps}, keys)  # of a wrapper and what it wraps, the latter


def _reprefixed(prefixes: Mapping[str, str], keys: Iterable[str]) -> dict[str, str]:
    """Each key with another prefix in place of the longest one that is known."""
    found: dict[str, str] = {}
    for key in keys:
        at = len(key)
        while key[: at + 1] not in prefixes:  # the prefix of the module itself is empty
            at = key.rfind(".", 0, at)
        found[key] = prefixes[key[: at + 1]] + key[at + 1 :]
    return found


def _renamed(state: Any, names: Mapping[str, str], versions: Any) -> Any:
    """The state dict under other names. `versions`: of its modules, as torch keeps them beside it."""
    result = OrderedDict((names.get(key, key), value) for key, value in state.items())
    if versions is not None:
        result._metadata = OrderedDict(versions)  # type: ignore[attr-defined]  # noqa: SLF001  # torch's name for them
    return result


def fsdp_class() -> Any:
    """The class of FSDP1, or None where no module of this process can be one."""
    return getattr(sys.modules.get(_FSDP.module), _FSDP.name, None)


@contextlib.contextmanager
def sharded_states(module: nn.Module) -> Iterator[None]:
    """State dicts of FSDP1 hold shards within, whatever they hold by default."""
    fsdp: Any = fsdp_class()
    if fsdp is None or not any(isinstance(inner, fsdp) for inner in module.modules()):
        yield
        return
    before = _set_type(fsdp, module, sys.modules["torch.distributed.fsdp.api"].StateDictType.SHARDED_STATE_DICT)
    try:
        yield
    finally:
        _set_type(fsdp, module, before.state_dict_type, before.state_dict_config, before.optim_state_dict_config)


def _set_type(fsdp: Any, module: nn.Module, *settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it recommends other calls to programs that make this one
        return fsdp.set_state_dict_type(module, *settings)
