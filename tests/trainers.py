"""Trainers for tests: processes that can be killed. Rank 0 hosts the job's store, as in a real job."""

import errno
import faulthandler
import itertools
import multiprocessing as mp
import os
import pickle
import signal
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import milepost
from milepost.store import LocalStore

LIMIT_S = 170.0
ANSWER_S = 80.0
ROWS = 1 << 12


class Trainer:
    """What the work that a test sends gets: who it is, and a place to keep its saver from one call to the next."""

    def __init__(self, rank, world, wire):
        self.rank, self.world, self._wire = rank, world, wire
        self.saver = None
        self.kept = {}

    def say(self, what):
        """Tell the test, at once: what is said has been heard even if this process is killed right after."""
        self._wire.send_bytes(pickle.dumps(("said", what)))

    def heard(self):
        """What the test tells; waits for it."""
        return pickle.loads(self._wire.recv_bytes())

    @property
    def writer(self):
        """The writing process of this rank."""
        return self.saver._engine.processes.writers.link.pid


class Job:
    """Trainers that do what they are sent, until killed. `with Job(world) as job`: nothing of it outlives the block."""

    def __init__(self, world):
        context = mp.get_context("forkserver")
        wires = [context.Pipe() for _ in range(world)]
        self._wires = [here for here, _ in wires]
        self.processes = [context.Process(target=_train, args=(r, world, wires[r][1])) for r in range(world)]
        self.said = [[] for _ in range(world)]
        for process, (_, there) in zip(self.processes, wires, strict=True):
            process.start()
            there.close()
        if world > 1:
            port = self.answer(0)
            for rank in range(1, world):
                self.tell(rank, port)
        self.pids = [process.pid for process in self.processes]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        for pid in self.writers():
            os.kill(pid, signal.SIGKILL)

    def send(self, work, *args, ranks=None):
        """Let these ranks (all) begin `work(trainer, *args)`."""
        for rank in range(len(self.processes)) if ranks is None else ranks:
            self.tell(rank, (work, args))

    def call(self, work, *args, within_s=ANSWER_S):
        """The results of `work(trainer, *args)`. Fails with the traceback of a rank that raises, dies or hangs."""
        self.send(work, *args)
        deadline = time.monotonic() + within_s
        answers, failed = [], []
        for rank in range(len(self.processes)):
            try:
                answers.append(self.answer(rank, deadline - time.monotonic()))
            except (AssertionError, EOFError) as error:
                failed.append(f"rank {rank}: {error or 'died'}")
        assert not failed, "\n".join(failed)
        return answers

    def tell(self, rank, what):
        self._wires[rank].send_bytes(pickle.dumps(what))

    def answer(self, rank, within_s=ANSWER_S):
        """What a rank's work gave. Things said before are kept."""
        while True:
            kind, what = self.hear(rank, within_s)
            if kind == "failed":
                raise AssertionError(what)
            if kind == "done":
                return what

    def hear(self, rank, within_s=ANSWER_S):
        """The next that a rank says or answers. Raises EOFError if it died."""
        assert self._wires[rank].poll(max(within_s, 0)), "silent"
        kind, what = pickle.loads(self._wires[rank].recv_bytes())
        if kind == "said":
            self.said[rank].append(what)
        return kind, what

    def hear_all(self, rank, within_s=ANSWER_S):
        """All that a rank says until it dies."""
        try:
            while True:
                self.hear(rank, within_s)
        except (EOFError, ConnectionResetError):
            return self.said[rank]

    def kill(self, *ranks):
        """SIGKILL for these (all), at once."""
        chosen = [self.processes[rank] for rank in ranks or range(len(self.processes))]
        for process in chosen:
            if process.exitcode is None:
                process.kill()
        for process in chosen:
            process.join()

    def writers(self):
        """The writing processes of this job that run, whatever became of their trainers."""
        return [pid for trainer in self.pids for pid in writers_of(trainer)]

    def writers_end(self, within_s=20.0):
        """Whether all writing processes end in time."""
        return until(lambda: not self.writers(), within_s)


