"""A program that makes one incremental save with retention, and kills it before or after each of its system calls.

Started by test_incremental_kills.py in a process of its own: it forks a child for each kill.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from milepost import Checkpointer

KEYS = ("a", "b", "c")
CALLS = ("open", "mkdir", "link", "fsync", "pwrite", "pwritev", "unlink", "rmdir", "rename", "write")


def state(step):
    return {key: torch.full((5000,), float(step // (i + 1))) for i, key in enumerate(KEYS)} | {"n": step}


def check(folder):
    """The steps that are listed, each of them whole."""
    keeper = Checkpointer(folder)
    for step in keeper.steps():
        with keeper.open(step) as checkpoint:
            found = checkpoint.state()
            assert checkpoint.verify().ok
            assert found["n"] == step
            assert all(torch.equal(found[key], state(step)[key]) for key in KEYS)
    return keeper.steps()


def die_at(number, *, after):
    """Kill this process at so-many-th of the calls that may change a folder."""
    count = 0

    def counted(call):
        def counting(*given, **options):
            nonlocal count
            count = mine = count + 1
            if mine == number and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*given, **options)
            finally:
                if mine == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        return counting

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def killed(folder, number, *, after):
    """Whether a save into this folder was killed at its call of this number; False if it had no such call."""
    child = os.fork()
    if not child:
        die_at(number, after=after)
        with Checkpointer(folder, incremental=True, keep_last=2, max_waste=1) as keeper:
            keeper.save(state(4), 4)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def main(folder):
    torch.set_num_threads(1)
    with Checkpointer(folder / "prepared", incremental=True, keep_last=2, max_waste=1) as keeper:
        for step in (1, 2, 3):
            keeper.save(state(step), step)
    counts, place = [], folder / "run"
    for after in (False, True):
        number, seen, more = 1, set(), True
        while more:
            shutil.copytree(folder / "prepared", place, copy_function=os.link)
            more = killed(place, number, after=after)
            steps = check(place)
            assert 3 in steps, steps
            if tuple(steps) not in seen or number % 7 == 0:
                go_on(place)
            seen.add(tuple(steps))
            shutil.rmtree(place)
            number += more
        counts.append(number - 1)
        assert {(2, 3), (2, 3, 4), (3, 4)} == seen, seen
    print(*counts)


def go_on(place):
    """The next save finds the base, and removes what the killed one left."""
    with Checkpointer(place, incremental=True, keep_last=1, max_waste=1) as keeper:
        assert keeper.save(state(5), 5).reused_bytes
        keeper.remove_unfinished()
    assert check(place) == [5]
    left = {path.relative_to(place).parts[0] for path in place.rglob("*") if path.is_file()}
    assert left == {"step-0000000005"}, left


if __name__ == "__main__":
    main(Path(sys.argv[1]))
