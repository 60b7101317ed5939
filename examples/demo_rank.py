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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import train
from torch.distributed.tensor import DTensor

from milepost import Store
from milepost.store import Traits, store_at
from milepost.testing import CountingStore

PART_BYTES = 1 << 20
"""In an object store, files are cut into parts of 64 MiB. Here they are smaller, so that a small model has several."""


@dataclass(frozen=True, slots=True)
class Death:
    """The rank that dies, the step whose save it dies in, and the call to its store before or after which it dies.

    `call` and `times` are, for example, the third "write"; `words` describe it in the output.
    """

    rank: int
    step: int
    call: str
    times: int
    words: str
    after: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks of one start of the job do."""

    run: str
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
        train.say(f"loaded step-{resumed:04d}  digest {digest(state)}")

    def place(run: str, step: int) -> Store:
        if job.death and step == job.death.step - job.save_every:
            # The next start will resume from this checkpoint.
            train.say(f"saving step-{step:04d}  digest {digest(state)}")
        doomed = job.death and (job.death.rank, job.death.step) == (dist.get_rank(), step)
        return DemoStore(store_at(train.checkpoint_at(run, step)), job.death if doomed else None)

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


class DemoStore(CountingStore):
    """A store that cuts files into small parts, if it cuts them at all, and kills this process as `death` says."""

    def __init__(self, inner: Store, death: Death | None) -> None:
        super().__init__(inner)
        self._death, self._left = death, death.times if death else 0

    @property
    def traits(self) -> Traits:
        """Those of the inner store, with smaller parts."""
        inner = self.inner.traits
        return replace(inner, part_bytes=min(PART_BYTES, inner.part_bytes))

    def before(self, number: int, call: str) -> None:
        """Kill the process if this is the call, and it must not take effect."""
        del number
        self._count(call, after=False)

    def after(self, number: int, call: str) -> None:
        """Kill the process if this is the call, and it took effect."""
        del number
        self._count(call, after=True)

    def _count(self, call: str, *, after: bool) -> None:
        if self._death and self._death.after == after and call.startswith(self._death.call):
            self._left -= 1
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
