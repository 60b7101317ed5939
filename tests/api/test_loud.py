"""An error on one rank reaches all; values and replicas that differ are reported; rank-private state is supported."""

import threading

import numpy as np
import pytest
import torch

import milepost
from milepost.comm import BoardComm, MemoryBoard
from milepost.testing import CountingStore, run_ranks


def outcomes(world, work, timeout_s=20.0):
    """What each thread rank gives or raises."""
    board = MemoryBoard()
    results = [None] * world

    def run(rank):
        try:
            results[rank] = work(BoardComm(board, rank, world, timeout_s))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class FailingStore(CountingStore):
    """Fails every call whose text contains `word`."""

    def __init__(self, inner, word):
        super().__init__(inner)
        self.word = word

    def before(self, number, call):
        if self.word in call:
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("word", ["writer data/", "write data/", "commit data/", "create manifest", "list"])
def test_error_in_any_phase_is_raised_on_every_rank(word):
    store = milepost.store.MemoryStore()
    run_ranks(3, lambda comm: milepost.save({"t": torch.ones(3)}, store, process_group=comm))
    before = dict(store.objects)
    victim = 0 if word in ("create manifest", "list") else 1

    def work(comm):
        place = FailingStore(store, word) if comm.rank == victim else store
        state = {"t": torch.zeros(3), "mine": milepost.Sharded((3,), {(comm.rank,): torch.ones(1)})}
        milepost.save(state, place, process_group=comm)

    errors = outcomes(3, work)
    assert all(isinstance(e, milepost.CheckpointError) for e in errors), errors
    assert all(list(e.failures) == [victim] for e in errors)
    assert all("No space left" in str(e) and f"rank {victim}" in str(e) for e in errors)
    assert errors[victim].__cause__ is not None
    assert "Traceback" in errors[0].failures[victim].traceback
    assert store.objects == before, "nothing of the failed save remains"
    run_ranks(3, lambda comm: milepost.save({"t": torch.zeros(3)}, store, process_group=comm))
    assert milepost.open(store)["t"].read().tolist() == [0, 0, 0], "the next save works"


@pytest.mark.parametrize("victim", [0, 1])
def test_interrupt_while_describing_does_not_mix_two_saves(victim):
    store = milepost.store.MemoryStore()

    class Interrupted:
        def state_dict(self):
            raise KeyboardInterrupt

        def load_state_dict(self, _):
            pass

    def save(comm, value, extra):
        mine = milepost.Sharded((2,), {(comm.rank,): torch.full((1,), value)})
        milepost.save({"mine": mine, "extra": extra}, store, process_group=comm)

    def work(comm):
        try:
            save(comm, 1.0, Interrupted() if comm.rank == victim else {})
        except KeyboardInterrupt:
            told = "interrupted"
        except milepost.CheckpointError as error:
            told = error.failures[victim].kind
        save(comm, 2.0, {})
        return told

    told = outcomes(2, work)
    assert told[victim] == "interrupted"
    assert told[1 - victim] == "KeyboardInterrupt", "told at once, not met by the next save"
    assert milepost.open(store)["mine"].read().tolist() == [2, 2]


def test_a_rank_whose_place_is_another_is_named_and_what_was_there_stays(monkeypatch):
    """As with a folder on each machine's own disk, or with a mount that one rank lost."""
    monkeypatch.setattr("milepost.commit.find.PATIENCE_S", 0.1)  # for a file system that does not show it yet
    shared, own = milepost.store.MemoryStore("memory://runs"), milepost.store.MemoryStore("memory://runs")
    milepost.save({"t": torch.ones(2)}, shared)
    before = dict(shared.objects)

    def work(comm):
        mine = milepost.Sharded((2,), {(comm.rank,): torch.zeros(1)})
        milepost.save({"t": mine}, own if comm.rank == 1 else shared, process_group=comm)

    for error in outcomes(2, work):
        assert isinstance(error, milepost.StorageError)
        assert "what rank 1 wrote to memory://runs cannot be seen" in str(error)
    assert shared.objects == before


def test_wrong_option_on_one_rank_is_raised_on_all():
    store = milepost.store.MemoryStore()

    def work(comm):
        def save(value, **options):
            mine = milepost.Sharded((2,), {(comm.rank,): torch.full((1,), value)})
            milepost.save({"t": mine}, store, process_group=comm, **options)

        with pytest.raises(milepost.InvalidRequest, match="not 'ignore'"):
            save(1.0, on_difference="ignore" if comm.rank == 1 else "warn")
        assert not store.objects
        save(2.0)

    run_ranks(2, work)
    assert milepost.open(store)["t"].read().tolist() == [2, 2]


