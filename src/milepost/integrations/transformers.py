"""`transformers.Trainer` with Milepost's checkpoints: each is one commit, and a resumed training finds a whole one.

    class MyTrainer(MilepostCheckpoints, Trainer): ...      or MilepostTrainer, which is that

A checkpoint holds the model, the optimizer, the scheduler, the scaler, the random numbers of each rank and the state of
the trainer. It is loaded on any number of ranks. `save_model` and the export to Hugging Face's files are the trainer's.
"""

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from milepost.api import load
from milepost.checkpoint import open_checkpoint
from milepost.commit.find import look_whole
from milepost.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, InvalidRequest
from milepost.integrations.accelerate import bare_optimizer, random_of_other_ranks, random_state, set_random_state
from milepost.state.take_apart import PerRank
from milepost.steps.checkpointer import Checkpointer
from milepost.store import LocalStore, store_at

try:
    from accelerate.utils import broadcast_object_list
    from transformers import Trainer
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import HubStrategy
except ImportError as error:
    raise ImportError(
        "milepost.integrations.transformers needs Transformers and Accelerate: pip install transformers accelerate"
    ) from error

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

__all__ = ["MilepostCheckpoints", "MilepostTrainer"]

_log = logging.getLogger("milepost")
_NAMES = "checkpoint-{step}"
_STATE_FILE = "trainer_state.json"
_BEST = "best"


