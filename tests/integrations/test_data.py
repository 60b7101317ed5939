"""Data loaders go on, to the sample, on another number of ranks: torchdata over samplers, Hugging Face streams."""

import collections
import random
import signal
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import datasets
import datasets.distributed
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import milepost
from milepost.integrations.data import Loader, split_dataset_by_node
from milepost.integrations.data.dealing import ShardRest, Stretch, deal_units, left, share
from milepost.testing import run_ranks
from tests.integrations.killing import die_in_the_next_commit
from tests.trainers import Job

FORK = {"multiprocessing_context": "fork"}
EXAMPLES = Path(__file__).parents[2] / "examples"


def identity(batch):
    return batch


def make_loader(rank, world, samples, batch=4, kind=StatefulDistributedSampler, **options):
    """A loader over the numbers below `samples`. Options of the sampler and of the loader."""
    names = ("shuffle", "seed", "drop_last")
    sampler = kind(range(samples), world, rank, **{k: options.pop(k) for k in names if k in options})
    return StatefulDataLoader(range(samples), batch, sampler=sampler, collate_fn=identity, **options)


def read(loader, batches=None):
    """The samples of the next batches, of one iteration."""
    found = []
    for number, batch in enumerate(loader, 1):
        found += batch
        if number == batches:
            break
    return found


def stage(world, where, make, batches, load=True, epoch=None):
    """One start of a job: load, read some batches on each rank, save. Gives what each rank read."""

    def work(comm):
        loader = make(comm.rank, world)
        state = {"loader": Loader(loader)}
        if load:
            milepost.load(state, where, process_group=comm)
        if epoch is not None:
            loader.sampler.set_epoch(epoch)
        found = read(loader, batches)
        milepost.save(state, where, process_group=comm)
        return found

    return run_ranks(world, work)


def flat(parts):
    return [sample for part in parts for sample in part]


