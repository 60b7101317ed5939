"""Reading checkpoints of trainers: those of Milepost, and those that Lightning wrote itself. Nothing in them is run."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import milepost
from milepost.store import LocalStore, Location, Store, Within, store_at
from milepost.store.spelling import inside, shown

_log = logging.getLogger("milepost")
META = "meta.pt"
"""Where Lightning's strategies with sharded state keep what is not a tensor of the model or of an optimizer."""
MODEL, OPTIMIZERS, STEP = "state_dict", "optimizer_states", "global_step"
_MODEL_OF_FSDP, _OPTIMIZER = "model", "optimizer_"
Keys = tuple[Any, ...]
"""The keys that lead to a part of a state."""
FindParts = Callable[[Mapping[str, Any]], tuple[Sequence[Keys], Sequence[Keys]]]
"""Finds the models and the optimizers of a state."""


@dataclass(frozen=True, slots=True)
class Trusted:
    """What may be made while reading: classes that the user named, and whether pickles may be run."""

    types: tuple[type, ...] = ()
    allow_pickle: bool = False


@dataclass(frozen=True, slots=True)
class SavedParts:
    """What a checkpoint holds: outlines of its models and optimizers by the keys that lead to them, and the rest, read.

    The outline of a model is its keys. That of an optimizer is its state dict, with the names of what each parameter
    has in place of the tensors.
    """

    path: Location
    models: dict[Keys, frozenset[str]]
    optimizers: dict[Keys, dict[str, Any]]
    rest: dict[str, Any]


def trainer_parts(tree: Mapping[str, Any]) -> tuple[Sequence[Keys], Sequence[Keys]]:
    """The model and the optimizers of a trainer: as it dumps them, or as Lightning's sharded folders have them."""
    model = _MODEL_OF_FSDP if MODEL not in tree and _MODEL_OF_FSDP in tree else MODEL
    listed = tree.get(OPTIMIZERS)
    if isinstance(listed, (list, tuple)):
        return [(model,)], [(OPTIMIZERS, index) for index in range(len(listed))]
    numbers = [str(key)[len(_OPTIMIZER) :] for key in tree if str(key).startswith(_OPTIMIZER)]
    return [(model,)], [(f"{_OPTIMIZER}{number}",) for number in sorted(filter(str.isdigit, numbers), key=int)]


def read_state(path: Location, trusted: Trusted) -> dict[str, Any]:
    """The whole checkpoint as the trainer knows it, with tensors on the CPU. Raises CheckpointNotFound."""
    with _opened(path, trusted) as (tree, meta):
        if meta is None:
            return {key: _read(value) for key, value in tree.items()}
        models, optimizers = trainer_parts(tree)
        found = {MODEL: _at(tree, models[0]), OPTIMIZERS: [_at(tree, keys) for keys in optimizers], **meta}
        if not optimizers:
            del found[OPTIMIZERS]
        return {key: _read(value) for key, value in found.items()}


def read_parts(path: Location, trusted: Trusted, find: FindParts) -> SavedParts:
    """What there is to load into models and optimizers, and the rest, read. Raises CheckpointNotFound."""
    with _opened(path, trusted) as (tree, meta):
        models, optimizers = find(tree)
        taken = {keys[0] for keys in (*models, *optimizers)} | {OPTIMIZERS}
        rest = {key: value for key, value in tree.items() if key not in taken}
        return SavedParts(
            path=path,
            models={keys: frozenset(_at(tree, keys)) for keys in models},
            optimizers={keys: _outline(_at(tree, keys)) for keys in optimizers},
            rest={key: _read(value) for key, value in {**rest, **(meta or {})}.items()},
        )


