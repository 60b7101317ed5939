"""The ranks of a job: one port (`Comm`), and the one place where an error on a rank becomes an error on all."""

from milepost.comm.base import TIMEOUT_S, Call, Comm, Phase, Solo, mark_told
from milepost.comm.board import Board, MemoryBoard
from milepost.comm.board_comm import BoardComm
from milepost.comm.channel import Channel
from milepost.comm.together import (
    Announcement,
    Bytes,
    Deferred,
    Meeting,
    broadcast,
    calling,
    defer,
    depart,
    is_undecided,
    leave_undecided,
    meet,
    note_parting,
    operating_on,
    together,
)

__all__ = [
    "TIMEOUT_S",
    "Announcement",
    "Board",
    "BoardComm",
    "Bytes",
    "Call",
    "Channel",
    "Comm",
    "Deferred",
    "Meeting",
    "MemoryBoard",
    "Phase",
    "Solo",
    "broadcast",
    "calling",
    "defer",
    "depart",
    "is_undecided",
    "leave_undecided",
    "mark_told",
    "meet",
    "note_parting",
    "operating_on",
    "together",
]
