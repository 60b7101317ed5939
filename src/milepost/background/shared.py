"""The savers behind `milepost.async_save`, `prewarm` and `close_async`."""

import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from milepost.background.engine import Background, SaveEngine
from milepost.background.errand import Errand
from milepost.comm import Comm

_log = logging.getLogger("milepost")
_Key = tuple[int, Background, float]


@dataclass(frozen=True, slots=True)
class _Shared:
    """A saver, and the ranks that it was made for (None: this process alone), without keeping these alive."""

    saver: SaveEngine
    ranks: Callable[[], Any]
    outlived: Callable[[], bool]


class SharedSavers:
    """The savers behind `milepost.async_save`: one for each group of ranks and way of working, made when first used.

    A process group is not kept alive. When it is destroyed, its saver gives memory and process back at the next call,
    unless a save is still under way.
    """

    def __init__(self) -> None:
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()  # a group can end anywhere, also while it is held
        self._savers: dict[_Key, _Shared] = {}
        self._retired: list[SaveEngine] = []
        self._making: dict[_Key, Errand[SaveEngine]] = {}

    def _leave_to_parent(self) -> None:
        """In a fork: the savers, and the lock that a thread may have held, are those of the parent."""
        if self._process != os.getpid():
            self._begin_anew()

    def get(self, group: "dist.ProcessGroup | Comm | None", background: Background, timeout_s: float) -> SaveEngine:
        """The saver of these ranks: of a process group or a comm; None: of all ranks of the job."""
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self._leave_to_parent()
        with self._lock:
            self._retire()
            key = (id(group), background, timeout_s)
            found = self._savers.get(key)
            if found is not None and found.ranks() is not group:
                self._retired.append(found.saver)  # another group had this id, and its last save is still under way
                found = None
            if found is not None:
                return found.saver
            # By a thread that no signal handler interrupts: a saver that is half made would be counted on this rank
            # and not on the others, and later ones would not meet theirs.
            making = self._making.setdefault(key, Errand(partial(self._make, key, group)))
        making.start("making a saver")
        return making.get()

    def _make(self, key: _Key, group: Any) -> SaveEngine:
        try:
            saver = SaveEngine(background=key[1], process_group=group, timeout_s=key[2])
            with self._lock:
                self._savers[key] = _shared(saver, group)
            if isinstance(group, dist.ProcessGroup):
                # At once, and not at the next call: a new job may begin on the port of this one's store.
                weakref.finalize(group, self._retire_all).atexit = False
        finally:
            self._making.pop(key, None)
        return saver

    def last_of(self, group: "dist.ProcessGroup | Comm | None") -> SaveEngine | None:
        """The newest saver of these ranks, if there is one."""
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self._leave_to_parent()
        with self._lock:
            found = [one.saver for one in self._savers.values() if one.ranks() is group]
        return found[-1] if found else None

    def close(self) -> None:
        """Wait for the saves under way, and give memory and processes back.

        Raises the first error that the callers did not ask for, and logs the others.
        """
        self._leave_to_parent()
        with self._lock:
            savers = [*self._retired, *(one.saver for one in self._savers.values())]
            self._retired, self._savers = [], {}
        errors = []
        for saver in savers:
            try:
                saver.close()
            except Exception as error:  # noqa: BLE001  # raised when all are closed
                errors.append(error)
        for other in errors[1:]:
            _log.error("a save in the background failed too: %s", other, exc_info=other)
        if errors:
            raise errors[0]

    def _retire_all(self) -> None:
        with self._lock:
            self._retire()

    def _retire(self) -> None:
        """Drop the savers whose process group was destroyed. One with an error to raise waits for `close`."""
        outlived = {key: one for key, one in self._savers.items() if one.outlived() and not one.saver.busy}
        for key, one in outlived.items():
            del self._savers[key]
            one.saver.release()
            if one.saver.failed:
                self._retired.append(one.saver)


def _shared(saver: SaveEngine, group: Any) -> _Shared:
    if not isinstance(group, dist.ProcessGroup):
        # A comm, or none: the saver is kept until `close`, and the comm with it.
        return _Shared(saver, lambda: group, lambda: False)
    ranks = weakref.ref(group)
    return _Shared(saver, ranks, lambda: _is_destroyed(ranks()))


def _is_destroyed(group: "dist.ProcessGroup | None") -> bool:
    if group is None or not dist.is_initialized():
        return True
    try:
        return dist.get_rank(group) < 0
    except ValueError:  # not registered any more
        return True
