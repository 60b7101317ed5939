"""The steady state: no planning between saves of one structure, and every change is noticed before the commit."""

import threading

import pytest
import torch

import milepost
from milepost.comm import BoardComm, MemoryBoard
from milepost.core.layout import Cut, Grid, Mesh
from milepost.testing import CountingStore, run_ranks

WORLD = 4


class Job:
    """Thread ranks that keep their plans from save to save, on one board, and count what they say."""

    def __init__(self, world=WORLD, coordinator=0):
        self.world, self.board, self.coordinator = world, MemoryBoard(), coordinator
        self.plans = [milepost.Plans() for _ in range(world)]
        self.phases = []

    def save(self, state_of, store, **options):
        """Save on all ranks; give what each returned or raised, and the number of meetings and announcements."""
        results = [None] * self.world
        before = self.board.count("count/0", 0)

        def run(rank):
            comm = BoardComm(self.board, rank, self.world, 20, coordinator=self.coordinator)
            try:
                place = store(rank) if callable(store) else store
                results[rank] = milepost.save(
                    state_of(rank), place, process_group=comm, plans=self.plans[rank], **options
                )
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(r,)) for r in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results, self.board.count("count/0", 0) - before


def state_of(number, rows=8, dtype=torch.float32, cut=0):
    grid = Grid(Mesh.of((WORLD,), range(WORLD)), (Cut(cut),))

    def of(rank):
        shape = grid.local_shape((rows, 8), rank)
        local = torch.full(shape, number, dtype=dtype)
        return {
            "w": milepost.Sharded.on_grid((rows, 8), local, grid, rank),
            "plain": torch.full((3,), float(number)),
            "rng": milepost.PerRank(rank),
            "step": number,
        }

    return of


def check(store, number, dtype=torch.float32):
    with milepost.open(store) as checkpoint:
        assert checkpoint.verify().ok
        state = checkpoint.state()
    assert state["w"].dtype == dtype
    assert (state["w"] == number).all()
    assert (state["plain"] == number).all()
    assert state["step"] == number


def test_after_the_first_save_the_ranks_meet_once():
    job, store = Job(), milepost.store.MemoryStore()
    assert job.save(state_of(1), store)[1] == 3, "starting, describing, writing"
    for number in range(2, 5):
        results, meetings = job.save(state_of(number), store)
        assert meetings == 2, "starting, writing"
        assert {r.generation for r in results} == {number}
        check(store, number)


@pytest.mark.parametrize("change", [{"rows": 12}, {"dtype": torch.bfloat16}, {"cut": 1}])
def test_a_change_of_shape_dtype_or_layout_is_noticed_and_planned_anew(change):
    job, store = Job(), milepost.store.MemoryStore()
    job.save(state_of(1), store)
    assert job.save(state_of(2, **change), store)[1] == 3
    check(store, 2, change.get("dtype", torch.float32))
    assert job.save(state_of(3, **change), store)[1] == 2
    assert job.save(state_of(4), store)[1] == 2, "the first structure is still known"
    check(store, 4)


@pytest.mark.parametrize("changed", [0, 2])
def test_a_change_on_one_rank_only_is_noticed_before_the_commit(changed):
    job, store = Job(), milepost.store.MemoryStore()

    def extra(number, who):
        return lambda rank: {**state_of(number)(rank), **({"extra": torch.ones(2)} if rank == who else {})}

    job.save(extra(1, None), store)
    results, _ = job.save(extra(2, changed), store)
    assert {r.generation for r in results} == {2}
    check(store, 2)
    assert milepost.open(store)["extra"].read().tolist() == [1.0, 1.0]
    assert len([n for n in store.objects if n.startswith("data/")]) == WORLD, "what was written first is gone"
    assert job.save(extra(3, changed), store)[1] == 2, "then that is the steady state"
    results, _ = job.save(extra(4, None), store)
    check(store, 4)
    assert "extra" not in milepost.open(store)


def test_two_states_saved_in_turn_do_not_evict_each_other():
    job, one, two = Job(), milepost.store.MemoryStore("memory://1"), milepost.store.MemoryStore("memory://2")
    other = lambda number: lambda rank: {"optim": torch.full((5,), float(number))}  # noqa: E731
    job.save(state_of(1), one)
    job.save(other(1), two)
    for number in (2, 3):
        assert job.save(state_of(number), one)[1] == 2
        assert job.save(other(number), two)[1] == 2
    check(one, 3)
    assert milepost.open(two)["optim"].read().tolist() == [3.0] * 5


