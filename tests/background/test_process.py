"""Saves by a writing process: a staged save is finished even if the trainer is killed, and nothing is left behind."""

import os
import random
import signal
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import milepost
from tests import trainers
from tests.trainers import Job, SlowStore, Unwritable, attempt, begin, holds, open_saver, outcome, runs, save, until

SOON_S = 15.0  # far below the savers' timeout_s, with room for slow machines


@pytest.fixture(scope="module")
def alone():
    """A trainer of one rank whose writing process is up. For tests that leave it so."""
    with Job(1) as job:
        job.call(open_saver)
        yield job


@pytest.fixture(scope="module")
def four():
    """Four ranks whose writing processes are up. For tests that leave them so."""
    with Job(4) as job:
        job.call(open_saver)
        yield job


@pytest.fixture(scope="module")
def pair():
    """Two ranks, for tests that end their writing processes; the next save starts others."""
    with Job(2) as job:
        job.call(open_saver)
        yield job


# Trainers that are killed.


def kill_trial(folder, world, victims, moment_s, prewarmed):
    """Kill ranks that save in a loop, some time after they began. Gives how many places are whole, and how many not.

    Fails unless each place holds a whole checkpoint or none, and all that every rank had staged are there.
    """
    with Job(world) as job:
        job.send(trainers.keep_saving, str(folder), prewarmed)
        for rank in range(world):
            while not job.said[rank]:
                job.hear(rank)
        time.sleep(moment_s)
        job.kill(*victims)
        for rank in set(range(world)) - set(victims):
            kind, text = job.answer(rank, SOON_S)
            assert kind in ("WriterDied", "RanksMissing"), text
            assert any(f"rank {victim}" in text for victim in victims), text
            job.kill(rank)
        assert job.writers_end(), "a writing process outlives its work"
        staged = min(last_staged(job, rank) for rank in range(world))
        found = {int(place.name): holds(place) for place in Path(folder).iterdir()}
        assert all(there in (number, None) for number, there in found.items()), found
        # The first save starts the process, unless it is prewarmed: the state is staged before the process is up.
        promised = range(1 if prewarmed else 2, staged + 1)
        assert [found.get(number) for number in promised] == list(promised)
        whole = sum(there is not None for there in found.values())
        return whole, len(found) - whole


def last_staged(job, rank):
    """The last save that a rank, dead by now, has said to be staged."""
    said = job.hear_all(rank)
    return max((number for number in said if number != "up"), default=0)


def kill_trials(folder, trials, at_once=2):
    """Run (world, victims, moment, prewarmed) each. Gives the sums of what is whole and what is not."""
    with ThreadPoolExecutor(at_once) as pool:
        jobs = []
        for i, trial in enumerate(trials):
            place = Path(folder, str(i))
            place.mkdir()
            jobs.append(pool.submit(kill_trial, place, *trial))
        counts = [job.result() for job in jobs]
    return sum(whole for whole, _ in counts), sum(unfinished for _, unfinished in counts)


@pytest.mark.slow
def test_trainer_sigkill_keeps_staged_saves(tmp_path):
    chance = random.Random(11)
    warm = [(1, (0,), chance.uniform(0.0, 0.2), True) for _ in range(21)]
    # While the process starts: it does not yet know that there is a trainer.
    cold = [(1, (0,), chance.uniform(0.0, 3.0), False) for _ in range(5)]
    whole, _ = kill_trials(tmp_path, warm + cold, at_once=3)
    assert whole > 20, "some saves went through"


@pytest.mark.slow
def test_sigkill_of_four_ranks_keeps_staged_saves(tmp_path):
    # The store of the job is in rank 0: the writing processes must not need it.
    chance = random.Random(12)
    trials = [(4, (0, 1, 2, 3), chance.uniform(0.0, 0.4), True) for _ in range(2)]
    whole, _ = kill_trials(tmp_path, trials)
    assert whole > 0, "some saves went through"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_name_a_killed_rank_and_go_on(tmp_path, victim):
    kill_trial(tmp_path, 3, (victim,), random.Random(victim).uniform(0.0, 0.4), True)


