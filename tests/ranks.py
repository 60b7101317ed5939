"""Real ranks for tests: processes with gloo on loopback, started by the test, never left behind."""

import faulthandler
import multiprocessing as mp
import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

START_S = 120.0


class RanksFailed(AssertionError):
    """Some ranks ended with an error; the text holds their tracebacks."""


def spawn(world: int, work: Callable[..., Any], *args: Any, timeout_s: float = START_S) -> list[Any]:
    """Run `work(rank, *args)` on `world` gloo ranks and give their results. Fails with the tracebacks of all ranks."""
    outcomes = spawn_outcomes(world, work, *args, timeout_s=timeout_s)
    failed = {r: o for r, o in enumerate(outcomes) if not (o and o[0])}
    if failed:
        raise RanksFailed("\n".join(f"rank {r}: {o[1] if o else 'died'}" for r, o in failed.items()))
    return [o[1] for o in outcomes]


def spawn_outcomes(
    world: int, work: Callable[..., Any], *args: Any, timeout_s: float = START_S
) -> list[tuple[bool, Any] | None]:
    """The same, but give (True, result), (False, traceback) or None (died) for each rank."""
    context = mp.get_context("forkserver")
    # The store lives here, as it lives in the launcher of a real job: it outlives any rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(target=_run, args=(rank, world, store.port, pipes[rank][1], work, args), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    try:
        return [_outcome(receiver, timeout_s) for receiver, _ in pipes]
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


def _outcome(receiver: Any, timeout_s: float) -> tuple[bool, Any] | None:
    try:
        if not receiver.poll(timeout_s):
            return False, f"no result within {timeout_s} s"
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        return None


def _run(rank: int, world: int, port: int, sender: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    faulthandler.dump_traceback_later(START_S, exit=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    # All are connected before any works: one that has nothing to say to the others may end before they are.
    store.set(f"connected/{rank}", "yes")
    store.wait([f"connected/{other}" for other in range(world)])
    try:
        result = (True, work(rank, *args))
    except BaseException:
        result = (False, traceback.format_exc())
    sender.send_bytes(pickle.dumps(result))  # by value: torch's own way would share memory with a process that ends
    sender.close()
    # Peers may have failed, so no collective goodbye.
    os._exit(0)


def preload() -> None:
    """Import torch once in the fork server: each rank then starts in a fraction of a second."""
    mp.set_forkserver_preload(
        [
            "torch",
            "torch.distributed",
            "torch.distributed.tensor",
            "milepost.api",
            "tests.ranks",
        ]
    )