def test_a_save_that_is_interrupted_before_it_commits_leaves_nothing():
    class Interrupting(CountingStore):
        def before(self, number, call):
            if call.startswith("create manifest"):
                raise KeyboardInterrupt

    store = milepost.store.MemoryStore()
    milepost.save({"t": torch.ones(3)}, store)
    before = dict(store.objects)
    with pytest.raises(KeyboardInterrupt):
        milepost.save({"t": torch.zeros(3)}, Interrupting(store))
    assert store.objects == before


def test_an_error_of_one_kind_keeps_its_kind_on_all_ranks():
    errors = outcomes(
        2, lambda comm: milepost.load({"t": torch.zeros(1)}, milepost.store.MemoryStore(), process_group=comm)
    )
    assert all(isinstance(e, milepost.CheckpointNotFound) for e in errors)
    assert all(isinstance(e, FileNotFoundError) for e in errors)

    def bad(comm):
        milepost.save({"f": (lambda: 0) if comm.rank else 1}, milepost.store.MemoryStore(), process_group=comm)

    errors = outcomes(2, bad)
    assert all(isinstance(e, milepost.InvalidState) and "'f' is a builtins.function" in str(e) for e in errors)


def test_a_load_that_fails_on_one_rank_fails_on_all():
    store = milepost.store.MemoryStore()
    milepost.save({"t": torch.ones(4)}, store)

    class Grumpy:
        def state_dict(self):
            return {"t": torch.zeros(4)}

        def load_state_dict(self, state):
            raise RuntimeError("I will not")

    def work(comm):
        milepost.load(Grumpy() if comm.rank == 1 else {"t": torch.zeros(4)}, store, process_group=comm)

    errors = outcomes(2, work)
    assert all(isinstance(e, milepost.CheckpointError) and "I will not" in str(e) for e in errors)


def test_a_rank_that_never_comes_is_named_and_the_next_save_works():
    store, later = milepost.store.MemoryStore("memory://1"), milepost.store.MemoryStore("memory://2")
    first = threading.Event()

    def work(comm):
        if comm.rank != 2:
            with pytest.raises(milepost.RanksMissing, match=r"rank 2 did not come to 'saving to memory://.*describing"):
                milepost.save({"t": torch.ones(1)}, store, process_group=comm)
            first.set()
        else:
            first.wait(20)
        # Rank 2 left a whole call out. All meet again at the next one.
        return milepost.save({"t": torch.full((1,), 2.0)}, later, process_group=comm)

    board = MemoryBoard()
    results = {}

    def run(rank):
        results[rank] = work(BoardComm(board, rank, 3, 1.0))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert milepost.open(later)["t"].read().item() == 2.0


