"""One rank of the demo: the job of `train.py`, with digests of the state, and a rank that dies in the middle of a save.

The digests let the demo show that the loaded state is, bit for bit, the saved one. The death is real: SIGKILL from
inside a call to the store, so nothing in this process can tidy up.
"""

import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import train
from torch.distributed.tensor import DTensor

from milepost import Store
from milepost.store import LocalStore
from milepost.testing import CountingStore


@dataclass(frozen=True, slots=True)
class Death:
    """The rank that dies, the step whose save it dies in, and the call to its store before which it dies.

    `call` and `times` are, for example, the third "write"; `words` describe it in the output.
    """

    rank: int
    step: int
    call: str
    times: int
    words: str


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks of one start of the job do."""

    run: Path
    steps: int
    save_every: int
    death: Death | None


def run_rank(job: Job, environment: dict[str, str], log: Path) -> None:
    """Run one rank of `train.py`, with what the demo adds, in this process. The process ends with its parent."""
    end_with_parent()
    os.environ.update(environment)
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    dist.init_process_group("gloo")
    state = train.make_state(job.steps)
    resumed = train.resume(state, job.run)
    if resumed is not None:
        train.say(f"loaded {resumed.name}  digest {digest(state)}")

    def place(run: Path, step: int) -> Store | Path:
        path = train.checkpoint_at(run, step)
        if job.death and step == job.death.step - job.save_every:
            # The next start will resume from this checkpoint.
            train.say(f"saving {path.name}  digest {digest(state)}")
        if job.death and (job.death.rank, job.death.step) == (dist.get_rank(), step):
            return DeadlyStore(LocalStore(path), job.death)
        return path

    train.train(state, job.run, job.steps, job.save_every, place)
    dist.destroy_process_group()


def end_with_parent() -> None:
    """End this process when its parent process ends, for any reason."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


class DeadlyStore(CountingStore):
    """A store that kills this process at the call that `death` names."""

    def __init__(self, inner: Store, death: Death) -> None:
        super().__init__(inner)
        self._call, self._left = death.call, death.times

    def before(self, number: int, call: str) -> None:
        """Kill the process if this is the call."""
        del number
        self._left -= call.split(maxsplit=1)[0] == self._call
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...


def digest(state: Any) -> str:
    """A hash over everything in a state: whole tensors, values and keys.

    It is the same for a state that is sharded over ranks and for one that `milepost.open(...).state()` read in one
    process. A collective if tensors are sharded.
    """
    if isinstance(state["optim"], torch.optim.Optimizer):
        state = {**state, "optim": _by_name(state["model"], state["optim"])}
    result = hashlib.sha256()
    _add(result, state)
    return result.hexdigest()


def _by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer as a checkpoint holds it: under the names of its parameters."""
    names = {parameter: f"model.{name}" for name, parameter in model.named_parameters()}
    groups = {}
    for group in optimizer.param_groups:
        held = [names[parameter] for parameter in group["params"]]
        groups[held[0]] = {**group, "params": dict.fromkeys(held)}
    return {"state": {names[p]: kept for p, kept in optimizer.state.items()}, "param_groups": groups}


def _add(result: _Hash, value: Any) -> None:
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            result.update(f"{key!r}: ".encode())
            _add(result, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(result, item)
    elif isinstance(value, torch.Tensor):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        result.update(f"{whole.dtype} {tuple(whole.shape)}".encode())
        result.update(whole.detach().contiguous().numpy())
    else:
        result.update(repr(value).encode())
