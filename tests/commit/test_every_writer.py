"""Every writer is atomic and durable: `save`, a planner's save, `milepost.dcp.save`, `convert`, `copy` commit alike."""

import errno
import multiprocessing as mp
import os
import random
import threading
import time
from typing import get_args

import pytest
import torch

import milepost
from milepost.errors import Failure
from milepost.store import LocalStore, MemoryStore
from milepost.testing import CountingStore, Crash, CrashingStore, ReplyLosingStore, UnsyncedStore, run_ranks
from milepost.testing.stores import Request
from tests.commit.object_places import objects
from tests.commit.writers import ON_RANKS, WRITERS, FailsAfterCommit, SeesNothingNew

every_writer = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
writers_on_ranks = pytest.mark.parametrize("write", ON_RANKS.values(), ids=ON_RANKS)


def state(number):
    return {"a": torch.full((3, 5), float(number)), "b": {"c": torch.full((7,), number)}, "n": number}


def read(place):
    """The number that the newest checkpoint holds; fails if it is not whole."""
    with milepost.open(place) as checkpoint:
        found = checkpoint.state()
        assert checkpoint.verify().ok
    assert (found["a"] == found["n"]).all()
    assert (found["b"]["c"] == found["n"]).all()
    return found["n"]


def leftovers(store):
    """Data that the newest manifest does not name."""
    return [name for name in store.list("data/") if milepost.open(store).manifest.save_id not in name]


@every_writer
@pytest.mark.parametrize("store_of", [MemoryStore, objects])
@pytest.mark.parametrize("after", [False, True])
def test_crash_at_any_store_call_leaves_old_or_new(write, store_of, after):
    def fresh():
        store = store_of()
        milepost.save(state(1), store)
        return store

    counting = CountingStore(fresh())
    write(state(2), counting)
    seen = set()
    for at in range(1, counting.calls + 1):
        inner = fresh()
        with pytest.raises(Crash):
            write(state(2), CrashingStore(inner, at, after=after))
        seen.add(read(inner))
        write(state(3), inner)
        assert read(inner) == 3
        assert leftovers(inner) == [], "the next save sweeps what the dead one left"
    assert seen == {1, 2}, "both outcomes were met"


@writers_on_ranks
@pytest.mark.parametrize("store_of", [MemoryStore, objects])
def test_crash_of_one_rank_at_any_call_leaves_old_or_new(write, store_of):
    seen = set()
    for victim in (0, 1):
        for at in range(1, 100):
            inner = store_of()
            milepost.save(state(1), inner)
            crashing = CrashingStore(inner, at)

            def work(comm, crashing=crashing, inner=inner, victim=victim):
                try:
                    write(state(2), crashing if comm.rank == victim else inner, comm)
                except (Crash, milepost.CheckpointError) as error:
                    return type(error).__name__
                return "saved"

            outcome = run_ranks(2, work, timeout_s=30)[victim]
            seen.add(read(inner))
            if outcome == "saved":
                break
        assert outcome == "saved"
        assert at > (3 if store_of is MemoryStore or victim == 0 else 1), "a rank's data may be one request"
    assert seen == {1, 2}


@every_writer
@pytest.mark.parametrize("hard_links", [True, False])
def test_power_cut_at_any_moment_leaves_old_or_new(write, hard_links):
    store, dice = UnsyncedStore(hard_links=hard_links), random.Random(5)
    write(state(1), store)
    first = len(store.journal)
    write(state(2), store)
    seen = set()
    for at in range(first, len(store.journal) + 1):
        unsynced = {}
        store.after_power_cut(unsynced.setdefault, at)
        choices = [lambda _: False, lambda _: True, *(lambda _: dice.random() < 0.5 for _ in range(4))]
        choices += [lambda call, one=one: call == one for one in unsynced]
        choices += [lambda call, one=one: call != one for one in unsynced]
        for choose in choices:
            seen.add(number := read(store.after_power_cut(choose, at)))
            assert number in (1, 2)
            if at == len(store.journal):
                assert number == 2, "the call had returned"
    assert seen == {1, 2}


