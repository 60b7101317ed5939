"""A user's program: every public call, with options of the right types. `mypy --strict` finds nothing in it."""

from collections.abc import Sequence

import torch

import milepost
from milepost.planning import CheckpointReader, CheckpointWriter, DefaultLoadPlanner, DefaultSavePlanner, ZStandard
from milepost.store import LocalStore, MemoryStore, store_at


def watch(progress: milepost.Progress) -> None:
    print(progress.done_bytes)


def remap(old: list[object], rank: int, world: int) -> object:
    return old[rank % len(old)]


def saves(state: dict[str, object], optimizer: torch.optim.Optimizer) -> None:
    receipt: milepost.Receipt = milepost.save(
        state,
        "runs/a",
        planner=DefaultSavePlanner(),
        storage_writer=CheckpointWriter(MemoryStore(), overwrite=False, transforms=[ZStandard()]),
        metadata={"loss": 1.0},
        overwrite=False,
        on_difference="warn",
        compare_replicas=False,
        reduce_partial=True,
        types=[dict],
        allow_pickle=True,
        plans=milepost.Plans(),
        host_memory_bytes=1 << 28,
        transfer=milepost.Transfer(threads=2),
        progress=watch,
        timeout_s=60.0,
        process_group=None,
    )
    print(receipt.generation + receipt.data_bytes, receipt.save_id.upper())
    pending: milepost.PendingSave = milepost.async_save(
        state, "runs/b", background="process", stage="host", optimizer=[optimizer], metadata={}, timeout_s=1
    )
    pending.wait_staged(timeout_s=1.0)
    done: bool = pending.done() and pending.staged() and not pending.cancel()
    error: BaseException | None = pending.exception()
    print(done, error, pending.result(10.0).url)
    milepost.prewarm(state, background="thread", types=())
    milepost.close_async()
    with milepost.AsyncSaver(background="thread", stage="auto", staging_bytes=None, when_busy="refuse") as saver:
        saver.save(state, "runs/c", optimizer=optimizer, overwrite=False).add_done_callback(print)


def loads(state: dict[str, object]) -> None:
    milepost.load(
        state,
        LocalStore("runs/a"),
        planner=DefaultLoadPlanner(),
        storage_reader=CheckpointReader("runs/a", verify=False),
        allow_missing=True,
        allow_unexpected=True,
        convert_dtype=True,
        device="cpu",
        verify=False,
        share_reads=None,
        types=(),
        allow_pickle=False,
        progress=milepost.ProgressBar(),
    )
    report: milepost.LoadReport = milepost.explain(state, "runs/a", types=(), timeout_s=5)
    differing: milepost.Difference = milepost.diff("runs/a", "runs/b", values=True, keys="model.*")
    print(report.fits(allow_missing=True), sorted(report.missing), differing.same)
    with milepost.open("runs/a", types=(), allow_pickle=False) as checkpoint:
        lazy: milepost.LazyTensor = checkpoint.tensors["w"]
        row: torch.Tensor = lazy[0, 1:]
        dtype: torch.dtype = lazy.dtype
        found: milepost.Verification = checkpoint.verify(transfer=milepost.Transfer(), progress=watch)
        print(row, dtype, lazy.dtype_name.upper(), found.ok, checkpoint.generation + checkpoint.world)


def steps(state: dict[str, object]) -> int:
    keeper = milepost.Checkpointer(
        "runs", keep_last=3, keep_every=100, keep_best=1, best="loss", mode="min", on_difference="warn", verify=True
    )
    keeper.save(state, 1, metrics={"loss": 0.5}, metadata={"note": "x"}, overwrite=False)
    keeper.async_save(state, 2, stage="overlap", metrics=None).result()
    with milepost.PreemptionGuard(grace_s=30, signals=()) as guard:
        if guard.reached(3) and guard.save(lambda: keeper.save(state, 3)):
            print(guard.seconds_left)
    step: int = keeper.restore(state, step=None, default=0, allow_missing=True)
    listed: Sequence[int] = keeper.steps()
    newest: int | None = keeper.latest()
    print(listed, newest, keeper.best(), keeper.open(step).metadata)
    return step


def parts() -> dict[str, object]:
    private: milepost.PerRank[list[int]] = milepost.PerRank([1], remap=remap)
    numbers: list[int] = private.value
    sharded = milepost.Sharded((4,), {(0,): torch.ones(2)}, dtype=torch.float32)
    stateful: milepost.Stateful = torch.nn.Linear(1, 1)
    return {"rng": private, "numbers": numbers, "w": sharded, "model": stateful}


def conversions() -> None:
    milepost.convert("runs/a", "out", "safetensors", overwrite=True, progress=watch)
    done = milepost.copy("runs", "s3://bucket/runs", steps=range(0, 100, 10), overwrite=True, progress=watch)
    names: list[str] = [step.name for step in done.steps if step.state == "copied"]
    print(names)
    milepost.export_safetensors(parts(), "hf", drop_values=True)
    store: milepost.Store = store_at("memory://a")
    try:
        milepost.load({}, store)
    except milepost.CheckpointError as error:
        print(error.failures)
