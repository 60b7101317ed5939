"""One contender of async_save.py in its own process: the first save, then rounds of saves with and without training.

    python async_worker.py TASK.json RESULT.json

RESULT.json always holds what has been measured so far, so a failure or a hang loses only what comes after it. When the
parent process ends, this process and all its children end too.
"""

import ctypes
import gc
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from async_save import CONTENDERS, Busy, Contender, Outcome, Save, Task
from harness import Meter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from training import Limit, Training, Witness

import milepost

SAVE_TIMEOUT_S = 300.0
MOST_SAVES = 10  # in one round, where saves are too short for enough steps
LOOK_S = 0.05
PROBE_BYTES = 16 << 20


class Pending(Protocol):
    """A save in progress."""

    def wait_staged(self, timeout_s: float) -> Any:
        """Wait until the state may be changed."""

    def result(self, timeout_s: float) -> Any:
        """Wait until the checkpoint is committed. Raises the error of a save that failed."""


# The contenders


class Ours:
    """A `milepost.AsyncSaver` that is kept from one save to the next."""

    def __init__(self, contender: Contender, training: Training) -> None:
        self._saver = milepost.AsyncSaver(background=contender.background, stage=contender.stage)
        self._state = training.state
        self._optimizer = training.optimizer if contender.stage in ("overlap", "auto") else None

    def prewarm(self) -> None:
        """Allocate everything that a first save would allocate."""
        self._saver.prewarm(self._state)

    def save(self, where: Path) -> Pending:
        """The call that is timed. The optimizer's hook waits for an overlapped copy, so the loop does not have to."""
        return self._saver.save(self._state, where, optimizer=self._optimizer)

    def before_update(self, _: Pending) -> None:
        """Nothing to do."""

    def load(self, state: dict[str, Any], where: Path) -> None:
        """Read a part of what was saved."""
        milepost.load(state, where, allow_unexpected=True)

    def close(self) -> None:
        """Free the memory and end the process."""
        self._saver.close()


class Dcp:
    """DCP: with its defaults, or with a reused stager and every option that this machine supports."""

    def __init__(self, contender: Contender, training: Training) -> None:
        self._state = training.state
        process = contender.background == "process"
        self._kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        on_device = training.device != "cpu"
        options = StagingOptions(
            use_pinned_memory=on_device, use_shared_memory=process,
            use_async_staging=True, use_non_blocking_copy=on_device,
        )  # fmt: skip
        self._stager = DefaultStager(options) if contender.stage == "reused" else None

    def save(self, where: Path) -> Pending:
        """The call that is timed."""
        if self._stager is None and self._kind is AsyncCheckpointerType.THREAD:
            return DcpPending(async_save(self._state, checkpoint_id=where))
        kind, stager = self._kind, self._stager
        return DcpPending(
            async_save(self._state, checkpoint_id=where, async_checkpointer_type=kind, async_stager=stager)
        )

    def before_update(self, pending: Pending) -> None:
        """DCP requires this of a training loop where staging continues after the call."""
        pending.wait_staged(SAVE_TIMEOUT_S)

    def load(self, state: dict[str, Any], where: Path) -> None:
        """Read a part of what was saved."""
        dcp.load(state, checkpoint_id=where)

    def close(self) -> None:
        """Close the stager; DCP ends its own process."""
        if self._stager is not None:
            self._stager.close()


class DcpPending:
    """What DCP returns: one future, or two (staging and upload)."""

    def __init__(self, answer: Any) -> None:
        self._staged = getattr(answer, "staging_completion", None)
        self._done = getattr(answer, "upload_completion", answer)

    def wait_staged(self, timeout_s: float) -> None:
        """Without a future for staging, the call itself has waited."""
        if self._staged is not None:
            self._staged.result(timeout_s)

    def result(self, timeout_s: float) -> None:
        """Wait until the metadata is written."""
        self._done.result(timeout_s)


# What is watched during a save


class Waiter:
    """Records when a save is staged and committed, while another thread trains."""

    def __init__(self, pending: Pending) -> None:
        self._pending, self._error = pending, None
        self.staged_at = self.done_at = 0.0
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._pending.wait_staged(SAVE_TIMEOUT_S)
            self.staged_at = time.monotonic()
            self._pending.result(SAVE_TIMEOUT_S)
            self.done_at = time.monotonic()
        except BaseException as error:  # raised in `end`
            self._error = error

    def waits(self) -> bool:
        """Whether the save is still in progress."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Raise the error of the save, if it failed."""
        self._thread.join()
        if self._error is not None:
            raise self._error


