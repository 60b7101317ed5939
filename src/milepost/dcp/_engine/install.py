"""`install` and `uninstall`: Milepost under the names of torch.distributed.checkpoint, for programs that call those.

Rebound are the functions that save and load, and the storage on a file system. Planners, records and stagers stay
torch's: programs derive from them and compare them, and pickles name them. Milepost's functions take them all.

A function is rebound in every module that holds it. A class is rebound where programs import it, and not inside
torch.distributed.checkpoint, whose own classes derive from it.
"""

import contextlib
import copyreg
import functools
import importlib
import pkgutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, TracebackType
from typing import Any, NamedTuple, Self

from milepost.dcp._engine import installed

_TORCH = "torch.distributed.checkpoint"
_FUNCTIONS: dict[str, dict[str, Any]] = {
    "state_dict_saver": {
        "save": installed.save,
        "async_save": installed.async_save,
        "save_state_dict": installed.save_state_dict,
        "_save_state_dict": installed.save_state_dict_inside,
    },
    "state_dict_loader": {
        "load": installed.load,
        "load_state_dict": installed.load_state_dict,
        "_load_state_dict": installed.load_state_dict_inside,
        "_load_state_dict_from_keys": installed.load_from_keys,
    },
    "format_utils": {
        "dcp_to_torch_save": installed.dcp_to_torch_save,
        "torch_save_to_dcp": installed.torch_save_to_dcp,
    },
    "_storage_utils": {"_storage_setup": installed.storage_setup},
}
_CLASSES: dict[str, dict[str, Any]] = {
    "filesystem": {"FileSystemWriter": installed.InstalledWriter, "FileSystemReader": installed.InstalledReader},
    "_checkpointer": {"_Checkpointer": installed.InstalledCheckpointer},
}


class NameOfTorch(NamedTuple):
    """Where a name of torch's stands: a module, the name in it, and a word on how it stands there."""

    module: str
    name: str
    how: str = ""


@dataclass(slots=True)
class Installation:
    """What `install` did. As a context manager it undoes it at the end of the block.

    `rebound`: the names that are Milepost's now.
    """

    rebound: list[NameOfTorch]
    _is_first: bool = field(default=False, repr=False)

    @property
    def unreached(self) -> list[NameOfTorch]:
        """Where torch's own functions and classes are held now other than by a name of a module, and how.

        A call that goes through one of these gets what `how` says; change it by hand if that is not wanted. Looks
        through all imported modules, which can take a second.
        """
        return list(_unreached())

    def __enter__(self) -> Self:
        with _LOCK:
            _STATE.blocks += 1
            if self._is_first:
                _STATE.by_program = self._is_first = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _LOCK:
            _STATE.blocks -= 1
            _undo_if_unused()

    def __str__(self) -> str:
        lines = [f"{len(self.rebound)} names of {_TORCH} are Milepost's."]
        lines += [f"  not reached: {place.module}: {place.name} {place.how}" for place in self.unreached]
        return "\n".join(lines)


@dataclass(slots=True)
class _Wishes:
    """Who wants Milepost installed, and what has to be put back."""

    by_program: bool = False
    blocks: int = 0
    rebound: list[tuple[ModuleType, str, Any, Any]] = field(default_factory=list)

    @property
    def is_wanted(self) -> bool:
        return self.by_program or self.blocks > 0


_LOCK = threading.RLock()
_STATE = _Wishes()


def install() -> Installation:
    """Put Milepost under the names of `torch.distributed.checkpoint`, in this process. Returns what was done.

    Afterwards `save`, `async_save`, `load` and the like of torch are Milepost's, wherever a module holds them, and so
    are `FileSystemWriter` and `FileSystemReader`. Modules that are imported later get them too. Checkpoints of DCP are
    still loaded. `uninstall` puts every name back.

    Calling it again changes nothing, except that modules imported since are looked through. As a context manager it is
    undone at the end of the block; where blocks overlap, in one thread or several, at the end of the last. A block
    inside of a program that called `install()` leaves it installed.

    >>> import torch.distributed.checkpoint as torch_dcp
    >>> with milepost.dcp.install() as installed:
    ...     _ = torch_dcp.save({"step": 1}, checkpoint_id="memory://installed")
    >>> milepost.open("memory://installed")["step"], installed.unreached
    (1, [])
    """
    with _LOCK:
        was_by_program, _STATE.by_program = _STATE.by_program, True
        try:
            _rebind()
            rebound = [NameOfTorch(module.__name__, name) for module, name, _, _ in _STATE.rebound]
            return Installation(rebound, _is_first=not was_by_program)
        except BaseException:
            _STATE.by_program = was_by_program
            _undo_if_unused()
            raise


def uninstall() -> None:
    """Put back what `install()` changed: every name is the very object that it was. Does nothing if nothing is.

    Blocks of `with install()` that are still open keep Milepost installed until they end.

    >>> milepost.dcp.uninstall()
    """
    with _LOCK:
        _STATE.by_program = False
        _undo_if_unused()


def original(name: str) -> Any:
    """Torch's own class under this name, installed or not."""
    return _originals()[name][0]


