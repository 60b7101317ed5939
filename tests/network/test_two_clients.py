"""Ranks, jobs and readers on two clients of a network file system, which believe old things."""

import errno
import threading
import time

import pytest
import torch

import milepost
from milepost.core.manifest import manifest_name, shard_name
from milepost.store import LocalStore, Within
from milepost.testing import CountingStore, run_ranks
from tests.network.states import read, state
from tests.ranks import spawn

ALL = ("attributes_s", "names_s", "absence_s", "listings_s")


def believe(network, seconds):
    network.believe(**dict.fromkeys(ALL, seconds))


class SamePath(LocalStore):
    """A folder that has the same path on each machine. (Here the mounts of two machines are on one.)"""

    url = "/shared/step"


def save_and_load(rank, clients, rounds):
    """Each rank on its own client: saves to one place again and again, and loads what it finds, cut the other way."""
    place = SamePath(f"{clients[rank]}/run/step")
    for number in range(1, rounds + 1):
        own = milepost.Sharded((8,), {(4 * rank,): torch.full((4,), float(number))})
        receipt = milepost.save({"w": own, "n": number}, place)
        half = torch.zeros(4)
        found = {"w": milepost.Sharded((8,), {(4 * (1 - rank),): half}), "n": 0}
        milepost.load(found, place)
        assert found["n"] == number
        assert (half == number).all()
    return receipt.generation