def test_values_that_differ_between_ranks_are_an_error_or_a_warning():
    store = milepost.store.MemoryStore()

    def work(comm, **options):
        milepost.save({"lr": 0.1 * (comm.rank // 2), "same": 1}, store, process_group=comm, **options)

    errors = outcomes(4, work)
    for error in errors:
        assert isinstance(error, milepost.RanksDisagree)
        assert "'lr' is 0.0 on ranks 0-1 but 0.1 on ranks 2-3" in str(error)
        assert "'same'" not in str(error)
    with pytest.warns(RuntimeWarning, match="'lr' is"):
        assert outcomes(4, lambda comm: work(comm, on_difference="warn")) == [None] * 4
    assert milepost.open(store)["lr"] == 0.0


@pytest.mark.parametrize("size", [3, 1 << 20])
def test_replicas_that_differ_are_an_error_or_one_ranks_whole(size):
    store = milepost.store.MemoryStore()

    def work(comm, **options):
        tensor = torch.zeros(size)
        tensor[-1] = comm.rank == 1
        milepost.save({"ok": torch.ones(2), "buf": tensor}, store, process_group=comm, **options)

    for error in outcomes(3, work):
        assert isinstance(error, milepost.RanksDisagree)
        assert "'buf': ranks 0, 2 differ from rank 1" in str(error)
        assert "'ok'" not in str(error)
    assert not store.objects
    with pytest.warns(RuntimeWarning, match="'buf'"):
        assert outcomes(3, lambda comm: work(comm, on_difference="warn")) == [None] * 3
    assert milepost.open(store)["buf"].read().sum() == 0, "the lowest rank's, not a mixture"


def test_one_key_described_in_two_ways_names_key_and_ranks():
    def work(comm):
        state = {
            "w": torch.zeros(2 + comm.rank // 2),
            "d": torch.zeros(1, dtype=[torch.float32, torch.int8][comm.rank % 2]),
        }
        milepost.save(state, milepost.store.MemoryStore(), process_group=comm)

    for error in outcomes(4, work):
        assert isinstance(error, milepost.RanksDisagree)
        assert "'w' is tensor float32 (2,) on ranks 0-1, but tensor float32 (3,) on ranks 2-3" in str(error)
        assert "'d' is" in str(error)


def test_boxes_that_overlap_or_leave_holes_are_refused():
    def work(comm):
        state = {
            "hole": milepost.Sharded((9,), {(4 * comm.rank,): torch.zeros(4)}),
            "overlap": milepost.Sharded((7,), {(3 * comm.rank,): torch.zeros(4)}),
        }
        milepost.save(state, milepost.store.MemoryStore(), process_group=comm)

    for error in outcomes(2, work):
        assert isinstance(error, milepost.RanksDisagree)
        assert "'hole': 1 of 9 elements are held by no rank" in str(error)
        assert "'overlap': boxes [0:4] and [3:7] overlap" in str(error)


def private_state(rank):
    return {
        "rng": milepost.PerRank({"cpu": torch.full((5000,), rank, dtype=torch.uint8), "np": np.arange(rank)}),
        "loader": milepost.PerRank((rank, [rank, "x"])),
        "step": 7,
    }


def test_each_rank_gets_its_own_private_state_back():
    store = milepost.store.MemoryStore()
    run_ranks(3, lambda comm: milepost.save(private_state(comm.rank), store, process_group=comm))

    def work(comm):
        state = {"rng": milepost.PerRank(None), "loader": milepost.PerRank(None), "step": 0}
        milepost.load(state, store, process_group=comm)
        assert state["rng"].value["cpu"].tolist() == [comm.rank] * 5000
        assert state["rng"].value["np"].tolist() == list(range(comm.rank))
        assert state["loader"].value == (comm.rank, [comm.rank, "x"])

    run_ranks(3, work)
    assert milepost.open(store)["loader"] == {r: (r, [r, "x"]) for r in range(3)}
    assert len(milepost.open(store).manifest.per_rank) == 2, "private values do not swell the manifest"


def test_private_state_on_other_ranks_is_refused_or_remapped():
    store = milepost.store.MemoryStore()
    run_ranks(3, lambda comm: milepost.save(private_state(comm.rank), store, process_group=comm))

    def plain(comm):
        milepost.load({"loader": milepost.PerRank(0)}, store, allow_unexpected=True, process_group=comm)

    for error in outcomes(2, plain):
        assert isinstance(error, milepost.InvalidState)
        assert "'loader' is rank-private and was saved by 3 ranks; this job has 2" in str(error)
        assert "remap" in str(error)

    def remapped(comm):
        def remap(old, rank, world):
            return [value[0] for value in old][rank::world]

        state = {"loader": milepost.PerRank(0, remap=remap)}
        milepost.load(state, store, allow_unexpected=True, process_group=comm)
        return state["loader"].value

    assert run_ranks(2, remapped) == [[0, 2], [1]]


def test_a_stateful_object_may_be_rank_private():
    store = milepost.store.MemoryStore()

    class Loader:
        def __init__(self, position):
            self.position = position

        def state_dict(self):
            return {"position": self.position}

        def load_state_dict(self, state):
            self.position = state["position"]

    run_ranks(2, lambda comm: milepost.save({"l": milepost.PerRank(Loader(10 + comm.rank))}, store, process_group=comm))

    def work(comm):
        loader = Loader(0)
        milepost.load({"l": milepost.PerRank(loader)}, store, process_group=comm)
        return loader.position

    assert run_ranks(2, work) == [10, 11]


def test_with_and_without_per_rank_do_not_mix():
    store = milepost.store.MemoryStore()
    milepost.save({"a": milepost.PerRank(1), "b": 2}, store)
    with pytest.raises(milepost.StateMismatch, match=r"(?s)'a': saved with PerRank.*'b': saved without PerRank"):
        milepost.load({"a": 0, "b": milepost.PerRank(0)}, store)
