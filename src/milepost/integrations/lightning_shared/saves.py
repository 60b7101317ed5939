"""The saves of one trainer, at once or in the background, and the removals that wait for them."""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import milepost
from milepost.background.engine import Background
from milepost.comm import TIMEOUT_S, Comm
from milepost.commit.find import newest_generation
from milepost.commit.removal import remove_checkpoint
from milepost.core.agreement import Plans
from milepost.core.option_values import check_values
from milepost.saving.options import SAVE_SETTINGS, SaveSettings, one_of
from milepost.store import LocalStore, Location, Store, store_at

_log = logging.getLogger("milepost")
ASIDE = ".before-milepost.ckpt"
"""What the name of a file ends in that Lightning wrote, and that stood where Milepost saves now."""
_REFUSED = (
    "Lightning keeps hyper-parameters, callbacks and loops in the checkpoint. Leave a hyper-parameter out with "
    "`self.save_hyperparameters(ignore=[...])`, or save it as plain values. Enums and dataclasses are kept with "
    "`save_options={'types': [...]}`, and what can be pickled with `save_options={'allow_pickle': True}`. Loading then "
    "needs the same options."
)


Place = Path | Store
"""A folder, or a place that is none."""


class Removals:
    """The checkpoints to remove once one save is committed."""

    def __init__(self) -> None:
        self._lock, self._waiting, self._committed = threading.Lock(), list[Place](), False

    def add(self, path: Place) -> None:
        """Remove this after the commit: now, if that has happened; never, if it does not happen."""
        with self._lock:
            if not self._committed:
                self._waiting.append(path)
                return
        _remove_or_log(path)

    def run(self, _comm: Comm) -> None:
        """Called when the save is committed."""
        with self._lock:
            self._committed = True
            waiting, self._waiting = self._waiting, []
        for path in waiting:
            _remove_or_log(path)


class TrainerSaves:
    """Saves checkpoints of a trainer, one at a time. `group`: the ranks that save together; None: all of the job.

    `background`: None to save before the call returns, or as for `milepost.AsyncSaver`. Raises InvalidRequest for a
    wrong argument.
    """

    def __init__(
        self,
        background: Background | None = None,
        group: Comm | None = None,
        timeout_s: float = TIMEOUT_S,
        options: SaveSettings | None = None,
    ) -> None:
        self.options = checked_options(options)
        self._background = background if background is None else one_of("background", background, ("thread", "process"))
        self._group, self._timeout_s = group, timeout_s
        self._plans = Plans()
        self._saver: milepost.AsyncSaver | None = None
        self._removals: Removals | None = None
        self._handled: BaseException | None = None
        """What the program was handling before it began to train: a `fit` may stand in an `except` block."""

    def save(self, state: Mapping[str, Any], path: Location) -> None:
        """Save, or begin to. Raises the error of an earlier save in the background; then nothing is saved."""
        try:
            if self._background is None:
                group, timeout_s = self._group, self._timeout_s
                milepost.save(state, path, process_group=group, timeout_s=timeout_s, plans=self._plans, **self.options)
                return
            if self._saver is None:
                self._handled = sys.exception()
                self._saver = milepost.AsyncSaver(
                    background=self._background, process_group=self._group, timeout_s=self._timeout_s
                )
            removals = Removals()
            self._saver.save(state, path, then=removals.run, **self.options)
            self._removals = removals
        except milepost.InvalidState as error:
            error.add_note(_REFUSED)
            raise

    def remove(self, path: Location) -> None:
        """Remove a checkpoint once the last save in the background, if there is one, is committed.

        If that fails, or has failed already, it stays: it may be all that there is.
        """
        where = place_of(path)
        if self._removals is not None:
            self._removals.add(where)
        else:
            remove_durably(where)

    def join(self) -> None:
        """Return when no save is under way, however it ended."""
        if self._saver is not None:
            self._saver.join()

    def close(self) -> None:
        """Wait, and give memory and processes back; the next save makes them anew.

        Raises the error of the last save. If another exception ends the training, which that would hide, it is logged.
        """
        saver, self._saver, self._removals = self._saver, None, None
        if saver is None:
            return
        ending = sys.exception() not in (None, self._handled)
        try:
            saver.close()
        except Exception as error:
            if isinstance(error, milepost.InvalidState):
                error.add_note(_REFUSED)
            if not ending:
                raise
            _log.error("the last save in the background failed too: %s", error, exc_info=error)


def checked_options(options: SaveSettings | None) -> SaveSettings:
    """The options of a save. Raises InvalidRequest, naming those that a save does not have."""
    given = dict(options or {})
    unknown = sorted(given.keys() - SAVE_SETTINGS)
    if unknown:
        known = ", ".join(sorted(SAVE_SETTINGS))
        raise milepost.InvalidRequest(f"save_options: a save has no option {', '.join(unknown)}. It has {known}")
    check_values(given)
    checked: SaveSettings = options or {}
    return checked


def place_of(path: Location) -> Place:
    """The folder that a path or a file URL names, or the store at another URL. Raises InvalidRequest."""
    store = store_at(path)
    return store.root if isinstance(store, LocalStore) else store


def place_to_read(path: Location) -> Location:
    """The same, where a link to a folder stands for the folder."""
    where = place_of(path)
    return os.path.realpath(where) if isinstance(where, Path) else where


def clear_the_way(path: Place) -> None:
    """Move a file aside that stands where a checkpoint is to be saved: one that Lightning wrote. It is never deleted.

    A folder of `torch.distributed.checkpoint` may stay: see `milepost.commit.beside`.
    """
    if not isinstance(path, Path):
        return
    if path.is_symlink():
        path.unlink()  # of `ModelCheckpoint(save_last="link")`: saving through it would replace what it leads to
    elif path.is_file():
        aside = path.with_name(path.name.removesuffix(".ckpt") + ASIDE)
        os.replace(path, aside)
        _log.warning("%s was not saved by Milepost. It is kept as %s", path, aside)


def remove_durably(path: Place) -> None:
    """Remove a checkpoint of Milepost, or a link to one, so that a power cut does not bring back a part of it.

    What another library wrote stays, and is named in a warning; so does what a killed save left.
    """
    if not isinstance(path, Path):
        if newest_generation(path):
            remove_checkpoint(path)
        return
    if path.is_symlink():
        path.unlink()
        return
    if not path.exists():
        return
    store = store_at(path)
    if path.is_file() or not newest_generation(store):
        _log.warning("%s is not a checkpoint of Milepost, so it is not removed. Delete it by hand", path)
        return
    remove_checkpoint(store)
    with contextlib.suppress(OSError):  # something else is in it, such as an export
        path.rmdir()


def _remove_or_log(path: Place) -> None:
    """In the background a checkpoint that cannot be removed is no reason to call a save failed that is committed."""
    try:
        remove_durably(path)
    except (milepost.CheckpointError, OSError) as error:
        _log.warning("%s could not be removed: %s", path, error)
