"""Running a program that was written for DCP, with `dcp` being torch's module or ours."""

import importlib
import warnings
from pathlib import Path

OURS, THEIRS = "milepost.dcp", "torch.distributed.checkpoint"


def modules(name):
    """A program's `dcp`, with its submodules as attributes."""
    for module in (
        *("_checkpointer", "_nested_dict", "_sharded_tensor_utils", "default_planner", "filesystem", "format_utils"),
        *("metadata", "planner", "planner_helpers", "state_dict", "state_dict_loader", "state_dict_saver", "stateful"),
        *("storage", "utils"),
    ):
        importlib.import_module(f"{name}.{module}")
    return importlib.import_module(name)


def run(program, name, folder, rank=0):
    """What the program gives with this module, each in a folder of its own."""
    place = Path(folder) / name
    place.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        return program(modules(name), rank, place)


def run_both(rank, program, folder):
    """What a program gives on this rank: with ours, and with torch's."""
    return [run(program, name, folder, rank) for name in (OURS, THEIRS)]


def run_ours(rank, program, folder):
    return run(program, OURS, folder, rank)