def test_values_that_differ_are_noticed_in_the_steady_state_too():
    job, store = Job(), milepost.store.MemoryStore()
    job.save(state_of(1), store)
    results, _ = job.save(lambda rank: {**state_of(2)(rank), "step": rank // 2}, store)
    assert all(isinstance(r, milepost.RanksDisagree) for r in results)
    assert all("'step' is 0 on ranks 0-1 but 1 on ranks 2-3" in str(r) for r in results)
    check(store, 1)
    results, _ = job.save(lambda rank: {**state_of(2)(rank), "plain": torch.full((3,), float(rank == 3))}, store)
    assert all("'plain': ranks 0-2 differ from rank 3" in str(r) for r in results)
    check(store, 1)
    job.save(state_of(3), store)
    check(store, 3)


def test_after_a_failed_save_the_steady_state_goes_on():
    class Full(CountingStore):
        def before(self, number, call):
            if call.startswith("write data/"):
                raise OSError(28, "No space left on device")

    job, store = Job(), milepost.store.MemoryStore()
    job.save(state_of(1), store)
    results, _ = job.save(state_of(2), lambda rank: Full(store) if rank == 1 else store)
    assert all(isinstance(r, milepost.StorageError) and "rank 1" in str(r) for r in results)
    check(store, 1)
    assert job.save(state_of(3), store)[1] == 2
    check(store, 3)


def test_any_rank_can_commit():
    for lead in range(WORLD):
        job, store = Job(coordinator=lead), milepost.store.MemoryStore()
        for number in (1, 2):
            job.save(state_of(number), store)
            check(store, number)


def test_pipeline_stages_send_one_table_each_and_share_what_they_share():
    job, store = Job(world=6), milepost.store.MemoryStore()

    def stage(number):
        def of(rank):
            mine = rank // 2
            mesh = Mesh.of((2,), range(2 * mine, 2 * mine + 2))
            return {
                f"stage{mine}": milepost.Sharded.on_grid((4,), torch.full((2,), number), Grid(mesh, (Cut(0),)), rank),
                "tied": torch.full((2,), number),
                f"only{mine}": mine * number,
                "step": number,
            }

        return of

    assert job.save(stage(1), store)[1] == 4, "starting, describing, agreeing, writing"
    assert job.save(stage(2), store)[1] == 2
    state = milepost.open(store).state()
    assert all((state[f"stage{i}"] == 2).all() and state[f"only{i}"] == 2 * i for i in range(3))
    assert (state["tied"] == 2).all()
    results, _ = job.save(lambda rank: {**stage(3)(rank), "step": 3 + (rank >= 4)}, store)
    assert all("'step' is 3 on ranks 0-3 but 4 on ranks 4-5" in str(r) for r in results)


def test_the_plans_keep_what_was_used_last():
    plans = milepost.Plans(size=2)
    for size in (1, 2, 3, 2, 1):
        milepost.save({"w": torch.zeros(size)}, milepost.store.MemoryStore(), plans=plans)
    assert len(plans) == 2


def test_a_hundred_ranks_save_and_load_with_explicit_boxes_and_grids():
    store = milepost.store.MemoryStore()
    world = 100
    grid = Grid(Mesh.of((world,), range(world)), (Cut(0),))

    def save(comm):
        local = torch.full(grid.local_shape((250, 3), comm.rank), float(comm.rank))
        boxes = (
            {(7 * comm.rank,): torch.full((7,), comm.rank)}
            if comm.rank % 2 == 0
            else {(7 * comm.rank,): torch.full((3,), comm.rank), (7 * comm.rank + 3,): torch.full((4,), comm.rank)}
        )
        state = {
            "grid": milepost.Sharded.on_grid((250, 3), local, grid, comm.rank),
            "boxes": milepost.Sharded((7 * world,), boxes),
        }
        return milepost.save(state, store, process_group=comm)

    run_ranks(world, save)
    state = milepost.open(store).state()
    assert torch.equal(state["boxes"], torch.arange(world).repeat_interleave(7))
    expected = torch.cat([torch.full(grid.local_shape((250, 3), r), float(r)) for r in range(world)])
    assert torch.equal(state["grid"], expected)


def test_each_rank_reads_a_manifest_too_large_to_send():
    store, other = milepost.store.MemoryStore("memory://same"), milepost.store.MemoryStore("memory://same")
    many = {f"layers.{i}.weight": torch.full((1,), float(i)) for i in range(1000)}
    milepost.save(many, store)
    milepost.save({**many, "layers.0.weight": torch.full((1,), 9.0)}, other)
    assert len(store.objects["manifest-00000001.json"]) > 64 * 1024

    def work(comm):
        target = {key: torch.zeros(1) for key in many}
        milepost.load(target, store, process_group=comm)
        return [t.item() for t in target.values()] == [float(i) for i in range(1000)]

    assert run_ranks(3, work) == [True] * 3

    def astray(comm):
        with pytest.raises(milepost.CheckpointDamaged, match=r"rank 1 does not find the manifest of generation 1"):
            milepost.load({k: torch.zeros(1) for k in many}, other if comm.rank == 1 else store, process_group=comm)

    run_ranks(3, astray)