def newest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The path of the checkpoint in `folder`, a path or URL, with the highest `global_step`; None if there is none.

    Finds checkpoints of Milepost and of Lightning. What a killed save left does not count. Pass the result to
    `trainer.fit(ckpt_path=...)`, where None starts from the beginning. Raises CheckpointDamaged for a checkpoint that
    was committed and cannot be read.
    """
    store = store_at(folder)
    if not isinstance(store, LocalStore):
        names = [name.removesuffix("/") for name in store.list("", shallow=True) if name.endswith("/")]
        steps = [(step, name) for name in names if (step := _step_of(Within(store, name))) is not None]
        return inside(os.fspath(folder), max(steps)[1]) if steps else None
    found = [(step, path) for path in _entries(Path(folder).expanduser()) if (step := _step_of(path)) is not None]
    if not found:
        return None
    # Of several with the same step, the one that was saved last; the name decides where the clock is too coarse.
    return str(max(found, key=lambda each: (each[0], each[1].stat().st_mtime_ns, each[1].name))[1])


def _entries(root: Path) -> Iterable[Path]:
    """Files and folders that may be checkpoints. A link leads to another of them, or to a save that never ended."""
    try:
        entries = sorted(root.iterdir())
    except FileNotFoundError:
        return []
    return [path for path in entries if not path.is_symlink() and (path.is_dir() or path.suffix in (".ckpt", ".pt"))]


def _step_of(path: Path | Store) -> int | None:
    try:
        with milepost.open(path / META if isinstance(path, Path) and _is_lightnings(path) else path) as checkpoint:
            found = checkpoint.get(STEP)
    except (milepost.CheckpointNotFound, milepost.UnsupportedFormat) as error:
        _log.info("%s holds no checkpoint: %s", path, error)
        return None
    return found if isinstance(found, int) else None


@contextlib.contextmanager
def _opened(path: Location, trusted: Trusted) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """The state with lazy tensors; and, from a folder of Lightning's strategies, what they keep beside the shards."""
    with _advising():
        checkpoint = milepost.open(path, types=trusted.types, allow_pickle=trusted.allow_pickle)
    with checkpoint:
        with _advising():
            tree = checkpoint.tree()
        if not isinstance(tree, dict):
            held = type(tree).__name__
            raise milepost.UnsupportedFormat(f"{shown(path)} is no checkpoint of a trainer: it holds a {held}")
        if not isinstance(path, str) or not _is_lightnings(path):
            yield tree, None
            return
        with _opened(os.path.join(path, META), trusted) as (meta, _):
            yield tree, meta


@contextlib.contextmanager
def _advising() -> Iterator[None]:
    """Add to errors what to do in Lightning."""
    try:
        yield
    except milepost.CheckpointNotFound as error:
        error.add_note(
            "If a save was killed there, `milepost.integrations.lightning.newest_checkpoint(folder)` finds the newest "
            "whole checkpoint of the folder."
        )
        raise
    except milepost.UnsupportedFormat as error:
        error.add_note(
            "If you trust this checkpoint, so much that code in it may run: `trainer.fit(..., weights_only=False)`, or "
            "`save_options={'allow_pickle': True}`."
        )
        raise


def _is_lightnings(path: str | Path) -> bool:
    """Whether Lightning wrote this folder of shards, and Milepost has not saved over it since."""
    where = Path(path)
    return (where / META).is_file() and (where / ".metadata").is_file()


def _outline(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    state = {key: tuple(kept) for key, kept in optimizer.get("state", {}).items()}
    return {"state": state, "param_groups": _read(optimizer.get("param_groups", []))}


def _at(tree: Any, keys: Keys) -> Any:
    for key in keys:
        tree = tree.get(key, {}) if isinstance(tree, dict) else tree[key]
    return tree


def _read(value: Any) -> Any:
    """The same with its tensors read."""
    if isinstance(value, milepost.LazyTensor):
        return value.read_as_saved()
    return _rebuilt(value, _read)


def to_device(value: Any, device: torch.device) -> Any:
    """The same with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return _rebuilt(value, lambda inner: to_device(inner, device))


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        for key in value:
            value[key] = change(value[key])
    elif isinstance(value, list):
        value[:] = map(change, value)
    elif isinstance(value, tuple):
        changed = [change(inner) for inner in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return value