@every_writer
@pytest.mark.places("here", "network")
def test_commit_that_cannot_be_synced_keeps_its_data(write, tmp_path, monkeypatch):
    """A power cut may bring the manifest back, and then it must find what it names."""
    milepost.save(state(1), tmp_path)
    link, fsync, linked = os.link, os.fsync, []

    def note(*args, **options):
        link(*args, **options)
        linked.append(args)

    def fail(handle):
        if linked:
            raise OSError(errno.EIO, "Input/output error")
        fsync(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", note)
        patched.setattr(os, "fsync", fail)
        with pytest.raises(milepost.CheckpointError, match=r"manifest-00000002.*Input/output error.*taken back"):
            write(state(2), tmp_path)
    assert read(tmp_path) == 1
    assert len(list((tmp_path / "data").iterdir())) == 2
    write(state(3), tmp_path)
    assert read(tmp_path) == 3
    assert len(list((tmp_path / "data").iterdir())) == 1


@writers_on_ranks
@pytest.mark.parametrize("store_of", [MemoryStore, objects])
def test_ranks_keep_their_data_when_the_commit_is_not_durable(write, store_of):
    class NotSynced(CountingStore):
        def create(self, name, *data):
            if name.startswith("data/"):
                return super().create(name, *data)
            raise milepost.NotDurable(f"{name}: taken back", errno=errno.EIO)

    inner = store_of()
    milepost.save(state(1), inner)

    def work(comm):
        with pytest.raises(milepost.CheckpointError, match="taken back"):
            write(large(2, comm), NotSynced(inner) if comm.rank == comm.coordinator else inner, comm)

    def large(number, comm):
        return state(number) | {"large": torch.full((1 << 20,), number)}

    run_ranks(2, work, timeout_s=60)
    assert read(inner) == 1
    assert len({name.split("/")[2].split(".")[0] for name in leftovers(inner)}) == 2, "both ranks"


@writers_on_ranks
@pytest.mark.parametrize("store_of", [MemoryStore, objects])
def test_failed_write_leaves_nothing(write, store_of):
    class Full(CountingStore):
        def create(self, name, *data):
            if name.startswith("data/"):
                return super().create(name, *data)
            raise milepost.StorageError("no space left", errno=errno.ENOSPC)

    inner = store_of()
    milepost.save(state(1), inner)

    def work(comm):
        with pytest.raises(milepost.CheckpointError, match="no space left"):
            write(state(2), Full(inner) if comm.rank == comm.coordinator else inner, comm)

    run_ranks(2, work, timeout_s=60)
    assert read(inner) == 1
    assert leftovers(inner) == []


@every_writer
@pytest.mark.parametrize("store_of", [MemoryStore, objects])
def test_overtaken_writer_is_told(write, store_of):
    class Late(CountingStore):
        def before(self, number, call):
            if call == "create manifest-00000002.json":
                milepost.save(state(2), self.inner)
                milepost.save(state(3), self.inner)

    inner = store_of()
    milepost.save(state(1), inner)
    with pytest.raises(milepost.CheckpointError, match="another job committed generation 2") as caught:
        write(state(9), Late(inner))
    failures = getattr(caught.value, "failures", {}).values()
    kinds = {one.kind if isinstance(one, Failure) else type(one[0]).__name__ for one in failures}
    assert isinstance(caught.value, milepost.SaveConflict) or kinds == {"SaveConflict"}
    assert read(inner) == 3
    assert leftovers(inner) == []


@every_writer
@pytest.mark.places("here", "network", "network without links")
def test_of_racing_writers_one_wins_each_generation(write, tmp_path):
    store = LocalStore(tmp_path)
    for round_number in range(3):
        outcomes, start = {}, threading.Barrier(4)

        def race(i, outcomes=outcomes, start=start, base=round_number * 10):
            start.wait()
            try:
                write(state(base + i), store)
                outcomes[i] = "saved"
            except milepost.CheckpointError as error:
                outcomes[i] = str(error)

        threads = [threading.Thread(target=race, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        saved = [round_number * 10 + i for i, outcome in outcomes.items() if outcome == "saved"]
        assert read(store) in saved
        assert all("another job committed" in o for o in outcomes.values() if o != "saved"), outcomes


@every_writer
@pytest.mark.places("here", "network")
def test_lost_reply_to_the_link_is_not_a_conflict(write, tmp_path, monkeypatch):
    """NFS repeats a request whose reply was lost; the repetition finds that the name exists."""
    milepost.save(state(1), tmp_path)
    link = os.link

    def linked_already(*args, **options):
        link(*args, **options)
        raise FileExistsError(errno.EEXIST, "File exists")

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", linked_already)
        write(state(2), tmp_path)
    assert read(tmp_path) == 2
    assert leftovers(LocalStore(tmp_path)) == []


@every_writer
@pytest.mark.parametrize("store_of", [MemoryStore, objects])
@pytest.mark.parametrize("error", [milepost.AlreadyExists, FileNotFoundError])
def test_lost_reply_of_a_store_is_not_a_conflict(write, store_of, error):
    class LosesReplies(CountingStore):
        def create(self, name, *data):
            super().create(name, *data)
            if name.startswith("manifest"):
                raise error("the reply was lost")

    inner = store_of()
    milepost.save(state(1), inner)
    write(state(2), LosesReplies(inner))
    assert read(inner) == 2


@every_writer
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize(
    ("store_of", "kind"),
    [(objects, "create"), (objects, "delete")] + [(MemoryStore, kind) for kind in get_args(Request)],
)
def test_lost_replies_cost_no_checkpoint(write, store_of, kind, repeats):
    inner = store_of()
    milepost.save(state(1), inner)
    for number in (2, 3):
        losing = ReplyLosingStore(inner, [kind], repeats=repeats)
        before = read(inner)
        # A manifest is looked at, and a later save sweeps. The data of an object store is created, too.
        if repeats or kind == "delete" or (kind == "create" and store_of is MemoryStore):
            write(state(number), losing)
            assert read(inner) == number
        else:
            with pytest.raises((milepost.CheckpointError, milepost.dcp.api.CheckpointException), match="no reply"):
                write(state(number), losing)
            assert read(inner) == before
            assert leftovers(inner) == []
        assert losing.lost > 0
    write(state(4), inner)
    assert read(inner) == 4


@writers_on_ranks
@pytest.mark.parametrize("store_of", [MemoryStore, objects])
@pytest.mark.parametrize(
    ("calls", "error"),
    [
        (("create manifest-", "list manifest-", "reader manifest-"), milepost.StorageError("the store is gone")),
        (("delete manifest-",), KeyboardInterrupt()),
    ],
    ids=["error", "interrupt"],
)
def test_rank_with_an_old_view_keeps_what_was_committed(write, store_of, calls, error):
    """The coordinator says whether it committed. What another rank sees does not decide it."""
    inner = store_of()
    milepost.save(state(1), inner)

    def work(comm):
        wide = state(2) | {"large": torch.full((1 << 20,), 2)}
        coordinates = comm.rank == comm.coordinator
        store = FailsAfterCommit(inner, calls, error) if coordinates else SeesNothingNew(inner)
        with pytest.raises((milepost.CheckpointError, KeyboardInterrupt)):
            write(wide, store, comm)

    run_ranks(2, work, timeout_s=60)
    assert read(inner) == 2, "it was committed, so all ranks have kept their data"
    assert len(milepost.open(inner).manifest.files) == 2


def keep_writing(write, folder, sender):
    """Write ever newer states to one place until killed."""
    torch.set_num_threads(1)
    for number in range(read(folder) + 1, 10**6):
        write(state(number) | {"large": torch.full((1 << 18,), number)}, folder)
        sender.send_bytes(b"saved")


@every_writer
@pytest.mark.places("here", "network")
@pytest.mark.slow
def test_sigkill_at_random_moments_leaves_old_or_new(write, tmp_path, place):
    chance, context = random.Random(7), mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.commit.test_every_writer"])
    milepost.save(state(0), tmp_path)
    newest, unfinished = 0, 0
    for trial in range(12):
        if place != "here" and trial >= 3 and unfinished and newest:
            break  # elsewhere fewer will do, if they met what they are for
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=keep_writing, args=(write, tmp_path, sender), daemon=True)
        process.start()
        sender.close()
        assert receiver.poll(60)
        time.sleep(chance.uniform(0.0, 0.1))
        process.kill()
        process.join()
        unfinished += bool(leftovers(LocalStore(tmp_path)))
        found = read(tmp_path)
        assert found >= newest
        newest = found
    assert newest > 0, "some writes went through"
    assert unfinished > 0, "and some were killed half way"
