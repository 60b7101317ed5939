"""torchtitan's real Trainer on gloo ranks. One server imports torchtitan; ranks are forks of it, and can be killed.

`Ranks.run(world, work, *args)` gives, for each rank, (True, result), (False, traceback) or None if it died.
"""

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path

LIMIT_S = 120.0


class Ranks:
    """The server, as tests see it."""

    def __init__(self):
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.titan"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},  # gloo ranks, also beside a GPU
        )

    def outcomes(self, world, work, *args):
        """What became of each rank."""
        _send(self._server.stdin, (world, work.__name__, work.__module__, args))
        return _receive(self._server.stdout)

    def run(self, world, work, *args):
        """The results. Fails with the tracebacks of the ranks that failed."""
        outcomes = self.outcomes(world, work, *args)
        wrong = [f"rank {rank}: {o[1] if o else 'died'}" for rank, o in enumerate(outcomes) if not (o and o[0])]
        assert not wrong, "\n".join(wrong)
        return [result for _, result in outcomes]

    def close(self):
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait(60)


def _send(stream, value):
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream):
    (size,) = struct.unpack("<Q", stream.read(8))
    return pickle.loads(stream.read(size))


def _serve():
    replies, sys.stdout = os.fdopen(os.dup(1), "wb"), sys.stderr
    os.dup2(2, 1)
    import examples.torchtitan_train  # noqa: F401  # imports torchtitan, once
    import tests.integrations.test_torchtitan  # noqa: F401  # what ranks do

    while True:
        try:
            world, name, module, args = _receive(sys.stdin.buffer)
        except struct.error:
            os._exit(0)
        with tempfile.TemporaryDirectory() as folder:
            _send(replies, _run(world, getattr(sys.modules[module], name), args, Path(folder)))


def _run(world, work, args, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = {_fork(rank, world, port, work, args, folder): rank for rank in range(world)}
    deadline = time.monotonic() + LIMIT_S
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        children.pop(pid, None)
        if (pid and os.WIFSIGNALED(status)) or time.monotonic() > deadline:
            time.sleep(0.3)
            for left in children:  # as a launcher does when a rank dies
                os.kill(left, signal.SIGKILL)
        if not pid:
            time.sleep(0.02)
    found = [folder / str(rank) for rank in range(world)]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in found]


def _fork(rank, world, port, work, args, folder):
    pid = os.fork()
    if pid:
        return pid
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(world)}
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(log, stream)
        try:
            result = True, work(rank, *args)
        except BaseException:
            text = (folder / f"{rank}.log").read_text()[-4000:]
            result = False, traceback.format_exc() + text
        (folder / f"{rank}.part").write_bytes(pickle.dumps(result))
        (folder / f"{rank}.part").rename(folder / str(rank))
        ending = time.monotonic() + 20
        while rank == 0 and time.monotonic() < ending:  # it has the job's store
            if all((folder / str(other)).exists() for other in range(world)):
                break
            time.sleep(0.02)
    finally:
        os._exit(0)


# What ranks do.


def trainer_for(folder, steps, checkpoint, loader=None, **parallelism):
    """A trainer that keeps its losses, and does not sleep at its end."""
    import torchtitan.trainer

    from examples import torchtitan_train as example

    torchtitan.trainer.time = types.SimpleNamespace(sleep=lambda _: None, perf_counter=time.perf_counter)
    config = example.make_config(str(folder), steps, checkpoint)
    if loader is not None:
        config.dataloader = loader
    for name, value in parallelism.items():
        setattr(config.training if name == "local_batch_size" else config.parallelism, name, value)
    trainer = example.build(config)
    trainer.losses = {}

    def log(step, loss, *_, **__):
        trainer.losses[step] = loss

    trainer.metrics_processor.log = log
    return trainer


if __name__ == "__main__":
    _serve()