def _train(rank, world, wire):
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    trainer = Trainer(rank, world, wire)
    if world > 1:
        # The store is in rank 0, as in a job without a launcher: it is gone when that is.
        port = 0 if rank == 0 else trainer.heard()
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        if rank == 0:
            wire.send_bytes(pickle.dumps(("done", store.port)))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    while True:
        try:
            work, args = trainer.heard()
        except EOFError:
            os._exit(0)
        try:
            result = "done", work(trainer, *args)
        except Exception:
            result = "failed", traceback.format_exc()
        wire.send_bytes(pickle.dumps(result))


def writers_of(trainer):
    """The writing processes that a trainer started, be it dead or alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"milepost.background.process.server" in b"".join(words) and words[-2] == str(trainer).encode():
            found.append(int(path.parent.name))
    return found


def runs(pid):
    """Whether a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def until(true, within_s):
    """Whether it becomes true in time."""
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class SlowStore(LocalStore):
    """A folder in which every write takes a while."""

    def __init__(self, root, write_s):
        super().__init__(root)
        self.write_s = write_s

    def writer(self, name, size_bytes, *, direct=True):
        return SlowWriter(super().writer(name, size_bytes, direct=direct), self.write_s)


class SlowWriter:
    def __init__(self, inner, write_s):
        self._inner, self._write_s = inner, write_s

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def write(self, offset, views):
        time.sleep(self._write_s)
        self._inner.write(offset, views)


class Unwritable(LocalStore):
    """A folder on a disk that is full."""

    def writer(self, name, size_bytes, *, direct=True):
        raise OSError(errno.ENOSPC, "No space left on device", name)


def state(rank, world, number):
    """A state whose every element is `number`."""
    rows = {(ROWS * rank,): torch.full((ROWS,), float(number))}
    return {
        "cut": milepost.Sharded((ROWS * world,), rows),
        "large": torch.full((1 << 17,), number, dtype=torch.int32),
        "n": number,
    }


def holds(where):
    """The number that a checkpoint holds, whole; None where there is none. Fails for anything between."""
    try:
        checkpoint = milepost.open(where)
    except milepost.CheckpointNotFound:
        return None
    with checkpoint:
        found = checkpoint.state()
        assert checkpoint.verify().ok, where
    assert (found["cut"] == found["n"]).all(), where
    assert (found["large"] == found["n"]).all(), where
    return found["n"]


# What tests send to trainers.


def open_saver(trainer, prewarmed=True, **options):
    """Make the saver; gives the writing process, if that is started now."""
    trainer.saver = milepost.AsyncSaver(**{"background": "process", "timeout_s": 60, **options})
    if prewarmed:
        trainer.saver.prewarm(state(trainer.rank, trainer.world, 0))
        return trainer.writer
    return None


def save(trainer, where, number=1):
    """Save and wait."""
    trainer.saver.save(state(trainer.rank, trainer.world, number), where).result(ANSWER_S)


def begin(trainer, where, number=1):
    """Begin to save, and wait until it is staged."""
    trainer.kept["pending"] = trainer.saver.save(state(trainer.rank, trainer.world, number), where)
    trainer.kept["pending"].wait_staged(ANSWER_S)
    return trainer.writer


def outcome(trainer):
    """How the save that was begun ends: None, or the kind and text of the error; and how long that took."""
    start = time.monotonic()
    error = trainer.kept["pending"].exception(ANSWER_S)
    return error and (type(error).__name__, str(error)), time.monotonic() - start


def attempt(trainer, where, number=1):
    """Save, and give how it ends, the same way."""
    start = time.monotonic()
    try:
        trainer.kept["pending"] = trainer.saver.save(state(trainer.rank, trainer.world, number), where)
    except milepost.CheckpointError as error:
        return (type(error).__name__, str(error)), time.monotonic() - start
    return outcome(trainer)


def keep_saving(trainer, folder, prewarmed):
    """Save new states to new places until killed. Reports which are staged; returns the error of a save that fails."""
    open_saver(trainer, prewarmed)
    trainer.say("up")
    try:
        for number in itertools.count(1):
            trainer.saver.save(state(trainer.rank, trainer.world, number), f"{folder}/{number}").wait_staged()
            trainer.say(number)
    except milepost.CheckpointError as error:
        return type(error).__name__, str(error)