@functools.cache
def _originals() -> dict[str, tuple[Any, Any]]:
    """Torch's own object and Milepost's, by name. Looked up once, before anything is rebound."""
    found = {}
    for module, names in {**_FUNCTIONS, **_CLASSES}.items():
        theirs = importlib.import_module(f"{_TORCH}.{module}")
        found.update({name: (getattr(theirs, name), ours) for name, ours in names.items() if hasattr(theirs, name)})
    return found


@functools.cache
def _import_all_of_torch() -> None:
    """Import every module of torch.distributed.checkpoint: one imported later would derive from Milepost's classes."""
    package = importlib.import_module(_TORCH)
    for module in pkgutil.walk_packages(package.__path__, f"{_TORCH}."):
        with contextlib.suppress(ImportError):  # of a package that it needs
            importlib.import_module(module.name)


def _rebind() -> None:
    _import_all_of_torch()
    pairs = {id(theirs): (theirs, ours) for theirs, ours in _originals().values()}
    for module, name, value in _names_of_modules():
        theirs, ours = pairs.get(id(value), (None, None))
        if theirs is not None and not _is_inside_torch(module, theirs):
            vars(module)[name] = ours
            _STATE.rebound.append((module, name, theirs, ours))
    for kind in _storage_classes():
        copyreg.pickle(kind, _reduce_original)


def _is_inside_torch(module: ModuleType, theirs: Any) -> bool:
    """Whether a class is needed there: torch's own modules derive from it."""
    where = module.__name__
    return isinstance(theirs, type) and where.startswith(f"{_TORCH}.") and where != theirs.__module__


def _names_of_modules() -> Iterator[tuple[ModuleType, str, Any]]:
    """(module, name, value) for all imported modules but Milepost's own. Nothing is imported by looking."""
    for key, module in list(sys.modules.items()):
        if issubclass(type(module), ModuleType) and key.split(".")[0] != "milepost":
            for name, value in list(vars(module).items()):
                yield module, name, value


def _undo_if_unused() -> None:
    if _STATE.is_wanted:
        return
    for module, name, theirs, ours in reversed(_STATE.rebound):
        if vars(module).get(name) is ours:  # else the program has put something else there
            vars(module)[name] = theirs
    _STATE.rebound.clear()
    pairs = {id(ours): (ours, theirs) for theirs, ours in _originals().values()}
    for module, name, value in _names_of_modules():  # modules that were imported meanwhile
        ours, theirs = pairs.get(id(value), (None, None))
        if ours is not None:
            vars(module)[name] = theirs
    for kind in _storage_classes():
        if copyreg.dispatch_table.get(kind) is _reduce_original:
            del copyreg.dispatch_table[kind]


def _storage_classes() -> list[type]:
    return [original(name) for name in _CLASSES["filesystem"]]


def _reduce_original(value: Any) -> tuple[Any, ...]:
    """How an object of torch's own class is pickled while its name is Milepost's."""
    state = value.__getstate__() if hasattr(value, "__getstate__") else vars(value)
    return make_original, (type(value).__name__, dict(state or {}))


def make_original(name: str, state: dict[str, Any]) -> Any:
    """A storage object of torch's own class from its pickle, whatever stands under its name."""
    kind = original(name)
    made = kind.__new__(kind)
    vars(made).update(state)
    return made


# What cannot be reached


def _unreached() -> Iterator[NameOfTorch]:
    """Where torch's own functions and classes are held other than by a name of a module."""
    held = {id(theirs): theirs for theirs, _ in _originals().values()}
    seen: set[int] = set()
    for module, name, value in _names_of_modules():
        if module.__name__.startswith(_TORCH) or id(value) in seen or id(value) in held:
            continue
        seen.add(id(value))
        for how in _holds(value, held):
            yield NameOfTorch(module.__name__, name, how)


def _holds(value: Any, held: dict[int, Any]) -> Iterator[str]:
    """How a value of a module holds one of these objects: one level deep."""
    kind = type(value)  # not isinstance: an object may pretend to be of another class, and warn or import when asked
    if issubclass(kind, type):
        for base in value.__bases__:
            if id(base) in held:
                yield f"derives from torch's {base.__name__}: it is used as it is, and writes torch's format"
        for attribute, inner in list(vars(value).items()):
            plain = inner.__func__ if isinstance(inner, (staticmethod, classmethod)) else inner
            yield from (f"{text} as its attribute {attribute}" for text in _held(plain, held))
            yield from (f"{text} in its method {attribute}" for text in _held_by_function(plain, held))
    elif kind is functools.partial:
        yield from _held(value.func, held)
    elif kind in (dict, list, tuple, set, frozenset):
        for item in list(value.values() if kind is dict else value):
            yield from (f"{text} in a {kind.__name__}" for text in _held(item, held))
    else:
        yield from _held_by_function(value, held)


def _held_by_function(value: Any, held: dict[int, Any]) -> Iterator[str]:
    if type(value) is not FunctionType:
        return
    defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    for inner in defaults:
        yield from (f"{text} as a default" for text in _held(inner, held))
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty one
            yield from (f"{text} in its closure" for text in _held(cell.cell_contents, held))


def _held(value: Any, held: dict[int, Any]) -> Iterator[str]:
    if id(value) in held:
        name = held[id(value)].__name__
        reaches = name in ("save", "load", "save_state_dict", "load_state_dict", "_load_state_dict_from_keys")
        yield f"holds torch's {name}" + (", which ends in Milepost's" if reaches else "")