@pytest.mark.parametrize("kind", [StatefulDistributedSampler, DistributedSampler])
@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_8_to_6_to_12_ranks(tmp_path, kind, shuffle):
    """480 samples: 96 by 8 ranks, 120 by 6 with other batches, the rest by 12; the next epoch is torch's own."""
    settings = {"kind": kind, "shuffle": shuffle, "seed": 3}

    def of(batch, **more):
        return lambda rank, world: make_loader(rank, world, 480, batch, **settings, **more)

    seen = flat(stage(8, tmp_path / "a", of(4), 3, load=False, epoch=5))
    assert len(seen) == 96
    seen += flat(stage(6, tmp_path / "a", of(5), 4, epoch=5))
    assert len(seen) == 96 + 120

    def finish(comm):
        loader = of(4)(comm.rank, 12)
        state = {"loader": Loader(loader)}
        milepost.load(state, tmp_path / "a", process_group=comm)
        assert state["loader"].epoch == 5
        rest = read(loader)
        assert state["loader"].epoch == 6
        loader.sampler.set_epoch(6)
        plain = make_loader(comm.rank, 12, 480, 4, **settings)
        plain.sampler.set_epoch(6)
        assert read(loader) == read(plain)
        return rest

    rest = run_ranks(12, finish)
    assert {len(part) for part in rest} == {264 // 12}
    assert sorted(seen + flat(rest)) == list(range(480))


def ragged(comm, where, make, load, ahead):
    """One start in which ranks read different numbers of batches, some of them none."""
    loader = make(comm.rank)
    state = {"loader": Loader(loader)}
    if load:
        milepost.load(state, where, process_group=comm)
    found = [] if ahead[comm.rank] == 0 else read(loader, ahead[comm.rank])
    milepost.save(state, where, process_group=comm)
    return found


def test_random_jobs_lose_and_repeat_nothing(tmp_path):
    """Jobs of random sizes, batches and speeds. What does not divide is padded or dropped at the end."""
    chance = random.Random(15)
    for trial in range(25):
        samples, drop = chance.randrange(1, 200), chance.random() < 0.5
        counts, worlds = collections.Counter(), [chance.choice([1, 2, 3, 4, 5]) for _ in range(3)]
        for number, world in enumerate(worlds):
            batch, last = chance.choice([1, 2, 3, 7]), number == len(worlds) - 1
            ahead = [None if last else chance.randrange(4) for _ in range(world)]  # ranks need not be in step

            make = partial(make_loader, world=world, samples=samples, batch=batch, drop_last=drop)
            work = partial(ragged, where=tmp_path / f"{trial}", make=make, load=number > 0, ahead=ahead)
            counts.update(flat(run_ranks(world, work)))
        # Nothing is read twice but the padding of the last stretches, and nothing left out but what is dropped there.
        assert len(counts) >= samples - (worlds[-1] - 1 if drop else 0), (trial, samples, worlds)
        assert counts.total() - len(counts) <= (0 if drop else sum(world - 1 for world in worlds)), (trial, worlds)


def test_a_loader_that_drops_its_last_batch(tmp_path):
    """The loader's own drop_last, with the sampler's and without: only the last stretch drops, less than a batch."""
    for trial, (drop, batch, last) in enumerate([(True, 3, 5), (False, 3, 5), (True, 2, 7), (False, 4, 4)]):

        def make(rank, world, size, drop=drop):
            sampler = StatefulDistributedSampler(range(101), world, rank, drop_last=drop)
            return StatefulDataLoader(range(101), size, sampler=sampler, collate_fn=identity, drop_last=True)

        counts = collections.Counter()
        for world, size, batches in ((3, batch, 4), (2, batch + 1, 3), (4, last, None)):
            parts = stage(world, tmp_path / f"{trial}", lambda r, w, s=size: make(r, w, s), batches, load=world != 3)
            counts.update(flat(parts))
        assert len(counts) >= 101 - 4 * (last - 1) - (3 if drop else 0), trial
        assert counts.total() - len(counts) <= (0 if drop else 3), trial


def test_the_shares_are_those_of_the_sampler():
    for samples in range(1, 40):
        for world in (1, 2, 3, 5, 8):
            for drop in (False, True):
                order = torch.randperm(samples, generator=torch.Generator().manual_seed(9)).numpy()
                for rank in range(world):
                    sampler = DistributedSampler(range(samples), world, rank, seed=9, drop_last=drop)
                    assert share(order, world, rank, drop_last=drop).tolist() == list(sampler)


def test_many_ranks_make_a_small_record():
    assert Stretch(10_000, True, (7,) * 10_000).packed() == [10_000, True, 7]
    uneven = Stretch(3, False, (1, 2, 1))
    assert Stretch.unpacked(uneven.packed()) == uneven
    assert left(torch.arange(9).numpy(), uneven).tolist() == [3, 5, 6, 7, 8]


def test_the_same_ranks_with_other_data_ranks(tmp_path):
    """4 ranks, pairs of which read the same samples; then each reads its own."""

    def save(comm):
        loader = make_loader(comm.rank // 2, 2, 48)
        found = read(loader, 2)
        milepost.save({"loader": Loader(loader)}, tmp_path / "a", process_group=comm)  # made in the middle of an epoch
        return found

    def load(comm):
        loader = make_loader(comm.rank, 4, 48)
        milepost.load({"loader": Loader(loader)}, tmp_path / "a", process_group=comm)
        return read(loader)

    first = run_ranks(4, save)
    assert first[0] == first[1]
    assert sorted([*first[0], *first[2], *flat(run_ranks(4, load))]) == list(range(48))


def test_a_save_at_the_end_of_an_epoch(tmp_path):
    """The last batch was given but the end not seen: nothing is left. The end was seen: the next epoch begins."""

    def work(comm, batches, world, load):
        loader = make_loader(comm.rank, world, 24)
        state = {"loader": Loader(loader)}
        if load:
            milepost.load(state, tmp_path / f"{batches}", process_group=comm)
            epoch = state["loader"].epoch
            milepost.save(state, tmp_path / "again", process_group=comm)
            milepost.load(state, tmp_path / "again", process_group=comm)
            assert state["loader"].epoch == epoch
            loader.sampler.set_epoch(epoch)
            return epoch, read(loader), read(loader)
        read(loader, batches)
        milepost.save(state, tmp_path / f"{batches}", process_group=comm)
        return None

    for batches, epoch, rest in ((3, 0, 0), (None, 1, 24)):
        run_ranks(2, lambda comm, b=batches: work(comm, b, 2, load=False))
        for world in (2, 3):
            found = run_ranks(world, lambda comm, b=batches, w=world: work(comm, b, w, load=True))
            assert {one for one, _, _ in found} == {epoch}
            assert len(flat(part for _, part, _ in found)) == rest
            assert sorted(flat(part for _, _, part in found)) == list(range(24))


def test_the_rest_of_another_epoch_is_not_lost_silently(tmp_path):
    loader = make_loader(0, 1, 24)
    state = {"loader": Loader(loader)}
    loader.sampler.set_epoch(2)
    begun = read(loader, 1)
    milepost.save(state, tmp_path / "a")
    milepost.load(state, tmp_path / "a")
    loader.sampler.set_epoch(3)
    with pytest.raises(milepost.InvalidState, match="in the middle of epoch 2, and the sampler is set to epoch 3"):
        read(loader)
    loader.sampler.set_epoch(2)
    assert sorted(begun + read(loader)) == list(range(24))


def read_with_workers(trainer, where, batches, load):
    loader = make_loader(trainer.rank, trainer.world, 72, 4, num_workers=2, snapshot_every_n_steps=3, **FORK)
    state = {"loader": Loader(loader)}
    if load:
        milepost.load(state, where)
    found = read(loader, batches)
    milepost.save(state, where)
    return found


def read_stream_with_workers(trainer, where, batches, load):
    stream = split_dataset_by_node(numbers(72, 5).map(doubled, batched=True, batch_size=4), trainer.rank, trainer.world)
    loader = StatefulDataLoader(stream, 3, collate_fn=identity, num_workers=2, persistent_workers=True, **FORK)
    state = {"loader": Loader(loader)}
    if load:
        milepost.load(state, where)
    found = [row["n"] for row in read(loader, batches)]
    milepost.save(state, where)
    if batches is None:  # the rest was read; the next epoch is whole
        assert state["loader"].epoch == 1
        stream.set_epoch(1)
        return found, [row["n"] for row in read(loader)]
    return found


def is_killed_in_a_save(trainer, work, where, folder):
    die_in_the_next_commit(trainer.rank, folder)
    work(trainer, where, 2, True)


@pytest.mark.parametrize("work", [read_with_workers, read_stream_with_workers])
def test_workers_that_prefetch_in_real_ranks(tmp_path, work):
    where = str(tmp_path / "a")
    with Job(2) as job:
        first = flat(job.call(work, where, 4, False))
        job.send(is_killed_in_a_save, work, where, tmp_path)  # what it read is in no checkpoint, and read again
        for process in job.processes:
            process.join(60)
            assert process.exitcode == -signal.SIGKILL
    rest = work(SimpleNamespace(rank=0, world=1), where, None, True)
    wanted = list(range(72))
    if work is read_stream_with_workers:
        rest, epoch = rest
        wanted = list(range(0, 144, 2))
        assert sorted(epoch) == wanted
    assert len(first) == 2 * 4 * (3 if work is read_stream_with_workers else 4)
    assert sorted(first + rest) == wanted


def numbers(samples, shards):
    return datasets.Dataset.from_dict({"n": list(range(samples))}).to_iterable_dataset(num_shards=shards)


def doubled(batch):
    return {"n": [2 * n for n in batch["n"]]}


@pytest.mark.parametrize("shards", [24, 7, 2])
def test_streams_8_to_6_to_12_ranks(tmp_path, shards):
    """Shards that divide, shards that do not, and fewer shards than ranks; with another order of shards."""

    def work(comm, world, examples, load):
        dataset = numbers(240, shards).filter(lambda row: row["n"] != 99)
        stream = split_dataset_by_node(dataset, comm.rank, world, shuffle_shards=True, seed=2)
        state = {"stream": Loader(stream)}
        if load:
            milepost.load(state, tmp_path / "a", process_group=comm)
            assert stream.epoch == 4
        stream.set_epoch(4)
        found = [int(row["n"]) for row in islice(stream, examples)]
        milepost.save(state, tmp_path / "a", process_group=comm)
        return found

    seen = flat(run_ranks(8, lambda comm: work(comm, 8, 7, load=False)))
    assert len(seen) == 56
    seen += flat(run_ranks(6, lambda comm: work(comm, 6, 9, load=True)))
    assert len(seen) == 56 + 54
    rest = run_ranks(12, lambda comm: work(comm, 12, 10**6, load=True))
    assert all(rest)
    assert sorted(seen + flat(rest)) == [n for n in range(240) if n != 99]


def generated(shards):
    for shard in shards:
        yield from ({"n": n} for n in range(10 * shard, 10 * shard + 10))


def both(**options):
    """Two sources that are mixed at random."""
    more = datasets.IterableDataset.from_generator(generated, gen_kwargs={"shards": [5, 6, 7, 8]})
    return datasets.interleave_datasets([numbers(50, 4), more], stopping_strategy="all_exhausted", **options)


PIPELINES = {
    "map": numbers(90, 4).map(lambda row: {"n": row["n"]}),
    "batches": numbers(90, 4).map(lambda batch: {"n": batch["n"] * 2}, batched=True, batch_size=7).batch(3),
    "filter": numbers(90, 4).filter(lambda row: row["n"] % 3 == 0).rename_column("n", "m"),
    "generator": datasets.IterableDataset.from_generator(generated, gen_kwargs={"shards": list(range(9))}),
    "buffer": numbers(90, 4).shuffle(seed=3, buffer_size=8),
    "mixture": both(probabilities=[0.3, 0.7], seed=3),
    "tensors": numbers(90, 4).with_format("torch"),
    "tables": numbers(90, 4).with_format("arrow").map(lambda table: table, batched=True, batch_size=7),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_every_pipeline_of_a_stream_is_exact(tmp_path, name):
    """The `state_dict` of `datasets` 4.7 skips examples of several of these; positions of Milepost do not."""

    def work(comm, world, examples, load):
        stream = split_dataset_by_node(PIPELINES[name], comm.rank, world)
        state = {"stream": Loader(stream)}
        if load:
            milepost.load(state, tmp_path / "a", process_group=comm)
        stream.set_epoch(1)
        found = [str(row) for row in islice(stream, examples)]
        milepost.save(state, tmp_path / "a", process_group=comm)
        return found

    [whole] = run_ranks(1, lambda comm: work(comm, 1, 10**6, load=False))
    found = flat(run_ranks(3, lambda comm: work(comm, 3, 3, load=False)))
    found += flat(run_ranks(2, lambda comm: work(comm, 2, 4, load=True)))
    found += flat(run_ranks(2, lambda comm: work(comm, 2, 10**6, load=True)))
    assert sorted(found) == sorted(whole)


def test_an_order_that_nobody_can_repeat_is_refused(tmp_path):
    for make in (lambda: numbers(90, 4).shuffle(), lambda: both(probabilities=[0.3, 0.7])):
        state = {"stream": Loader(split_dataset_by_node(make(), 0, 1))}
        next(iter(state["stream"].value._stream))
        milepost.save(state, tmp_path / "a")
        state = {"stream": Loader(split_dataset_by_node(make(), 0, 1))}
        with pytest.raises(milepost.InvalidState, match="Give a seed, the same on all ranks"):
            milepost.load(state, tmp_path / "a")


def test_units_split_without_loss():
    unit = ShardRest(0, 3, 2)
    wanted = list(range(100))[unit.skip :: unit.step]
    parts = [list(range(100))[p.skip :: p.step] for split in unit.split(3) for p in split.split(2)]
    assert sorted(flat(parts)) == wanted
    assert [len(part) for part in deal_units([ShardRest(shard) for shard in range(10)], 4)] == [4] * 4


class OwnSampler(DistributedSampler):
    def __iter__(self):
        return reversed(list(super().__iter__()))


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Remembers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: DataLoader(range(4)), "takes torchdata's StatefulDataLoader, not DataLoader"),
        (lambda: StatefulDataLoader(range(4), shuffle=True), "order in which RandomSampler gives samples is not known"),
        (lambda: make_loader(0, 1, 4, kind=OwnSampler), "order in which OwnSampler gives"),
        (lambda: make_loader(0, 1, 4, num_workers=1, in_order=False), "prefetched batches in any order"),
        (lambda: StatefulDataLoader(Endless()), "samples of Endless that a rank read cannot be named"),
        (lambda: StatefulDataLoader(numbers(4, 2)), "milepost.integrations.data.split_dataset_by_node"),
        (
            lambda: StatefulDataLoader(Remembers(), sampler=DistributedSampler(range(4), 1, 0)),
            "Remembers has a state of its own",
        ),
        (
            lambda: StatefulDataLoader(
                range(4), batch_sampler=torch.utils.data.BatchSampler(DistributedSampler(range(4), 1, 0), 2, False)
            ),
            "Pass `batch_size` and `sampler`",
        ),
        (
            lambda: split_dataset_by_node(datasets.distributed.split_dataset_by_node(numbers(8, 2), 0, 2), 0, 2),
            "the dataset before the split",
        ),
        (lambda: split_dataset_by_node(range(4), 0, 1), "not range"),
    ],
)
def test_what_cannot_be_exact_is_refused(make, reason):
    with pytest.raises(milepost.InvalidState, match=reason):
        Loader(make())


