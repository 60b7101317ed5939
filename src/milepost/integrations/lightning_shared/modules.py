"""Modules of Lightning from checkpoints: what `LightningModule.load_from_checkpoint` does for single files."""

import importlib
import os
from typing import Any, TypeVar

import torch

import milepost
from milepost.integrations.lightning_shared.parts import device_of
from milepost.integrations.lightning_shared.reading import Trusted, read_state
from milepost.integrations.lightning_shared.saves import place_to_read

M = TypeVar("M")
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def load_from_checkpoint(
    module: type[M],
    path: str | os.PathLike[str],
    *,
    map_location: Any = "cpu",
    strict: bool | None = None,
    save_options: Any = None,
    **hyper_parameters: Any,
) -> M:
    """A LightningModule, or a LightningDataModule, made from the hyper-parameters of a checkpoint, with its weights.

    The same as `module.load_from_checkpoint`, also for folders: of Milepost, and those of Lightning's strategies with
    sharded state. `map_location`: the device of the module. `strict`: as in `load_state_dict`. `save_options`: those
    that the checkpoint was saved with, if they were `types` or `allow_pickle`. `hyper_parameters`: in place of saved
    ones. Raises CheckpointNotFound, and InvalidRequest if `module` is not a class of Lightning.
    """
    device = device_of(map_location)
    package = next((name for name in _PACKAGES if _is_of(module, name)), None)
    if package is None:
        raise milepost.InvalidRequest(f"{module!r} is not a LightningModule or LightningDataModule")
    options = save_options or {}
    trusted = Trusted(tuple(options.get("types", ())), options.get("allow_pickle", False))
    checkpoint = read_state(place_to_read(path), trusted)
    checkpoint.pop("optimizer_states", None)  # twice the size of the model, and of no use here
    saving = importlib.import_module(f"{package}.core.saving")
    migration = importlib.import_module(f"{package}.utilities.migration")
    checkpoint, _ = migration.migrate_checkpoint(checkpoint)
    checkpoint.setdefault(module.CHECKPOINT_HYPER_PARAMS_KEY, {}).update(hyper_parameters)  # type: ignore[attr-defined]
    strictness = {"strict": strict} if issubclass(module, torch.nn.Module) else {}
    # Lightning's public function reads single files only, by itself. This is what it does with what it has read.
    made: Any = saving._load_state(module, checkpoint, **strictness, **hyper_parameters)  # noqa: SLF001
    if isinstance(made, torch.nn.Module):
        made.to(device)
    built: M = made
    return built


def _is_of(module: Any, package: str) -> bool:
    """Whether a class is one of this package, which is then imported already."""
    return isinstance(module, type) and any(
        base.__module__.startswith(package) and base.__name__ in ("LightningModule", "LightningDataModule")
        for base in module.__mro__
    )