class MilepostCheckpoints(_Base):
    """Put it before the Trainer among the bases of a class: `class MyTrainer(MilepostCheckpoints, Trainer)`.

    `save_total_limit` says how many checkpoints are kept; the best is kept beside them, if one is tracked.
    `resume_from_checkpoint` takes True (the newest whole one), or a path; checkpoints that the Trainer itself wrote are
    resumed too. `async_saves=True` copies the state and saves it while training goes on.

    Raises InvalidRequest for DeepSpeed, which saves by itself, and for a `hub_strategy` that uploads while training.
    """

    def __init__(self, *args: Any, async_saves: bool = False, **kwargs: Any) -> None:
        _refuse_url(kwargs.get("args", args[1] if len(args) > 1 else None))
        super().__init__(*args, **kwargs)
        self._async_saves = async_saves
        self._keeper: Checkpointer | None = None
        self._bests = 0.0
        self._resuming: str | None = None
        self._random: Mapping[str, Any] | None = None
        if self.is_deepspeed_enabled:
            raise InvalidRequest("DeepSpeed saves its states by itself; use transformers.Trainer with it")
        if self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END:
            raise InvalidRequest(
                f"hub_strategy={self.args.hub_strategy.value!r} uploads files of Hugging Face from each checkpoint, "
                "which has none: take hub_strategy='end', or call trainer.push_to_hub() after trainer.save_model()"
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`. True resumes from the newest checkpoint that is whole."""
        found = self._to_resume(resume_from_checkpoint)
        with self._closing(), tempfile.TemporaryDirectory() as folder:
            if found is None or not _is_ours(found):
                return super().train(found, *args, **kwargs)
            # The Trainer reads its state from a file, which it gets: a checkpoint has none beside its manifest.
            with open_checkpoint(found) as checkpoint:
                Path(folder, _STATE_FILE).write_text(checkpoint.metadata["trainer_state"], encoding="utf-8")
            self._resuming = found
            try:
                return super().train(folder, *args, **kwargs)
            finally:
                self._resuming = self._random = None

    def _to_resume(self, wish: str | bool | None) -> str | None:
        """The checkpoint that the ranks resume from; rank 0 looks for it. Raises ValueError if there is none."""
        if wish is None or wish is False:
            self._warn_of_older()
            return None
        if wish is not True:
            return os.fspath(wish)
        found: list[str | None] = [_newest(self.args.output_dir) if self.args.process_index == 0 else None]
        if self.args.world_size > 1:
            broadcast_object_list(found)
        if found[0] is None:
            raise ValueError(f"No valid checkpoint found in output directory ({self.args.output_dir})")
        return found[0]

    def _warn_of_older(self) -> None:
        older = _newest(self.args.output_dir) if self.args.process_index == 0 else None
        if older is not None:
            _log.warning(
                "this training starts anew, and %s is there already. Until there is a higher step, "
                "resume_from_checkpoint=True takes that one. Take another output_dir, or remove the older checkpoints.",
                older,
            )

    # Saving

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """All of a checkpoint in one commit."""
        del model  # as the Trainer does, all that is saved is taken from the trainer
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        keeper = self._keeper_at(self._get_output_dir(trial=trial))
        step = self.state.global_step
        is_best = self.state.best_global_step == step
        if is_best or self.state.best_global_step in keeper.steps():
            folder = self._get_output_dir(trial=trial)
            self.state.best_model_checkpoint = os.path.join(folder, _NAMES.format(step=self.state.best_global_step))
        state = self._parts(only_model=self.args.save_only_model)
        metadata = {"trainer_state": self._state_as_text(), "only_model": self.args.save_only_model}
        self._bests += is_best
        metrics = {_BEST: self._bests} if is_best else None
        if self._async_saves:
            keeper.async_save(state, step, metrics=metrics, metadata=metadata)
        else:
            keeper.save(state, step, metrics=metrics, metadata=metadata)

    def _keeper_at(self, folder: str) -> Checkpointer:
        url = os.path.abspath(folder)
        if self._keeper is not None and self._keeper.url != url:
            self._keeper.close()
            self._keeper = None
        if self._keeper is None:
            limit = self.args.save_total_limit
            # The last step that was the best when it was saved is the best of all. They are counted, over all trainings
            # in this folder: an earlier one may have left steps with higher numbers.
            best = {} if limit is None else {"keep_best": 1, "best": _BEST, "mode": "max"}
            self._keeper = Checkpointer(url, keep_last=limit, names=_NAMES, **best)  # type: ignore[arg-type]
            self._bests = 0.0 if limit is None else _bests_in(self._keeper)
        return self._keeper

    def _state_as_text(self) -> str:
        """The state of the trainer and its callbacks, as the Trainer writes it; rank 0's is kept."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, kept = type(callback).__name__, self.state.stateful_callbacks
                if isinstance(kept.get(name), list):
                    kept[name].append(callback.state())
                else:
                    kept[name] = callback.state()
        return json.dumps(asdict(self.state), indent=2, sort_keys=True)

    def _parts(self, *, only_model: bool) -> dict[str, Any]:
        """What a checkpoint holds, to save it or to load into it."""
        model = self.model_wrapped
        if only_model:
            return {"model": model}
        state = {
            "model": model,
            "optimizer": bare_optimizer(self.optimizer),
            "scheduler": self.lr_scheduler,
            "random": PerRank(_KeptRandom(self), remap=random_of_other_ranks),
        }
        scaler = getattr(self.accelerator, "scaler", None)
        return state if scaler is None else {**state, "scaler": scaler}

    # Resuming: the Trainer calls these in turn, with the folder that holds its own state

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if self._resuming is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """All is loaded here, when model and optimizer are prepared."""
        if self._resuming is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        with open_checkpoint(self._resuming) as opened:
            only_model = bool(opened.metadata.get("only_model"))
        if only_model:
            _log.warning("%s holds the model only (save_only_model): the optimizer starts anew", self._resuming)
        load(self._parts(only_model=only_model), self._resuming)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._resuming is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._resuming is None:
            super()._load_rng_state(checkpoint)
        elif self._random is not None:
            set_random_state(self._random)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if not _is_ours(best):
            super()._load_best_model()
            return
        if self._keeper is not None:
            self._keeper.wait()
        load({"model": self.model_wrapped}, best, allow_unexpected=True)

    def keep_random(self, state: Mapping[str, Any]) -> None:
        """Note the random numbers to go on with: the Trainer sets them when it has skipped the data that was seen."""
        self._random = state

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer would remove folders here by `save_total_limit`; Milepost has done it."""
        if self._keeper is not None:
            self._keeper.wait()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """Wait for saves under way at the end. An error that ends the training is raised before theirs."""
        with contextlib.ExitStack() as stack:
            stack.push(self._end)
            yield

    def _end(self, *raised: Any) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.__exit__(*raised)


class _KeptRandom:
    """The random numbers of this process: saved as they are, and noted for later when they are loaded."""

    def __init__(self, trainer: MilepostCheckpoints) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return random_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._trainer.keep_random(dict(state_dict))


class MilepostTrainer(MilepostCheckpoints, Trainer):
    """`transformers.Trainer` whose checkpoints are Milepost's: see `MilepostCheckpoints`."""


def _bests_in(keeper: Checkpointer) -> float:
    """How many bests were counted in this folder. On rank 0 it counts; the others may see less."""
    with contextlib.suppress(CheckpointError, OSError):
        best = keeper.best()
        if best is not None:
            with keeper.open(best) as checkpoint:
                return float(checkpoint.metadata["metrics"][_BEST])
    return 0.0


def _refuse_url(arguments: Any) -> None:
    """Before the Trainer makes a folder named `s3:`. Raises InvalidRequest."""
    folder = str(getattr(arguments, "output_dir", None) or "")
    store = store_at(folder or ".")  # raises for a URL that lost a slash
    if not isinstance(store, LocalStore):
        raise InvalidRequest(
            f"output_dir={store.url!r}: the Trainer keeps other files there too, so it is a folder. Save to a folder "
            "that is mounted, or use milepost.Checkpointer in a callback"
        )


def _newest(folder: str) -> str | None:
    """The newest checkpoint that is whole: Milepost's, or one that the Trainer wrote to its end."""
    found: dict[int, Path] = {}
    for path in Path(folder).glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdecimal():
            found[int(step)] = path
    return next((str(found[step]) for step in sorted(found, reverse=True) if _looks_whole(found[step])), None)


def _looks_whole(path: Path) -> bool:
    try:
        if _is_ours(path):
            look_whole(store_at(path))
            return True
    except CheckpointDamaged as error:
        _log.warning("skipping %s: %s", path, error)
        return False
    return (path / _STATE_FILE).is_file()


def _is_ours(path: str | os.PathLike[str]) -> bool:
    try:
        with open_checkpoint(path) as checkpoint:
            return "trainer_state" in checkpoint.metadata
    except CheckpointNotFound:
        return False
