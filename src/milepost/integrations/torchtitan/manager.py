"""The checkpoint manager for torchtitan: its saves and its loads."""

import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.observability import structured_logger
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from milepost.api import explain, load
from milepost.background.pending import PendingSave
from milepost.checkpoint import Checkpoint, open_checkpoint
from milepost.comm import Announcement, Call, broadcast, calling
from milepost.comm.distributed import ranks_of
from milepost.core.wire import Wire
from milepost.dcp import load as load_from_storage
from milepost.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, InvalidRequest, InvalidState
from milepost.formats.write.export import export_safetensors
from milepost.integrations.torchtitan.settings import ASYNC_MODES, ManagerFields
from milepost.saving.pipeline import Receipt
from milepost.state.take_apart import is_stateful
from milepost.steps.checkpointer import Checkpointer
from milepost.store.spelling import inside, shown

STEPS = "step-{step}"
"""How torchtitan names the folders of steps."""
_SHOWN = 5


class _StepChoice(msgspec.Struct, frozen=True, array_like=True):
    """What all ranks load: a step (None: there is none), and whether of it only the model, or without its data."""

    step: int | None
    model_only: bool
    without_data: bool


_NO_STEP = _StepChoice(None, model_only=False, without_data=False)
_CHOOSING = Announcement("choosing", Wire(_StepChoice))
_LEFTOVER = Announcement("looking for an older checkpoint", Wire(bool))


class _StatefulPart:
    """A part of the training state that gives and takes its state dict, whatever else it is."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def state_dict(self) -> dict[str, Any]:
        """What torchtitan saves of it."""
        state: dict[str, Any] = self._part.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give it back."""
        self._part.load_state_dict(state_dict)


