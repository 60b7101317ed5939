"""A job reads an epoch with 8, then 6, then 12 ranks, and every sample exactly once.

    python examples/data.py runs/data

Each start of the job loads the checkpoint of the one before, reads some batches, and saves. The ranks are threads here,
so that the example needs no launcher; `Loader` does the same in processes. The first epoch is dealt out anew among the
ranks of each start. The next epoch is the one that a job of 12 ranks has anyway.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import milepost
from milepost.integrations.data import Loader
from milepost.testing import run_ranks

SAMPLES = 1440


def start(run: Path, world: int, batch: int, steps: int | None) -> list[list[int]]:
    """One start of the job: resume, read up to `steps` batches on each rank, save. What each rank has read."""

    def work(comm: Any) -> list[int]:
        dataset = torch.arange(SAMPLES)
        sampler = StatefulDistributedSampler(dataset, num_replicas=world, rank=comm.rank, seed=7)
        loader = StatefulDataLoader(dataset, batch_size=batch, sampler=sampler)
        state = {"loader": Loader(loader)}
        if (run / "checkpoint").exists():
            milepost.load(state, run / "checkpoint", process_group=comm)
        sampler.set_epoch(state["loader"].epoch)
        seen: list[int] = []
        for step, samples in enumerate(loader, 1):
            seen += samples.tolist()
            if step == steps:
                break
        milepost.save(state, run / "checkpoint", process_group=comm)
        return seen

    return run_ranks(world, work)


def main() -> None:
    """Three starts, and what all of them have read."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="the folder for this run's checkpoint")
    run = parser.parse_args().run
    seen: Counter[int] = Counter()
    for world, batch, steps in ((8, 10, 6), (6, 8, 5), (12, 10, None)):
        parts = start(run, world, batch, steps)
        seen.update(sample for part in parts for sample in part)
        print(f"{world:2} ranks read {sum(map(len, parts)):4} samples; {SAMPLES - len(seen):4} are left")
    print(f"{SAMPLES} samples: {SAMPLES - len(seen)} skipped, {seen.total() - len(seen)} repeated")


if __name__ == "__main__":
    main()
