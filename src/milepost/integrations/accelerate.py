"""All of `Accelerator.save_state` in one checkpoint: models, optimizers, schedulers, loaders, random numbers, the rest.

    save_state(accelerator, "runs/a")          on every rank; committed as a whole, or not at all
    load_state(accelerator, "runs/a")          on any number of ranks
    install(accelerator, keep_last=3)          `accelerator.save_state` and `load_state` do this from now on

`training_state(accelerator)` is the state itself, for `milepost.async_save` and `milepost.Checkpointer`.
"""

import contextlib
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, Unpack

import numpy as np
import torch

from milepost.api import load, save
from milepost.checkpoint import open_checkpoint
from milepost.errors import CheckpointError, CheckpointNotFound, InvalidRequest, InvalidState
from milepost.loading.options import LoadKeywords
from milepost.saving.options import SaveKeywords
from milepost.saving.pipeline import Receipt
from milepost.state.take_apart import PerRank
from milepost.steps.checkpointer import Checkpointer
from milepost.store.spelling import inside

try:
    from accelerate import Accelerator
    from accelerate.data_loader import SeedableRandomSampler
    from accelerate.utils import broadcast_object_list
except ImportError as error:
    raise ImportError("milepost.integrations.accelerate needs Accelerate: pip install accelerate") from error

__all__ = [
    "InstalledStates",
    "bare_optimizer",
    "install",
    "load_state",
    "random_of_other_ranks",
    "random_state",
    "save_state",
    "set_random_state",
    "training_state",
]

_REFUSED = ("DEEPSPEED", "MEGATRON_LM", "XLA")
_OLD_FILES = "random_states_*.pkl"
_STEPS, _NAMES = "checkpoints", "checkpoint_{step}"  # as Accelerate calls them


def training_state(accelerator: Accelerator, *, data: bool = True) -> dict[str, Any]:
    """Everything that `accelerator.save_state` saves, as one state for `milepost.save` and `milepost.load`.

    `data=False` leaves the data loaders out. What a rank has for itself (random numbers, the position of a stateful
    loader) is kept for each rank. Raises InvalidRequest for what Accelerate does not save by itself: DeepSpeed,
    Megatron-LM, XLA, and hooks that write files of their own.
    """
    _check(accelerator)
    # Accelerate has no other names for these.
    state: dict[str, Any] = {
        "models": _numbered(accelerator._models),  # noqa: SLF001
        "optimizers": _numbered([bare_optimizer(made) for made in accelerator._optimizers]),  # noqa: SLF001
        "schedulers": _numbered(accelerator._schedulers),  # noqa: SLF001
        "custom": _numbered(accelerator._custom_objects),  # noqa: SLF001
        "accelerator": _Counters(accelerator),
        "random": PerRank(_Random(), remap=random_of_other_ranks),
    }
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    if data:
        state["loaders"] = _numbered([_loader_state(loader) for loader in accelerator._dataloaders])  # noqa: SLF001
    return state


def save_state(accelerator: Accelerator, path: str | os.PathLike[str], **options: Unpack[SaveKeywords]) -> Receipt:
    """Save all of the accelerator's state at `path`, from every rank. Options: those of `milepost.save`.

    Returns once it is committed: after a crash at any moment there is the checkpoint from before, or this one, whole.
    """
    return save(training_state(accelerator), path, **options)


def load_state(
    accelerator: Accelerator, path: str | os.PathLike[str], *, data: bool = True, **options: Unpack[LoadKeywords]
) -> None:
    """Load what `save_state` saved, on any number of ranks. Options: those of `milepost.load`.

    `data=False` leaves the data loaders as they are: for stateful ones on another number of ranks. On another number of
    ranks those that were not there before keep the random numbers that they have.
    """
    if not data:
        options["allow_unexpected"] = True
    load(training_state(accelerator, data=data), path, **options)