@pytest.mark.slow
def test_processes_finish_the_save_of_killed_ranks_and_end(tmp_path):
    with Job(2) as job:
        job.call(open_saver)
        writers = job.call(begin, SlowStore(tmp_path / "a", 0.5), 7)
        job.kill()
        assert holds(tmp_path / "a") is None, "killed in the middle of writing"
        assert all(map(runs, writers))
        assert until(lambda: holds(tmp_path / "a") == 7, SOON_S)
        assert until(lambda: not any(map(runs, writers)), SOON_S)


def forking(trainer, where):
    """Begin to save, with a child that holds all that this process has open and never ends by itself."""
    child = os.fork()
    if child == 0:
        time.sleep(trainers.LIMIT_S)
        os._exit(0)
    trainer.say(child)
    # As if killed in the middle of an order: the rest of it will never come.
    begin(trainer, where)
    os.write(trainer.saver._engine.processes.writers.link._connection.fileno(), b"\0\0\1\0half")


@pytest.mark.slow
def test_process_ends_though_children_hold_the_connection(tmp_path):
    with Job(1) as job:
        job.call(open_saver)
        job.call(forking, SlowStore(tmp_path / "a", 0.1))
        (child,) = job.said[0]
        job.kill()
        try:
            assert job.writers_end(SOON_S)
            assert runs(child)
        finally:
            os.kill(child, signal.SIGKILL)
    assert holds(tmp_path / "a") == 1


def lead_group(trainer):
    os.setpgrp()
    return open_saver(trainer)


@pytest.mark.slow
def test_group_signals_do_not_stop_the_writing(tmp_path):
    with Job(1) as job:
        job.call(lead_group)
        (writer,) = job.call(begin, SlowStore(tmp_path / "a", 0.5))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(writer, number)
        os.killpg(job.pids[0], signal.SIGKILL)
        job.processes[0].join()
        assert holds(tmp_path / "a") is None, "killed in the middle of writing"
        assert job.writers_end(SOON_S)
    assert holds(tmp_path / "a") == 1


# Trainers that end.


def end_by(trainer, way, where):
    begin(trainer, where)
    if way == "close":
        trainer.saver.close()
    elif way == "os._exit":
        os._exit(0)
    else:
        sys.exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["close", "sys.exit", "os._exit"])
def test_the_process_ends_when_its_trainer_does_and_after_its_work(tmp_path, way):
    with Job(1) as job:
        job.call(open_saver)
        job.send(end_by, way, SlowStore(tmp_path / "a", 0.1))
        assert job.writers_end(SOON_S)
    assert holds(tmp_path / "a") == 1


@pytest.mark.slow
def test_a_script_that_forgets_its_saver_ends_and_so_does_the_process(tmp_path):
    # In a folder with modules of the same names as those that the process imports: it must find the trainer's.
    (tmp_path / "queue.py").write_text("raise RuntimeError\n")
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts/train.py"
    script.write_text(
        "import milepost, os, torch\n"
        "saver = milepost.AsyncSaver(background='process')\n"
        "state = {'cut': torch.ones(3), 'large': torch.ones(3), 'n': 1}\n"
        "saver.save(state, 'a')\n"
        "print(os.getpid())\n"
    )
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert until(lambda: not trainers.writers_of(int(done.stdout)), SOON_S)
    assert holds(tmp_path / "a") == 1


# Writing processes that are killed.


