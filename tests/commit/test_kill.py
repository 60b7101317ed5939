"""SIGKILL of real processes at random moments, in the middle of overwrites: old or new, whole, every time."""

import multiprocessing as mp
import os
import pickle
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist

import milepost
from milepost.comm import BoardComm
from milepost.comm.distributed import TorchBoard

WORLD = 3


def state(rank, number):
    return {
        "cut": milepost.Sharded((3 * 1000,), {(1000 * rank,): torch.full((1000,), float(number))}),
        "large": torch.full((1 << 18,), number, dtype=torch.int32),
        "n": number,
    }


def keep_saving(rank, port, folder, first, sender):
    """Save ever newer states to one place until killed; if a save fails, send the error and stop."""
    torch.set_num_threads(1)
    comm = BoardComm(TorchBoard(dist.TCPStore("127.0.0.1", port, is_master=False), WORLD), rank, WORLD, timeout_s=2.5)
    number = first
    sender.send_bytes(b"ready")
    try:
        while True:
            number += 1
            milepost.save(state(rank, number), folder, process_group=comm)
    except milepost.CheckpointError as error:
        sender.send_bytes(pickle.dumps((type(error).__name__, str(error))))
    os._exit(0)


def start(folder, first):
    context = mp.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(WORLD)]
    processes = [
        context.Process(target=keep_saving, args=(r, store.port, folder, first, pipes[r][1]), daemon=True)
        for r in range(WORLD)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()
    for receiver, _ in pipes:
        assert receiver.poll(60)
        assert receiver.recv_bytes() == b"ready"
    return store, processes, [receiver for receiver, _ in pipes]


def whole(folder):
    """The number that the newest checkpoint holds; fails if it is not whole."""
    with milepost.open(folder) as checkpoint:
        found = checkpoint.state()
        assert checkpoint.verify().ok
    assert (found["cut"] == found["n"]).all()
    assert (found["large"] == found["n"]).all()
    return found["n"]


def end(processes):
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.places("here", "network")
@pytest.mark.slow
def test_killing_all_ranks_at_forty_random_moments_leaves_old_or_new(tmp_path, place):
    chance = random.Random(7)
    milepost.save(state(0, 0) | {"cut": torch.zeros(3000)}, tmp_path)
    newest, unfinished = 0, 0
    wanted = 5 if place == "here" else 1
    for trial in range(40):
        if place != "here" and trial >= 6 and unfinished > wanted and newest:
            break  # elsewhere fewer will do, if they met what they are for
        store, processes, _ = start(str(tmp_path), newest)
        time.sleep(chance.uniform(0.0, 0.15))
        end(processes)
        unfinished += any(milepost.open(tmp_path).manifest.save_id not in str(p) for p in tmp_path.glob("data/*/*"))
        found = whole(tmp_path)
        assert found >= newest
        newest = found
        del store
    assert newest > 0, "some saves went through"
    assert unfinished > wanted, "and some were killed half way"


@pytest.mark.places("here", "network")
@pytest.mark.slow
def test_killing_one_rank_leaves_old_or_new_and_the_survivors_name_it(tmp_path, place):
    chance = random.Random(8)
    milepost.save(state(0, 0) | {"cut": torch.zeros(3000)}, tmp_path)
    newest = 0
    for trial in range(12 if place == "here" else 2):
        store, processes, receivers = start(str(tmp_path), newest)
        victim = trial % WORLD
        time.sleep(chance.uniform(0.0, 0.1))
        os.kill(processes[victim].pid, signal.SIGKILL)
        for rank, receiver in enumerate(receivers):
            if rank == victim:
                continue
            assert receiver.poll(30), f"rank {rank} hangs after rank {victim} died"
            kind, text = pickle.loads(receiver.recv_bytes())
            assert kind == "RanksMissing", text
            assert f"rank {victim} did not come" in text
        end(processes)
        found = whole(tmp_path)
        assert found >= newest
        newest = found
        del store
