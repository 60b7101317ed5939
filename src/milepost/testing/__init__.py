"""Tools for tests: ranks as threads that fail or stall, stores that die, lose power or lose replies, and a simulator.

Milepost's own tests use them. The simulator answers "will my 512 -> 384 resume work, and what will it read?" in one
process, without data.
"""

from milepost.core.table import TensorRow
from milepost.testing.ranks import TroubledComm, run_ranks
from milepost.testing.simulate import (
    SimulatedLoad,
    SimulatedSave,
    SimulatedSwap,
    on_mesh,
    simulate_load,
    simulate_save,
    simulate_swap,
)
from milepost.testing.stores import CountingStore, Crash, CrashingStore, LateStore, ReplyLosingStore
from milepost.testing.unsynced import UnsyncedStore

__all__ = [
    "CountingStore",
    "Crash",
    "CrashingStore",
    "LateStore",
    "ReplyLosingStore",
    "SimulatedLoad",
    "SimulatedSave",
    "SimulatedSwap",
    "TensorRow",
    "TroubledComm",
    "UnsyncedStore",
    "on_mesh",
    "run_ranks",
    "simulate_load",
    "simulate_save",
    "simulate_swap",
]