@pytest.mark.slow
@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_ranks_on_two_clients_save_and_load(network, links):
    believe(network, 2)
    if not links:
        network.without_links()
    assert spawn(2, save_and_load, [str(client) for client in network.clients], 6, timeout_s=60) == [6, 6]


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_jobs_on_two_clients_never_commit_one_generation_twice(network, links):
    believe(network, 0.2)
    if not links:
        network.without_links()
    committed, problems, start = [], [], threading.Barrier(2)

    def job(client):
        place = network.clients[client] / "step"
        start.wait()
        for number in range(12):
            try:
                receipt = milepost.save(state(100 * client + number), place)
                committed.append((receipt.generation, 100 * client + number))
            except milepost.SaveConflict:
                pass
            except milepost.CheckpointError as error:
                problems.append(repr(error))

    threads = [threading.Thread(target=job, args=(client,)) for client in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    generations = [generation for generation, _ in committed]
    assert len(set(generations)) == len(generations), "each number has one winner"
    believe(network, 0)
    time.sleep(0.3)
    assert {read(client / "step") for client in network.clients} == {max(committed)[1]}


def test_savers_that_clean_up_do_not_disturb_the_other_client(network):
    """One removes folders that it leaves empty, while the other is about to create a file there."""
    believe(network, 0.05)
    problems, start = [], threading.Barrier(4)

    def come_and_go(number):
        start.wait()
        try:
            for turn in range(40):
                store = Within(LocalStore(network.clients[number % 2] / "runs" / "a"), "step")
                name = shard_name(f"{turn:08d}-0123456789abcdef", number)
                writer = store.writer(name, 8)
                writer.write(0, [b"12345678"])
                if turn % 3 == 0:
                    writer.commit()
                    assert store.reader(name).size_bytes == 8
                writer.abort()
        except BaseException as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def reads_meanwhile(act, look):
    """Call `look` again and again until `act`, in another thread, has ended. Gives what it returned each time."""
    found, ended, errors = [], threading.Event(), []

    def run():
        try:
            act()
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        while not ended.is_set():
            found.append(look())
    finally:
        thread.join()
    if errors:
        raise errors[0]
    return found


def test_reader_on_another_client_finds_a_checkpoint_at_all_times(network):
    one, other = (client / "step" for client in network.clients)
    milepost.save(state(0), one)
    believe(network, 0.3)

    def keep_saving():
        for number in range(1, 40):
            milepost.save(state(number), one)
            time.sleep(0.02)

    def look():
        with milepost.open(other) as checkpoint:
            return checkpoint.generation

    found = reads_meanwhile(keep_saving, look)
    assert found == sorted(found)
    assert len(set(found)) > 2
    time.sleep(0.4)
    assert read(other) == 39


@pytest.mark.slow
def test_restore_on_another_client_goes_on_while_steps_are_removed(network):
    one, other = (client / "run" for client in network.clients)
    keeper = milepost.Checkpointer(one, keep_last=2)
    keeper.save(state(0), 0)
    believe(network, 0.3)

    def keep_saving():
        for step in range(1, 30):
            keeper.save(state(step), step)
            time.sleep(0.03)

    def look():
        target = state(-1)
        with milepost.Checkpointer(other) as reader:
            step = reader.restore(target)
        assert target["n"] == step
        assert (target["a"] == step).all()
        return step

    found = reads_meanwhile(keep_saving, look)
    assert len(set(found)) > 2
    time.sleep(0.4)
    assert look() == 29
    keeper.close()


def test_restore_of_a_step_that_is_not_listed_yet_finds_it(network):
    one, other = (milepost.Checkpointer(client / "run") for client in network.clients)
    one.save(state(1), 1)
    believe(network, 60)
    assert other.steps() == [1]
    one.save(state(2), 2)
    assert other.steps() == [1], "its listing is old"
    target = state(-1)
    assert other.restore(target, step=2) == 2
    assert target["n"] == 2
    with pytest.raises(milepost.CheckpointNotFound, match="there is no step 3"):
        other.restore(target, step=3)


def test_restore_passes_over_a_step_whose_handles_are_stale(network):
    for step in (1, 2):
        with milepost.Checkpointer(network.client) as keeper:
            keeper.save(state(step), step)
    for call in ("open", "read"):
        network.fail(call, errno.ESTALE, name="00000.safetensors", times=2)
        target = state(-1)
        with milepost.Checkpointer(network.clients[1]) as reader:
            assert reader.restore(target) in (1, 2)
        assert (target["a"] == target["n"]).all()
        network.heal()


def test_rank_with_an_old_view_keeps_data_of_a_committed_checkpoint(network):
    """The coordinator commits and then fails. The other rank's client still believes that there is no manifest."""
    places = [client / "step" for client in network.clients]
    milepost.save(state(1), places[0])

    class FailsAfterCommit(CountingStore):
        created = False

        def after(self, number, call):
            if call.startswith("create manifest-"):
                self.created = True
                raise milepost.StorageError("no reply", errno=errno.ETIMEDOUT)

        def before(self, number, call):
            if self.created and call.startswith(("list", "reader manifest-")):
                raise milepost.StorageError("cannot look", errno=errno.EIO)

    def work(comm):
        store = SamePath(places[comm.rank])
        own = milepost.Sharded((2,), {(comm.rank,): torch.full((1,), 2.0)})
        if comm.rank == comm.coordinator:
            store = FailsAfterCommit(store)
        else:
            assert not (places[1] / manifest_name(2)).exists()
            assert manifest_name(2) not in list(store.list("manifest-"))
        with pytest.raises(milepost.StorageError, match="no reply"):
            milepost.save({**state(2), "s": own}, store, process_group=comm)

    believe(network, 60)
    run_ranks(2, work, timeout_s=30)
    assert (places[0] / manifest_name(2)).exists(), "it was committed"
    believe(network, 0)
    assert read(places[0]) == 2


def test_save_is_not_lost_when_the_other_client_believes_its_name_is_free(network):
    """Without hard links a rename would replace the manifest that another client has just committed."""
    network.without_links()
    one, other = (client / "step" for client in network.clients)
    milepost.save(state(1), one)
    believe(network, 60)

    class Late(CountingStore):
        def before(self, number, call):
            if call.startswith("create manifest-00000002"):
                assert not (other / manifest_name(2)).exists()
                milepost.save(state(2), one)

    assert read(other) == 1
    with pytest.raises(milepost.SaveConflict):
        milepost.save(state(9), Late(LocalStore(other)))
    believe(network, 0)
    assert read(one) == 2
