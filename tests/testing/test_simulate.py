"""The simulator says what real saves and loads do."""

import threading

import pytest
import torch

import milepost
from milepost.comm import BoardComm, MemoryBoard
from milepost.testing import TensorRow, on_mesh, run_ranks, simulate_load, simulate_save, simulate_swap

WORLD = 12
GRIDS = {
    "fsdp": on_mesh((WORLD,), [0]),
    "hsdp": on_mesh((3, 4), [None, 0]),
    "strided": on_mesh((3, 4), [(0, 4), 0]),
}
SHAPES = [(24, 7), (48,), (13, 3)]


def rows(grid):
    return [TensorRow(f"t{i}", "float32", shape, "tensor", grid) for i, shape in enumerate(SHAPES)]


def state(grid, rank):
    return {
        f"t{i}": milepost.Sharded.on_grid(shape, torch.zeros(grid.local_shape(shape, rank)), grid, rank)
        for i, shape in enumerate(SHAPES)
    }


@pytest.mark.parametrize("kind", list(GRIDS))
def test_simulated_save_matches_a_real_save(kind):
    grid, store, board = GRIDS[kind], milepost.store.MemoryStore(), MemoryBoard()
    plans = [milepost.Plans() for _ in range(WORLD)]
    simulated = simulate_save(WORLD, rows(grid))
    for steady in (False, True):
        before = board.bytes_pinned + board.bytes_read

        def work(rank, before=before):
            comm = BoardComm(board, rank, WORLD, 60)
            milepost.save(state(grid, rank), store, process_group=comm, plans=plans[rank])

        threads = [threading.Thread(target=work, args=(r,)) for r in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        said = board.bytes_pinned + board.bytes_read - before
        assert simulated.exchange_bytes(steady) == pytest.approx(said, rel=0.15)
    manifest = milepost.open(store).manifest
    assert manifest.tensors == simulated.overview.tensors
    assert manifest.layouts == simulated.overview.layouts
    for file in manifest.files:
        blocks = -(-simulated.bytes_written(file.rank) // manifest.block_bytes)
        assert file.size_bytes == file.header_bytes + simulated.bytes_written(file.rank) + 8 * blocks


@pytest.mark.parametrize("saved", list(GRIDS))
@pytest.mark.parametrize("loaded", list(GRIDS))
def test_what_each_rank_would_read_is_what_explain_says(saved, loaded):
    store = milepost.store.MemoryStore()
    run_ranks(WORLD, lambda comm: milepost.save(state(GRIDS[saved], comm.rank), store, process_group=comm))
    simulated = simulate_save(WORLD, rows(GRIDS[saved]))
    reports = run_ranks(
        WORLD, lambda comm: milepost.explain(state(GRIDS[loaded], comm.rank), store, process_group=comm)
    )
    for rank in range(WORLD):
        load = simulate_load(simulated, WORLD, rows(GRIDS[loaded]), rank)
        assert load.needed_bytes == reports[0].read_bytes[rank]
        assert load.read_bytes >= load.needed_bytes


def test_simulator_reshards_16384_ranks_to_12288():
    shape = (16384, 4096)
    save = simulate_save(16384, [TensorRow("w", "bfloat16", shape, "tensor", on_mesh((16384,), [0]))] * 1)
    assert save.bytes_written(5) == 8192
    assert save.manifest_bytes < 2_000_000
    load = simulate_load(save, 12288, [TensorRow("w", "bfloat16", shape, "tensor", on_mesh((12288,), [0]))], 100)
    assert load.files == (200, 201)
    assert load.needed_bytes == 2 * 8192


def test_contradictions_are_found_without_a_cluster():
    groups = {
        "0-1": [TensorRow("w", "int8", (4,), "tensor", None)],
        "2-3": [TensorRow("w", "int8", (5,), "tensor", None)],
    }
    with pytest.raises(milepost.RanksDisagree, match=r"'w' is tensor int8 \(4,\) on ranks 0-1"):
        simulate_save(4, groups)
    with pytest.raises(ValueError, match="was saved as"):
        simulate_load(simulate_save(4, groups["0-1"]), 2, groups["2-3"], 0)


@pytest.mark.parametrize(("after", "cut"), [(768, 0), (1024, 1)])
def test_swapping_ranks_read_each_byte_once(after, cut):
    shapes = [(4096, 4096), (4096, 11008), (64, 4096), (1024, 4096)]

    def job(world, dim):
        return [TensorRow(f"{i}", "bfloat16", shapes[i % 4], "tensor", on_mesh((world,), [dim])) for i in range(60)]

    save = simulate_save(1024, job(1024, 0))
    swap, looked_at = simulate_swap(save, after, job(after, cut)), (0, after // 3, after - 1)
    assert swap.amplification(looked_at) <= 1.05
    for rank in looked_at:
        assert swap.sent_bytes(rank) <= 1.1 * swap.needed_bytes / after


def test_swap_in_little_memory_reads_blocks_at_edges_twice():
    rows = [TensorRow("w", "int8", (4096, 4096), "tensor", on_mesh((4,), [0]))]
    columns = [TensorRow("w", "int8", (4096, 4096), "tensor", on_mesh((4,), [1]))]
    save = simulate_save(4, rows)
    assert simulate_swap(save, 4, columns).amplification() == 1
    assert 1 < simulate_swap(save, 4, columns, host_memory_bytes=1_500_000).amplification() < 1.3
