"""What planning a checkpoint costs as the cluster grows: Milepost beside torch.distributed.checkpoint (DCP).

Jobs of 64 to 16,384 ranks and 1,000 tensors: FSDP (one axis shards), HSDP (one axis replicates, one shards) and 3-D (8
pipeline stages with their own keys, each sharded by data and tensor parallelism). Seconds are CPU seconds of one
thread. Each figure is the median over rounds, in which all cases take turns, with [min..max] beside it. No cache is
kept from one measurement to the next. No tensor data is written.

Milepost, one rank: it describes its state, plans, and lists the entries that it writes. The coordinator also
does its part in the meetings of a real `milepost.save`. That save runs the real protocol: the coordinator and two ranks
of each group of equal ranks are threads, and the second of the two stands in for all other ranks of its group. Every
message is counted as often as it would be sent, once when it is pinned to the board and once when it is read. (The
count is checked against real threads for all ranks.) For later saves with the same plans the figure of the coordinator
is its meetings alone, without describing its state again.

DCP, rank 0: its own planner and its own records for a plain FSDP job, without a process group. It unpickles the
gathered plans, runs `create_global_plan` (dedup, metadata, validation), pickles what is scattered, unpickles the
gathered results, and makes and pickles the metadata. Left out, in DCP's favour: the local plans, the pickling for the
last broadcast, and the network.
"""

import argparse
import json
import multiprocessing
import os
import platform
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from planning_jobs import (
    BAR_WORLD,
    FSDP,
    FULL,
    KINDS,
    LONG_PIPELINE,
    PIPELINE,
    QUICK,
    TINY,
    DcpSize,
    Job,
    Sizes,
)
from planning_measure import (
    lead_memory,
    measure_dcp,
    measure_manifest,
    measure_milepost,
    real_bytes,
    save_twice,
)
from planning_show import Results, bars_table, comparison, draw, messages_table, milepost_table, rows_of


def in_new_process(action: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of these modules in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(action, *arguments).result()


def measure(sizes: Sizes) -> Results:
    """All rounds. The cases of each round run in a different order."""
    results, count = Results(sizes), sizes.tensors
    # Not measured: these two import and compile what the rest needs.
    measure_milepost(Job(PIPELINE, 64, 16), also_save=True)
    measure_manifest(64, 16)

    def milepost_case(kind: str, world: int, also_save: bool) -> None:
        results.milepost[kind, world].add(measure_milepost(Job(kind, world, count), also_save))

    def manifest_case(world: int) -> None:
        results.manifest[world].add(measure_manifest(world, count))

    def dcp_case(size: DcpSize) -> None:
        results.dcp[size].add(in_new_process(measure_dcp, size.world, size.tensors))

    for turn in range(sizes.rounds):
        cases: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            (milepost_case, (kind, world, turn < sizes.save_rounds and kind != LONG_PIPELINE))
            for kind in KINDS
            for world in sizes.worlds
        ]
        cases += [(manifest_case, (world,)) for world in sizes.worlds]
        cases += [(dcp_case, (size,)) for size in sizes.dcp if turn < size.rounds]
        random.Random(turn).shuffle(cases)
        for case, arguments in cases:
            case(*arguments)
    results.by_step = save_twice(Job(FSDP, BAR_WORLD, count)).bytes_by_step
    for world in sizes.real_worlds:
        job = Job(FSDP, world, sizes.real_tensors)
        results.real[world] = (real_bytes(job), save_twice(job).bytes)
    results.memory_bytes = in_new_process(lead_memory, max(sizes.worlds), count)
    return results


def _load() -> str:
    return "load average " + ", ".join(f"{n:.1f}" for n in os.getloadavg())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="one round, fewer ranks: under a minute")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # for the tests
    parser.add_argument("--rounds", type=int, help="rounds (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as a list of rows")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="also draw the growth curves")
    return parser.parse_args()


def main() -> None:
    """Measure, print the tables, write the rows and the figure."""
    arguments = _arguments()
    sizes = TINY if arguments.tiny else QUICK if arguments.quick else FULL
    sizes = replace(sizes, rounds=arguments.rounds or sizes.rounds)
    print(__doc__.strip(), end="\n\n")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPUs", end="; ")
    print(f"{sizes.tensors} tensors, rounds: {sizes.rounds}; {_load()}", end="\n\n", flush=True)
    torch.set_num_threads(1)
    began = time.monotonic()
    results = measure(sizes)
    rows = rows_of(results)
    print(milepost_table(results), comparison(results), messages_table(results), bars_table(rows), sep="\n\n")
    print(f"\n{time.monotonic() - began:.0f} s; {_load()}")
    if arguments.quick or arguments.tiny:
        print("A quick run only shows that everything works. It is too short to judge the figures.")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if arguments.figure:
        draw(results, arguments.figure)


if __name__ == "__main__":
    main()