def test_positions_that_do_not_belong_are_refused(tmp_path):
    def save(comm, epoch=0, seed=0):
        loader = make_loader(comm.rank, 2, 24, seed=seed)
        loader.sampler.set_epoch(epoch)
        state = {"loader": Loader(loader)}
        read(loader, 1)
        milepost.save(state, tmp_path / "a", process_group=comm)

    def load(world, samples=24):
        def work(comm):
            loader = make_loader(comm.rank, world, samples)
            milepost.load({"loader": Loader(loader)}, tmp_path / "a", process_group=comm)

        run_ranks(world, work)

    run_ranks(2, save)
    with pytest.raises(milepost.CheckpointError, match=r"had 24 samples when .* has 25 now"):
        load(2, 25)
    with pytest.raises(milepost.CheckpointError, match="not the position of a stream"):
        milepost.load({"loader": Loader(split_dataset_by_node(numbers(8, 2), 0, 1))}, tmp_path / "a")
    run_ranks(2, lambda comm: save(comm, epoch=comm.rank))
    with pytest.raises(milepost.CheckpointError, match=r"different epochs of the loader: \[0, 1\]"):
        load(3)
    run_ranks(2, lambda comm: save(comm, seed=comm.rank))
    with pytest.raises(milepost.CheckpointError, match="differed in seed"):
        load(3)


def test_the_example_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "data.py", tmp_path], capture_output=True, text=True, timeout=150, check=True
    )
    assert "0 skipped, 0 repeated" in done.stdout