def assert_told(answers, victim):
    """Every rank heard, soon, that this rank's writing process is gone."""
    for rank, (error, took_s) in enumerate(answers):
        kind, text = error
        assert kind == "WriterDied", text
        assert rank == victim or f"rank {victim}" in text
        assert took_s < SOON_S


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_process_killed_during_a_save_is_named_on_all_ranks(tmp_path, pair, victim):
    writers = pair.call(begin, SlowStore(tmp_path / "a", 0.5))
    os.kill(writers[victim], signal.SIGKILL)
    assert_told(pair.call(outcome), victim)
    assert holds(tmp_path / "a") is None
    pair.call(save, tmp_path / "b", 2)
    assert holds(tmp_path / "b") == 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_process_killed_between_saves_is_named_by_the_next_save(tmp_path, pair, victim):
    writers = pair.call(begin, tmp_path / "a")
    assert [error for error, _ in pair.call(outcome)] == [None, None]
    os.kill(writers[victim], signal.SIGKILL)
    assert until(lambda: not runs(writers[victim]), SOON_S)
    time.sleep(0.2)  # its other threads end too, and the connection is closed: the trainer cannot even send the order
    assert_told(pair.call(attempt, tmp_path / "b"), victim)
    assert not [pid for pid in writers if runs(pid)]
    pair.call(save, tmp_path / "c", 3)
    assert holds(tmp_path / "c") == 3


# The process as others see it.


@pytest.mark.slow
def test_the_process_steps_back_has_no_gpu_and_is_in_a_session_of_its_own(alone):
    (writer,) = alone.writers()
    assert os.getpriority(os.PRIO_PROCESS, writer) == min(os.getpriority(os.PRIO_PROCESS, alone.pids[0]) + 10, 19)
    assert b"CUDA_VISIBLE_DEVICES=" in Path(f"/proc/{writer}/environ").read_bytes().split(b"\0")
    assert os.getsid(writer) == writer != os.getsid(alone.pids[0])


@pytest.mark.slow
def test_there_is_one_process_however_many_saves(tmp_path, alone):
    before = alone.writers()
    for number in range(3):
        alone.call(save, tmp_path / "a", number)
        assert alone.writers() == before
        assert holds(tmp_path / "a") == number


def save_sizes(trainer, where, sizes):
    for size in sizes:
        trainer.saver.save({"a": torch.full((size,), 3, dtype=torch.uint8)}, where).result(60)


def footprint(pid):
    """Open files, mappings of staging memory, and KiB in memory that are the process's own."""
    maps = Path(f"/proc/{pid}/maps").read_text().count("memfd:milepost")
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return len(os.listdir(f"/proc/{pid}/fd")), maps, int(status["RssAnon"].split()[0])


@pytest.mark.slow
def test_saves_of_changing_size_leave_nothing_behind(tmp_path, alone):
    shared = set(os.listdir("/dev/shm"))
    pids = [alone.pids[0], *alone.writers()]
    mib = 1 << 20
    alone.call(save_sizes, tmp_path / "a", [8 * mib, 12 * mib, 100])
    before = [footprint(pid) for pid in pids]
    # Growing sizes, so that new memory is allocated each time, and small states in between.
    alone.call(save_sizes, tmp_path / "a", [size for i in range(13, 23) for size in (i * mib, 1000 * i)])
    after = [footprint(pid) for pid in pids]
    for (files, maps, kib), (files_after, maps_after, kib_after) in zip(before, after, strict=True):
        assert files_after <= files
        assert maps_after <= maps == 1
        assert kib_after < kib + 40 * 1024, "less than twice the state"
    assert set(os.listdir("/dev/shm")) <= shared


# Saves that cannot be done there.


class Foreign(milepost.store.LocalStore):
    """A store of a class that the process cannot import."""


def save_foreign(trainer, where, ranks):
    """Save, on some ranks to a store whose class only the trainer knows, as one from a notebook."""
    if trainer.rank in ranks:
        module = types.ModuleType("only_in_the_trainer")
        kind = type("Foreign", (Foreign,), {"__module__": module.__name__})
        module.Foreign = kind
        sys.modules[module.__name__] = module
        where = kind(where)
    return attempt(trainer, where)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0,), (3,), (0, 1, 2, 3)])