class HostMemory:
    """The peak memory of this process and its descendants while the block ran, beyond what was there before.

    For this process, the peak of its resident size counts. For the others only their private memory counts, since
    shared memory is in the size of this process already. If the sum of all proportional sizes grew by more until the
    end of the block, that growth counts.
    """

    def __init__(self) -> None:
        self.peak_bytes: int | None = None  # None: the system does not report it
        self._below_bytes = 0
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> None:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        self._resident, self._shares = _status_bytes("self", "VmRSS"), _shares_bytes(["self"])
        self._watch.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watch.join()
        peak = _status_bytes("self", "VmHWM")
        held = _shares_bytes(["self", *_below(os.getpid())]) - self._shares
        if peak > 0:
            self.peak_bytes = max(0, peak - self._resident + self._below_bytes, held)

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            below = sum(_status_bytes(pid, "RssAnon") for pid in _below(os.getpid()))
            self._below_bytes = max(self._below_bytes, below)


def _below(pid: int | str) -> list[str]:
    """All descendants of a process."""
    found: list[str] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread or process has ended
            for child in children.read_text().split():
                found += [child, *_below(child)]
    return found


def _status_bytes(pid: str, name: str) -> int:
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/status").read_text().split(f"{name}:")[1].split()[0]) * 1024
    return 0


def _shares_bytes(pids: list[str]) -> int:
    """The sum of proportional set sizes: shared memory counts once."""
    total = 0
    for pid in pids:
        with suppress(OSError, IndexError):
            total += int(Path(f"/proc/{pid}/smaps_rollup").read_text().split("Pss:")[1].split()[0]) * 1024
    return total


def pinned_memory_shows() -> bool:
    """Whether memory that torch pins is part of the resident size of the process."""
    before = _status_bytes("self", "VmRSS")
    probe = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=True).fill_(1)
    return _status_bytes("self", "VmRSS") - before > probe.nbytes // 2


# The measurements


