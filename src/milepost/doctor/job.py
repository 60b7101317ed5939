"""The ranks of the job that this process was started in, without a process group."""

import contextlib
import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from milepost.comm import BoardComm
from milepost.comm.distributed import TorchBoard
from milepost.errors import InvalidRequest, RanksMissing

_PART_S = 2.0


class LaunchedRanks:
    """The ranks of a job that `torchrun` started, or anything else that sets RANK, WORLD_SIZE and the master's address.

    `with LaunchedRanks(timeout_s) as comm:`. At the end, a rank that keeps the job's store waits for the others. Raises
    InvalidRequest if the environment lacks something, and RanksMissing if the store does not answer.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def __enter__(self) -> BoardComm:
        told = os.environ
        try:
            self._rank, self._world = int(told["RANK"]), int(told["WORLD_SIZE"])
            host, port = told["MASTER_ADDR"], int(told["MASTER_PORT"])
        except (KeyError, ValueError) as error:
            raise InvalidRequest(
                f"RANK and WORLD_SIZE are set, but not where the job's store is: {error}. Start it with torchrun; or "
                "unset them to look from this process alone"
            ) from error
        self._keeps = self._rank == 0 and told.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        limit = timedelta(seconds=self._timeout_s)
        kind: Any = dist.TCPStore  # type: ignore[attr-defined]  # the stubs do not list it
        try:
            # Not by torch's rendezvous, which waits for all ranks: a rank that does not come is to be named.
            self._store = kind(host, port, is_master=self._keeps, timeout=limit, wait_for_workers=False)
        except (dist.DistError, RuntimeError) as error:
            raise RanksMissing(
                f"the job's key-value store at {host}:{port} did not answer in {self._timeout_s:g} s. It lives in rank "
                f"0 or in the launcher: {str(error).rstrip('.')}"
            ) from error
        board = TorchBoard(self._store, self._world)
        self._board = board.named(f"doctor-{told.get('TORCHELASTIC_RESTART_COUNT', '0')}")
        return BoardComm(self._board, self._rank, self._world, self._timeout_s)

    def __exit__(self, *_: object) -> None:
        # After an error, too: the others must still hear of it.
        with contextlib.suppress(RanksMissing):
            self._board.count("parted")
            give_up = time.monotonic() + _PART_S
            while self._keeps and self._board.count("parted", 0) < self._world and time.monotonic() < give_up:
                time.sleep(0.02)