def test_store_the_process_cannot_import_fails_on_all_ranks(tmp_path, four, ranks):
    for error, took_s in four.call(save_foreign, tmp_path / "a", ranks):
        kind, text = error
        assert kind == "InvalidRequest"
        assert "only_in_the_trainer" in text
        assert 'background="thread"' in text
        assert took_s < SOON_S
    four.call(save, tmp_path / "a", 2)
    assert holds(tmp_path / "a") == 2


@pytest.mark.slow
def test_a_full_disk_is_an_error_that_says_so_and_the_process_goes_on(tmp_path, alone):
    before = alone.writers()
    (((kind, text), _),) = alone.call(attempt, Unwritable(tmp_path / "a"))
    assert kind == "StorageError"
    assert "No space left" in text
    alone.call(save, tmp_path / "a", 2)
    assert holds(tmp_path / "a") == 2
    assert alone.writers() == before


def save_with_little_memory(trainer, where, number, small):
    """Save while the memory for copies is too little on some ranks."""
    stager = trainer.saver._engine.stager
    stager._limit_bytes = 1000 if trainer.rank in small else None
    try:
        save(trainer, where, number)
    finally:
        stager._limit_bytes = None


@pytest.mark.slow
@pytest.mark.parametrize("small", [(0,), (2, 3)])
def test_trainer_writes_what_does_not_fit_in_staging(tmp_path, four, small):
    before = four.writers()
    for number in (1, 2):
        four.call(save_with_little_memory, tmp_path / "a", number, small)
        assert holds(tmp_path / "a") == number
    four.call(save, tmp_path / "a", 3)
    assert holds(tmp_path / "a") == 3
    assert four.writers() == before


@pytest.mark.slow
def test_the_ranks_whose_state_does_not_fit_may_be_others_in_each_save(tmp_path, four):
    for number, small in enumerate([(0,), (), (0, 1, 2, 3), (1,), (0, 1)]):
        four.call(save_with_little_memory, tmp_path / "a", number, small)
        assert holds(tmp_path / "a") == number


# Several ranks.


def save_in_a_row(trainer, folder, pause_s):
    """Save several times, each rank at its own speed, without waiting for one to end before the next."""
    pendings = []
    for number in range(1, 6):
        time.sleep(pause_s * trainer.rank)
        mine = trainers.state(trainer.rank, trainer.world, number)
        pendings.append(trainer.saver.save(mine, f"{folder}/{number}"))
        pendings[-1].wait_staged()
        for tensor in (mine["large"], *(part.data for part in mine["cut"].parts)):
            tensor.fill_(-1)  # what is saved is what was there
    return [pending.result(60).save_id for pending in pendings]


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", [0.0, 0.05])
def test_four_ranks_of_any_speed_save_several_times_in_a_row(tmp_path, four, pause_s):
    first, *others = four.call(save_in_a_row, tmp_path, pause_s)
    assert all(other == first for other in others)
    assert [holds(tmp_path / str(number)) for number in range(1, 6)] == [1, 2, 3, 4, 5]


def save_in_group(trainer, where, members):
    group = dist.new_group(members)
    if trainer.rank not in members:
        return None
    index = members.index(trainer.rank)
    with milepost.AsyncSaver(background="process", timeout_s=60, process_group=group) as saver:
        return saver.save(trainers.state(index, len(members), 5), where).result(60).world


@pytest.mark.slow
def test_a_subgroup_has_processes_of_its_own_beside_those_of_all_ranks(tmp_path, four):
    before = four.writers()
    assert four.call(save_in_group, tmp_path / "a", [1, 2]) == [None, 2, 2, None]
    assert holds(tmp_path / "a") == 5
    assert four.writers() == before, "those of the subgroup have ended"
    four.call(save, tmp_path / "b", 6)
    assert holds(tmp_path / "b") == 6