class Worker:
    """Measures one contender, and writes its results after every step."""

    def __init__(self, task: Task, result_file: Path) -> None:
        self._began = time.monotonic()
        self._task, self._file, self._contender = task, result_file, CONTENDERS[task.key]
        self._where = Path(task.folder) / "checkpoint"
        self._training = Training(task.size_bytes, task.device)
        self.outcome = Outcome(task.key, self._training.size_bytes)
        self._meter = Meter(0, 1, 0, lambda: None)
        self._who: Any = None
        # Before anything else pins memory: torch keeps pinned memory and hands it out again.
        self._pinned_shows = task.device == "cpu" or pinned_memory_shows()

    def run(self) -> None:
        """The first save; then rounds, unless only the first save counts, until all are done or the time is used up."""
        self.outcome.step_s = self._training.calibrate()
        self._first()
        self.write()
        if not self._contender.prewarmed:
            self._limit = Limit(self._training)
            self._limit.to_host_s(), self._limit.on_device_s()
            if self._contender.ours:
                self._sync()  # the first one is not counted
            for turn in range(self._task.rounds):
                if turn == 0 or not self._late():
                    self._round(turn)
        self._who.close()
        self.write()

    def write(self) -> None:
        """Write the results so far."""
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self.outcome.as_dict()))
        new.rename(self._file)

    def _late(self) -> bool:
        return time.monotonic() - self._began > self._task.seconds

    def _first(self) -> None:
        make = Ours if self._contender.ours else Dcp
        self._settle()
        witness, memory = Witness(self._training), HostMemory()
        before = self._device_bytes(start=True)
        with memory:
            start = time.monotonic()
            self._who = make(self._contender, self._training)
            if self._contender.prewarmed:
                self._who.prewarm()
                start, self.outcome.prewarm_s = time.monotonic(), time.monotonic() - start
            self.outcome.first = self._idle_save(start)
        self.outcome.host_bytes = memory.peak_bytes
        if memory.peak_bytes is None:
            self.outcome.notes.append("this system does not report the peak memory of a process")
        self._count_pinned()
        self.outcome.device_bytes = self._device_bytes() - before
        witness.check(self._who.load, self._where)

    def _idle_save(self, start: float) -> Save:
        pending = self._who.save(self._where)
        returned = time.monotonic()
        pending.wait_staged(SAVE_TIMEOUT_S)
        staged = time.monotonic()
        pending.result(SAVE_TIMEOUT_S)
        return Save(returned - start, staged - start, time.monotonic() - start)

    def _round(self, turn: int) -> None:
        parts: list[Callable[[], None]] = [self._busy]
        if self._contender.ours:
            parts += [self._idle, lambda: self.outcome.syncs_s.append(self._sync())]
        random.Random(turn).shuffle(parts)
        for part in parts:
            part()
        if (copied := self._limit.on_device_s()) is not None:
            self.outcome.device_copies_s.append(copied)
        self.write()

    def _idle(self) -> None:
        self._settle()
        self.outcome.limits_s.append(self._limit.to_host_s())
        self.outcome.idle.append(self._idle_save(time.monotonic()))

    def _sync(self) -> float:
        self._settle()
        start = time.monotonic()
        milepost.save(self._training.state, self._where)
        return time.monotonic() - start

    def _busy(self) -> None:
        """Steps without a save, then saves with steps until they are done, then steps without a save again."""
        self._settle()
        busy = Busy([], [], [], self._training.pace(self._task.pace_s))
        self._save_and_train(busy)
        while len(busy.steps_s) < self._task.enough_steps and len(busy.saves) < MOST_SAVES:
            self._save_and_train(busy)
        self._settle()
        busy.quiet_s.extend(self._training.pace(self._task.pace_s))
        self.outcome.busy.append(busy)

    def _save_and_train(self, busy: Busy) -> None:
        shutil.rmtree(self._where, ignore_errors=True)
        witness = Witness(self._training)
        start = time.monotonic()
        pending = self._who.save(self._where)
        returned = time.monotonic()
        waiter = Waiter(pending)
        busy.first_steps_s.append(self._training.step(partial(self._who.before_update, pending)))
        steps = []
        while waiter.waits():
            steps.append((self._training.step(), time.monotonic()))
        waiter.end()
        busy.saves.append(Save(returned - start, waiter.staged_at - start, waiter.done_at - start))
        busy.steps_s.extend(step for step, end in steps if end <= waiter.done_at)
        witness.check(self._who.load, self._where)

    def _settle(self) -> None:
        """Remove the checkpoint, sync, collect garbage; on a CPU also recycle pages (harness.py explains why)."""
        shutil.rmtree(self._where, ignore_errors=True)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._meter.settle()
        if self._task.device == "cpu":
            self._meter.recycle(self._where.parent, self._training.size_bytes)

    def _device_bytes(self, start: bool = False) -> int:
        """The peak that torch held on the device since the start."""
        if self._task.device == "cpu":
            return 0
        if start:
            torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.max_memory_allocated())

    def _count_pinned(self) -> None:
        """Add the peak of torch's pinned memory, where the resident size does not include it."""
        if not self._pinned_shows and self.outcome.host_bytes is not None:
            stats = getattr(torch.cuda, "host_memory_stats", dict)()
            self.outcome.host_bytes += int(stats.get("allocated_bytes.peak", 0))
            self.outcome.notes.append("pinned memory is not part of the resident size here, so it was added")


def _join_group(folder: Path) -> None:
    """A gloo group of one rank: DCP's asynchronous saves need a group."""
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing is ever sent: this returns when the parent has ended
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> None:
    """Measure. If something fails, write that into the results."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    task, result_file = Task(**json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2])
    if not CONTENDERS[task.key].ours:
        _join_group(Path(task.folder))
    worker = Worker(task, result_file)
    try:
        worker.run()
    except Exception as error:
        line = (str(error).splitlines() or [""])[0]
        when = "the first save" if worker.outcome.first is None else f"round {len(worker.outcome.busy) + 1}"
        worker.outcome.notes.append(f"failed in {when}: {type(error).__name__}: {line}"[:300])
        worker.write()
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a contender that failed may have left threads that cannot be ended


if __name__ == "__main__":
    main()
