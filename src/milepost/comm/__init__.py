"""The ranks of a job: one port (`Comm`), and the one place where an error on a rank becomes an error on all."""

from milepost.comm.base import TIMEOUT_S, Call, Comm, Phase, Solo
from milepost.comm.board import Board, BoardComm, MemoryBoard
from milepost.comm.together import (
    Announcement,
    Bytes,
    Deferred,
    Meeting,
    broadcast,
    defer,
    depart,
    is_undecided,
    leave_undecided,
    meet,
    together,
)

__all__ = [
    "TIMEOUT_S",
    "Announcement",
    "Board",
    "BoardComm",
    "Bytes",
    "Call",
    "Comm",
    "Deferred",
    "Meeting",
    "MemoryBoard",
    "Phase",
    "Solo",
    "broadcast",
    "defer",
    "depart",
    "is_undecided",
    "leave_undecided",
    "meet",
    "together",
]