class CheckpointManager(BaseCheckpointManager):
    """torchtitan's checkpoint manager, with Milepost's saves: atomic, durable, verified, and resumed on any ranks.

    Put its `Config` where torchtitan's is: `Trainer.Config(checkpoint=CheckpointManager.Config(enable=True))`. It has
    the fields of torchtitan's manager, with the same meaning, and these:

    `async_mode`: "async" copies the state to host memory and writes from a thread. "async_with_pinned_mem" copies it
    while the next forward and backward run, and writes from a process that finishes the step if the trainer dies.
    `data_on_other_ranks`: what `load` does with the positions of data loaders that were saved by another number of
    data-parallel ranks. "refuse" raises InvalidState. "restart" leaves the data loaders at their start.
    `timeout_s`: how long ranks wait for each other.

    Raises InvalidRequest or ValueError for what cannot be honoured.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ManagerFields):
        """The fields of torchtitan's own configuration, and those of Milepost's; see `CheckpointManager`."""

    def __init__(
        self,
        config: "CheckpointManager.Config",
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
        ft_manager: Any = None,
    ) -> None:
        if ft_manager is not None and ft_manager.enabled:
            raise ValueError(
                "torchft is enabled: its replicas save and heal by torchtitan's TorchFTCheckpointManager. Use that as "
                "the checkpoint, or switch torchft off"
            )
        self.enable = config.enable
        self.save_future: Future[Receipt] | None = None
        if not self.enable:
            return
        self.config = config
        remote = filesystem.is_remote(base_folder) and not filesystem.is_remote(config.folder)
        self.folder = (inside if remote else filesystem.join)(base_folder, config.folder)
        self.sd_adapter = sd_adapter
        self.states = states
        self.states.update(
            {
                MODEL: ModelWrapper(model_parts),
                OPTIMIZER: optimizers,
                DATALOADER: dataloader,
                LR_SCHEDULER: lr_schedulers,
            }
        )
        self._optimizers = list(optimizers) if optimizers is not None else []
        self._pending: PendingSave | None = None
        self._check()
        self._keeper = Checkpointer(
            self.folder,
            keep_last=config.keep_latest_k or None,
            names=STEPS,
            timeout_s=config.timeout_s,
            **ASYNC_MODES[config.async_mode],
        )
        logger.info(f"Milepost saves steps to {shown(self.folder)}, and resumes from the newest whole one there.")

    def _check(self) -> None:
        """Refuse what only the objects of the job can tell."""
        unknown = [name for name in self.config.exclude_from_loading if name not in self.states]
        if unknown:
            known = ", ".join(sorted(self.states.keys() - {MODEL}))
            raise ValueError(
                f"checkpoint.exclude_from_loading: no state is named {', '.join(unknown)}; there are {known}"
            )
        for name in ("last_save_in_hf", "initial_load_in_hf"):
            if getattr(self.config, name) and self.sd_adapter is None:
                raise ValueError(f"checkpoint.{name}: this model has no state dict adapter, so it has no names for it")

        if self.config.last_save_in_hf and filesystem.is_remote(self.folder):
            raise InvalidRequest(
                f"checkpoint.last_save_in_hf: safetensors files are written to a folder of a file system, not to "
                f"{shown(self.folder)}. Set it to False, and export from the last step with milepost.convert"
            )

    # Saving

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save this step, if it is one to save. Returns whether it is; see `BaseCheckpointManager.save`."""
        if not self._is_due(curr_step, last_step):
            return False
        with structured_logger.log_trace_span("checkpoint_save"), torch.no_grad():
            structured_logger.add_step_tag("checkpoint_save")
            self._save_step(curr_step, last_step)
        return True

    def _save_step(self, curr_step: int, last_step: bool) -> None:
        self.maybe_wait_for_saving()
        begin = time.monotonic()
        in_background = not last_step and self.config.async_mode != "disabled"
        GarbageCollection.collect("Collecting before a checkpoint is saved.")
        if last_step:
            self._save_last(curr_step)
        elif in_background:
            pending = self._keeper.async_save(self._everything(), curr_step, optimizer=self._optimizers or None)
            self._pending, self.save_future = pending, _future_of(pending)
        else:
            self._keeper.save(self._everything(), curr_step)
        done = "is being saved; training was stopped for" if in_background else "was saved in"
        logger.info(f"Step {curr_step} {done} {time.monotonic() - begin:.2f} s.")

    def _is_due(self, step: int, last_step: bool) -> bool:
        if self.config.load_only:
            return False
        return last_step or step % self.config.interval == 0 or (step == 1 and self.config.enable_first_step_checkpoint)

    def _save_last(self, step: int) -> None:
        if not self.config.last_save_model_only:
            self._keeper.save(self._everything(), step)
            return
        model = _as_dtype(self.states[MODEL].state_dict(), TORCH_DTYPE_MAP[self.config.export_dtype])
        if not self.config.last_save_in_hf:
            self._keeper.save(model, step)
            return
        folder = self._folder_of(step)
        timeout_s = self.config.timeout_s
        export_safetensors(self.sd_adapter.to_hf(model), folder, overwrite=True, timeout_s=timeout_s)
        # A step of the same number, of an earlier run, would be taken for what was saved now.
        comm, call = ranks_of(None, timeout_s), Call("saving to", shown(folder))
        with calling(comm, call):
            leftover = broadcast(comm, call, _LEFTOVER, lambda: _is_ours(folder))
        if leftover:
            self._keeper.remove(step)

    def _everything(self) -> dict[str, Any]:
        """The state of training, as it is saved: the model's tensors at the top, everything else by its name."""
        return {**self.states[MODEL].state_dict(), **self._parts()}

    def _parts(self, without: Iterable[str] = ()) -> dict[str, Any]:
        """Everything but the model, and but these."""
        left_out = {MODEL, *without}
        parts = {name: part for name, part in self.states.items() if name not in left_out and part is not None}
        return {name: _StatefulPart(part) if is_stateful(part) else part for name, part in parts.items()}

    def _folder_of(self, step: int) -> str:
        return inside(self.folder, STEPS.format(step=step))

    def _wait_for_saving(self) -> None:
        """Wait for the save in the background. Raises what went wrong, on every rank."""
        pending, self._pending, self.save_future = self._pending, None, None
        assert pending is not None
        pending.result()

    def _maybe_wait_for_staging(self) -> None:
        """Return when the state may change. The optimizers wait by themselves, too."""
        if self._pending is not None:
            self._pending.wait_staged()

    def _close(self) -> None:
        """Wait for a save under way. Raises its error, if nobody asked for it."""
        self._pending, self.save_future = None, None
        ending = sys.exception()
        try:
            self._keeper.close()
        except CheckpointError as error:
            if ending is None:
                raise
            logger.error(f"A save in the background failed too: {error}")  # the error that ends training is raised

    # Loading

    def _load(self, step: int = -1) -> bool:
        """Load a step, by default the newest whole one; if there is none, the initial checkpoint. See `load`."""
        self.maybe_wait_for_saving()
        begin = time.monotonic()
        with structured_logger.log_trace_span("checkpoint_load"), torch.no_grad():
            loaded = self._resume(step) or self._load_initial()
        if loaded:
            GarbageCollection.collect("Collecting after a checkpoint was loaded.")
            logger.info(f"Loaded {shown(loaded)} in {time.monotonic() - begin:.2f} s.")
        else:
            logger.info("There is no checkpoint to load: training starts anew.")
        return bool(loaded)

    def _resume(self, step: int) -> str:
        """Load a step of this folder and return its place; or the empty text, if there is none."""
        skipped: dict[int, str] = {}
        comm = ranks_of(None, self.config.timeout_s)
        while True:
            with calling(comm, Call("restoring from", shown(self.folder))) as call:
                chosen = broadcast(comm, call, _CHOOSING, lambda: self._choose(step, skipped))
            if chosen.step is None:
                return ""
            place = self._folder_of(chosen.step)
            try:
                self._fill(place, chosen.model_only, chosen.without_data)
            except (CheckpointDamaged, CheckpointNotFound) as error:
                if step != -1:
                    raise
                skipped[chosen.step] = str(error)
                logger.warning(f"Skipping {place}: {error}")
            else:
                return place

    def _choose(self, wanted: int, skipped: dict[int, str]) -> _StepChoice:
        """The step to load: the one that is wanted, or the newest that was not skipped. On the coordinator."""
        if wanted != -1:
            with self._keeper.open(wanted) as checkpoint:
                return self._choice(wanted, checkpoint)
        for step in sorted(self._keeper.steps(), reverse=True):
            if step in skipped:
                continue
            try:
                with self._keeper.open(step) as checkpoint:
                    return self._choice(step, checkpoint)
            except (CheckpointDamaged, CheckpointNotFound) as error:
                skipped[step] = str(error)
                logger.warning(f"Skipping {self._folder_of(step)}: {error}")
        if skipped:
            reasons = "\n  ".join(f"step {step}: {reason}" for step, reason in skipped.items())
            raise CheckpointDamaged(
                f"no step in {self.folder} is whole:\n  {reasons}\n"
                "Restore these files from a backup, or start again in another checkpoint.folder."
            )
        return _NO_STEP

    def _choice(self, step: int, checkpoint: Checkpoint) -> _StepChoice:
        if step == 0:
            return _StepChoice(0, model_only=True, without_data=False)  # a seed checkpoint
        self._require_training_state(checkpoint)
        return _StepChoice(step, model_only=False, without_data=self._loses_data(checkpoint))

    def _require_training_state(self, checkpoint: Checkpoint) -> None:
        parts = self.states.keys() - {MODEL}
        if not any(key.partition(".")[0] in parts for key in checkpoint):
            raise InvalidState(
                f"{checkpoint.url} holds the model only (last_save_model_only), so training cannot go on from it. Set "
                "checkpoint.load_step to an older step, or start a new folder with "
                f"checkpoint.initial_load_path={checkpoint.url}"
                + (" and initial_load_in_hf" if checkpoint.format == "safetensors" else "")
            )

    def _loses_data(self, checkpoint: Checkpoint) -> bool:
        """Whether the data loaders start anew. Raises InvalidState if their positions do not fit and nobody said so."""
        loader = self.states[DATALOADER]
        key = f"{DATALOADER}.world_size"
        if loader is None or DATALOADER in self.config.exclude_from_loading or key not in set(checkpoint):
            return False
        was, now = checkpoint[key], getattr(loader, "dp_world_size", None)
        if now is None or was == now:
            return False
        text = (
            f"{checkpoint.url} has the positions of the data loaders of {was} data-parallel ranks, and there are {now}"
        )
        if self.config.data_on_other_ranks == "refuse":
            raise InvalidState(
                f"{text}. torchtitan cannot convert them. Set checkpoint.data_on_other_ranks='restart' to go on with "
                "the data from its start, or resume with the same data-parallel degree"
            )
        logger.warning(f"{text}: the data starts anew.")
        return True

    def _load_initial(self) -> str:
        """Load where training starts from, as the configuration says; or return the empty text, if it says nothing."""
        config = self.config
        place = config.initial_load_path or (config.initial_load_in_hf and self.sd_adapter.hf_assets_path) or ""
        if config.initial_load_in_hf:
            if filesystem.is_remote(place):
                raise InvalidRequest(
                    f"checkpoint.initial_load_in_hf reads a folder of a file system, not {shown(place)}: copy it first"
                )
            if not place or not filesystem.isdir(place):
                raise InvalidRequest(
                    f"checkpoint.initial_load_in_hf: there is no folder {place!r}; set checkpoint.initial_load_path, "
                    "or hf_assets_path of the trainer, to a folder with safetensors files"
                )
            self._fill_from_hf(place)
        elif place:
            without_data = False
            if not config.initial_load_model_only:
                comm = ranks_of(None, config.timeout_s)
                with calling(comm, Call("loading", shown(place))) as call:
                    without_data = broadcast(comm, call, _CHOOSING, lambda: self._initial_choice(place)).without_data
            self._fill(place, config.initial_load_model_only, without_data)
        return place

    def _initial_choice(self, place: str) -> _StepChoice:
        with open_checkpoint(place) as checkpoint:
            return self._choice(1, checkpoint)

    def _fill(self, place: str, model_only: bool, without_data: bool) -> None:
        """Load the state, or its model, from a checkpoint of any format with torchtitan's names."""
        left_out = [*self.config.exclude_from_loading, *([DATALOADER] if without_data else [])]
        left_out += [name for name, part in self.states.items() if part is None]
        # Asked once: the second time it would put the old values back into tensors that the model makes for it.
        model = dict(self.states[MODEL].state_dict())
        parts = {} if model_only else self._parts(left_out)
        target = {**model, **parts}
        some = model_only or bool(left_out)
        if some:
            self._note_unread(place, target, self.states.keys() - {MODEL} if model_only else set(left_out))
        load(target, place, allow_unexpected=some, convert_dtype=model_only, timeout_s=self.config.timeout_s)
        self.states[MODEL].load_state_dict({key: target[key] for key in model})
        self.states.update({name: target[name] for name, part in parts.items() if not isinstance(part, _StatefulPart)})

    def _note_unread(self, place: str, target: dict[str, Any], left_out: Iterable[str]) -> None:
        report = explain(target, place, timeout_s=self.config.timeout_s)
        known = set(left_out)
        _warn_of(
            place, [key for key in report.unexpected if key.partition(".")[0] not in known], "are not in the model"
        )

    def _fill_from_hf(self, place: str) -> None:
        """Load the model from a folder with safetensors files, by the names that the model's adapter gives."""
        quantized = self.config.initial_load_in_hf_quantized
        model = self.states[MODEL].state_dict()
        target = self.sd_adapter.to_hf(model)
        reader = self.sd_adapter.get_hf_storage_reader(place, quantized)
        if type(reader) is not HuggingFaceStorageReader:
            load_from_storage(target, storage_reader=reader)  # the adapter's own, which dequantizes
        elif quantized:
            raise InvalidRequest(
                f"checkpoint.initial_load_in_hf_quantized: {type(self.sd_adapter).__name__} cannot read quantized "
                "checkpoints; convert this one to floating point first"
            )
        else:
            timeout_s = self.config.timeout_s
            _warn_of(place, explain(target, place, timeout_s=timeout_s).unexpected, "are not in the model")
            load(target, place, allow_unexpected=True, convert_dtype=True, timeout_s=timeout_s)
        loaded = self.sd_adapter.from_hf(target)
        _warn_of(place, sorted(model.keys() - loaded.keys()), "of the model are not there, and keep their first values")
        self.states[MODEL].load_state_dict(loaded)


def _is_ours(folder: str) -> bool:
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.format == "milepost"


def _as_dtype(state: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The state with its floating tensors in this type."""
    return {
        key: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in state.items()
    }


def _future_of(pending: PendingSave) -> "Future[Receipt]":
    """The save as torchtitan shows it. Its error is still raised by the next save, if nobody waits."""
    future: Future[Receipt] = Future()

    def end(pending: PendingSave) -> None:
        if pending.error is not None:
            future.set_exception(pending.error)
        else:
            future.set_result(pending.result())

    pending.add_done_callback(end)
    return future


def _warn_of(place: str, keys: Iterable[str], what: str) -> None:
    found = list(keys)
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        logger.warning(f"{place}: {', '.join(found[:_SHOWN])}{more} {what}.")