def _check(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind.name in _REFUSED:
        raise InvalidRequest(
            f"{kind.name} keeps the states of models and optimizers to itself; use accelerator.save_state with it"
        )
    if accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook:  # noqa: SLF001
        raise InvalidRequest(
            "this accelerator has hooks (register_save_state_pre_hook, register_load_state_pre_hook), which write "
            "files of their own beside it. Remove them, and pass what they save to register_for_checkpointing"
        )


def _numbered(values: Sequence[Any]) -> dict[str, Any]:
    return {str(number): value for number, value in enumerate(values)}


class _Counters:
    """The numbers that the accelerator counts: steps of gradient accumulation, and saves by automatic names."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step, "iteration": self._accelerator.project_configuration.iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._accelerator.step = state_dict["step"]
        self._accelerator.project_configuration.iteration = state_dict["iteration"]


def bare_optimizer(optimizer: Any) -> Any:
    """The optimizer without Accelerate's wrapper: beside its models, Milepost saves it by the names of parameters."""
    return getattr(optimizer, "optimizer", optimizer)


# Data loaders


def _loader_state(loader: Any) -> Any:
    if getattr(loader, "use_stateful_dataloader", False):
        return PerRank(loader, remap=_no_position_of_other_ranks)
    return PerRank(_LoaderPosition(loader), remap=_position_of_other_ranks)


class _LoaderPosition:
    """Which pass over the data a loader is in, and how it shuffles.

    Where in the pass it is, the training loop knows (`accelerate.skip_first_batches`).
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    @property
    def _sampler(self) -> Any:
        get = getattr(self._loader, "get_sampler", None)
        return get() if get is not None else None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"iteration": getattr(self._loader, "iteration", 0)}
        sampler = self._sampler
        if isinstance(sampler, SeedableRandomSampler):
            state["seed"], state["epoch"] = sampler.initial_seed, sampler.epoch
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if hasattr(self._loader, "iteration"):
            self._loader.iteration = state_dict["iteration"]
        sampler = self._sampler
        if isinstance(sampler, SeedableRandomSampler) and "seed" in state_dict:
            sampler.initial_seed, sampler.epoch = state_dict["seed"], state_dict["epoch"]


def _no_position_of_other_ranks(old: Sequence[dict[str, Any]], rank: int, world: int) -> NoReturn:
    """On another number of ranks: Accelerate cuts the data by rules of its own, which say nothing about the rest."""
    del rank
    raise InvalidState(
        f"{len(old)} ranks saved where their stateful loaders were, and this job has {world}; Accelerate cannot deal "
        "the rest of the data out anew. Load everything else with load_state(..., data=False): the loaders then start "
        "anew. Or keep a loader out of accelerator.prepare, and save its position with "
        "milepost.integrations.data.Loader, which goes on with any number of ranks"
    )


def _position_of_other_ranks(old: Sequence[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
    """On another number of ranks: what the same rank had, and rank 0 for a new one. Usually all have the same."""
    del world
    return old[rank if rank < len(old) else 0]


# Random numbers


def random_state() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's random numbers in this process, on the CPU and its accelerators."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002  # the one that programs use without naming it
        "cpu": torch.get_rng_state(),
    }
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            state[kind] = list(module.get_rng_state_all())
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on with these random numbers. States of devices that are not here are ignored."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["cpu"])
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if kind in state and module is not None and module.is_available():
            for device, value in enumerate(state[kind][: module.device_count()]):
                module.set_rng_state(value, device)


class _Random:
    """The random numbers of this process, as an object with a state."""

    def state_dict(self) -> dict[str, Any]:
        return random_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        set_random_state(state_dict)


def random_of_other_ranks(old: Sequence[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
    """On another number of ranks: a rank that was there before goes on, and a new one keeps what it has.

    Not a copy of another rank's: two ranks with the same random numbers would drop out the same neurons.
    """
    del world
    return old[rank] if rank < len(old) else random_state()


# In place of the accelerator's own methods


class InstalledStates:
    """What `install` gives: the steps that are kept, and the way back. Also a context manager."""

    def __init__(self, accelerator: Accelerator, keeper: Checkpointer | None, *, wait: bool) -> None:
        self.checkpointer = keeper
        self._accelerator, self._wait = accelerator, wait
        self._is_newest = False
        """Whether the steps of this job are the newest that are there."""
        self._old_load: Callable[..., None] = accelerator.load_state

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **options: Any
    ) -> str:
        """As `Accelerator.save_state`. Returns where. Without a folder: the next step of the project."""
        del safe_serialization
        if options:
            raise InvalidRequest(f"{', '.join(options)}: options of DeepSpeed's save, which Milepost does not make")
        accelerator = self._accelerator
        if self.checkpointer is None:
            if output_dir is None:
                raise InvalidRequest(
                    "say where to save: accelerator.save_state(folder), or make the accelerator with "
                    "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
                )
            return save_state(accelerator, output_dir).url
        step = accelerator.project_configuration.iteration
        self._check_newest(self.checkpointer, step)
        accelerator.project_configuration.iteration += 1
        state = training_state(accelerator)
        if self._wait:
            return self.checkpointer.save(state, step).url
        return str(self.checkpointer.async_save(state, step).url)

    def _check_newest(self, keeper: Checkpointer, step: int) -> None:
        """Refuse to save below steps that are there: the next `load_state()` would take those, of another run."""
        if self._is_newest:
            return
        found: list[int | None] = [None]
        with contextlib.suppress(CheckpointError, OSError):  # the save tells it, on all ranks
            found = [keeper.latest() if self._accelerator.is_main_process else None]
        if self._accelerator.num_processes > 1:
            broadcast_object_list(found)
        if found[0] is not None and found[0] >= step:
            raise InvalidRequest(
                f"{keeper.url} has steps up to {found[0]}, and this run would save step {step}: the next load_state() "
                "would take the older run. Begin with accelerator.load_state(), take another project_dir, or count on: "
                f"accelerator.project_configuration.iteration = {found[0] + 1}"
            )
        self._is_newest = True

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        data: bool = True,
        **options: Any,
    ) -> None:
        """As `Accelerator.load_state`. Without a folder: the newest whole step. Takes Accelerate's own folders too.

        `data=False` leaves the data loaders as they are. `load_kwargs` and `options` are for Accelerate's own folders.
        """
        self._is_newest = False
        if input_dir is None and self.checkpointer is not None:
            self.checkpointer.wait()
            newest = self.checkpointer.latest()
            if newest is not None and _is_accelerates(folder := self._folder_of(newest)):
                self.load_state(folder, load_kwargs, data=data, **options)
                self._accelerator.project_configuration.iteration = newest + 1  # Accelerate leaves it at 0
                return
        if input_dir is not None and _is_accelerates(input_dir):
            if not data:
                raise InvalidRequest(
                    f"data=False: {os.fspath(input_dir)} was saved by Accelerate, which loads all of it"
                )
            self._old_load(os.fspath(input_dir), load_kwargs, **options)
            return
        if options:
            raise InvalidRequest(f"{', '.join(options)}: for folders that Accelerate saved, and not for Milepost's")
        if input_dir is not None:
            load_state(self._accelerator, input_dir, data=data)
        elif self.checkpointer is None:
            raise InvalidRequest("say what to load: accelerator.load_state(folder)")
        else:
            given: LoadKeywords = {} if data else {"allow_unexpected": True}
            self.checkpointer.restore(training_state(self._accelerator, data=data), **given)
            self._is_newest = True  # those above are damaged

    def _folder_of(self, step: int) -> str:
        return inside(inside(self._accelerator.project_dir, _STEPS), _NAMES.format(step=step))

    def wait(self) -> None:
        """Return once no save is under way. Raises the error of the last one, if it was not asked for."""
        if self.checkpointer is not None:
            self.checkpointer.wait()

    def close(self) -> None:
        """Give the accelerator its own methods back, and end a save that is under way."""
        for name in ("save_state", "load_state"):
            vars(self._accelerator).pop(name, None)
        if self.checkpointer is not None:
            self.checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def install(accelerator: Accelerator, *, wait: bool = True, **options: Any) -> InstalledStates:
    """Let `accelerator.save_state` and `accelerator.load_state` use Milepost: one commit for each save.

    With `ProjectConfiguration(automatic_checkpoint_naming=True)` the steps are in `checkpoints` of the project, as
    `checkpoint_0`, `checkpoint_1`, and `total_limit` says how many are kept; `options` are those of
    `milepost.Checkpointer` (`keep_last`, `keep_every`, `background`). `wait=False` saves while training goes on.
    """
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming:
        if options or not wait:
            names = ", ".join(options) or "wait=False"
            raise InvalidRequest(
                f"{names}: for steps, which the accelerator names if it is made with "
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
            )
        keeper = None
    else:
        given = {"keep_last": project.total_limit, "names": _NAMES, **options}
        keeper = Checkpointer(inside(accelerator.project_dir, _STEPS), **given)
    installed = InstalledStates(accelerator, keeper, wait=wait)
    accelerator.save_state, accelerator.load_state = installed.save_state, installed.load_state
    return installed


def _is_accelerates(path: str | os.PathLike[str]) -> bool:
    """Whether Accelerate saved this folder; the random numbers come last."""
    if "://" in os.fspath(path):  # Accelerate's own are in folders only
        return False
    return any(Path(path).glob(_OLD_FILES)) and not _is_ours(path)


def _is_ours(path: str | os.PathLike[str]) -> bool:
    try:
        with open_checkpoint(path) as checkpoint:
            return checkpoint.generation > 0
    except CheckpointNotFound:
        return False
