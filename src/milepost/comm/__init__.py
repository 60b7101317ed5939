"""The ranks of a job: one port (`Comm`), and the one place where an error on a rank becomes an error on all."""

from milepost.comm.base import Comm, Solo
from milepost.comm.board import Board, BoardComm, MemoryBoard
from milepost.comm.together import together

__all__ = ["Board", "BoardComm", "Comm", "MemoryBoard", "Solo", "together"]
