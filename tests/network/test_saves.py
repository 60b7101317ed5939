"""One client of a network file system saves: replies are lost, calls fail, machines crash."""

import contextlib
import errno
import itertools
import os

import pytest
import torch

import milepost
from faults.netfs import NetworkFiles
from milepost.commit import find
from milepost.store import LocalStore
from milepost.testing import CountingStore
from tests.network.states import read, state

LINKS = pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
CHANGES = ["link", "symlink", "create", "mkdir", "rename", "unlink", "rmdir"]
CALLS = [*CHANGES, "open", "opendir", "readdir", "read", "flush", "fsync", "fsyncdir", "store"]


def trials(network, call, break_it, prepare=lambda: None, each=1):
    """Save over a checkpoint, and break a `call` of the save: the first, the one `each` later, and so on: place, error.

    `break_it(skip)` breaks the call after so many.
    """
    for skip in itertools.count(step=each):
        place = network.client / f"{call}-{skip}" / "step"
        milepost.save(state(1), place)
        prepare()
        before = network.hits
        break_it(skip)
        try:
            milepost.save(state(2), place)
            error = None
        except milepost.CheckpointError as raised:
            error = raised
        network.heal()
        if network.hits == before:
            return
        yield place, error


@LINKS
@pytest.mark.parametrize("believed_s", [0, 60])
@pytest.mark.parametrize("call", CHANGES)
def test_lost_reply_is_not_a_failure(network, call, links, believed_s):
    if not links:
        network.without_links()

    def believe():
        network.believe(names_s=believed_s, absence_s=believed_s, attributes_s=believed_s, listings_s=believed_s)

    for place, error in trials(network, call, lambda skip: network.lose_reply(call, skip=skip), believe):
        assert error is None, f"{call} in {place}: {error!r}"
        network.believe()
        assert read(network.clients[1] / place.relative_to(network.client)) == 2
        network.crash()
        assert read(network.clients[1] / place.relative_to(network.client)) == 2, "what was saved is durable"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "links"),
    [(errno.EIO, True), (errno.ESTALE, True), (errno.EDQUOT, False)],
    ids=["EIO", "ESTALE", "EDQUOT, no links"],
)
def test_error_at_any_call_leaves_old_or_new(network, number, links, monkeypatch):
    """At every third call; row 34 of the table of faults has all."""
    monkeypatch.setattr(find, "PATIENCE_S", 0.1)  # what is stale may have been swept by a save that is not seen yet
    if not links:
        network.without_links()
    raised = 0
    for call in CALLS:

        def fail(skip, call=call):
            network.fail(call, number, skip=skip)

        for place, error in trials(network, call, fail, each=3):
            raised += error is not None
            assert read(place) in ((1, 2) if error else (2,)), f"{call} in {place}: {error!r}"
            milepost.save(state(3), place)
            assert read(place) == 3
            assert sum(path.is_file() for path in place.rglob("*")) == 2, "the next save sweeps"
    assert raised > 0


@LINKS
@pytest.mark.parametrize("call", ["unlink", "opendir", "readdir"])
def test_save_that_raises_was_not_committed(network, call, links):
    if not links:
        network.without_links()
    for place, error in trials(network, call, lambda skip: network.fail(call, errno.EIO, skip=skip)):
        assert read(place) == (1 if error else 2), f"{call} in {place}: {error!r}"


def test_save_is_told_of_writes_that_failed_late(network):
    place = network.client / "step"
    milepost.save(state(1), place)
    network.fail("store", errno.EDQUOT, name="00000.safetensors")
    with pytest.raises(milepost.StorageError, match=r"00000\.safetensors.*quota exceeded.*Free some space"):
        milepost.save(state(2), place)
    network.fail("flush", errno.EIO, name=".json.")
    with pytest.raises(milepost.StorageError, match=r"manifest-00000002\.json.*Input/output error"):
        milepost.save(state(2), place)
    assert read(place) == 1
    milepost.save(state(2), place)
    assert read(place) == 2


class _Ending(CountingStore):
    """Calls `end` before one of its calls."""

    def __init__(self, inner, at, end):
        super().__init__(inner)
        self._at, self._end = at, end

    def before(self, number, call):
        if number == self._at:
            self._end()


@pytest.mark.parametrize("links", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_machines_that_crash_at_any_call_leave_old_or_new(tmp_path, network, links):
    seen = set()
    for at in itertools.count(1):
        with NetworkFiles(tmp_path / f"{at}", clients=2) as network:
            if not links:
                network.without_links()
            one, other = (client / "step" for client in network.clients)
            milepost.save(state(1), one)

            def end(network=network):
                network.cut(0)
                network.crash()

            store = _Ending(LocalStore(one), at, end)
            with contextlib.suppress(milepost.CheckpointError):
                milepost.save(state(2), store)
            network.crash()
            found = read(other)
            seen.add(found)
            milepost.save(state(3), other)
            assert read(other) == 3
            if store.calls < at:
                assert found == 2
                break
    assert seen == {1, 2}


def test_reader_of_a_replaced_checkpoint_reads_on(network):
    """Its files have silly names while it is open, and these cannot be deleted."""
    place = network.client / "step"
    milepost.save(state(1), place)
    with milepost.open(place) as checkpoint:
        assert (checkpoint["a"][:] == 1).all()
        for number in range(2, 6):
            milepost.save(state(number), place)
            assert len([path for path in place.rglob("*.safetensors") if path.is_file()]) == 1, "old data goes"
        assert (checkpoint["a"][:] == 1).all()
        assert len(list(place.rglob(".nfs*"))) == 1
    milepost.save(state(6), place)
    assert read(place) == 6


def test_reader_can_be_closed_after_its_mount_is_gone(network):
    (network.client / "file").write_bytes(b"x" * 8192)
    open_before = len(os.listdir("/proc/self/fd"))
    reader = LocalStore(network.client).reader("file")
    reader.is_cold(0, 4096)  # opens it a second time
    network.cut(0)
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_large_state_goes_through_the_cache_without_direct_io(network):
    network.without_direct()
    large = {"t": torch.arange(3 << 20)}
    milepost.save(large, network.client / "step")
    found = {"t": torch.zeros(3 << 20, dtype=torch.int64)}
    milepost.load(found, network.clients[1] / "step")
    assert torch.equal(found["t"], large["t"])
