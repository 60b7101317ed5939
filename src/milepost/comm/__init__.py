"""The ranks of a job: one port (`Comm`), and the one place where an error on a rank becomes an error on all."""

from milepost.comm.base import TIMEOUT_S, Comm, Phase, Solo
from milepost.comm.board import Board, BoardComm, MemoryBoard
from milepost.comm.together import depart, together, told

__all__ = ["TIMEOUT_S", "Board", "BoardComm", "Comm", "MemoryBoard", "Phase", "Solo", "depart", "together", "told"]
