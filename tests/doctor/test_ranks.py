"""All ranks look together: whether they see one place, and who does not."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from milepost.core.limits import KIB
from milepost.doctor.diagnose import diagnose
from milepost.store import MemoryStore
from milepost.testing import CountingStore, run_ranks

TORCHRUN = Path(sys.executable).parent / "torchrun"


def shared(found):
    return next(check for check in found.checks if check.name == "shared by all ranks")


def look(world, place_of):
    """The coordinator's diagnosis; the others have none."""
    found = run_ranks(world, lambda comm: diagnose(place_of(comm.rank), size_bytes=64 * KIB, comm=comm))
    assert found[1:] == [None] * (world - 1)
    return found[0]


def test_ranks_that_share_a_place_see_each_other(tmp_path):
    found = look(4, lambda _: tmp_path / "new" / "place")
    assert found.fit
    assert shared(found).found == "all 4 ranks on 1 machine see each other's files"
    assert [(view.rank, view.unseen, view.host) for view in found.ranks] == [
        (rank, (), socket.gethostname()) for rank in range(4)
    ]
    assert list(tmp_path.iterdir()) == []


def test_ranks_with_places_of_their_own_are_named(monkeypatch):
    monkeypatch.setattr("milepost.doctor.ranks.PATIENCE_S", 0.2)
    one, other = MemoryStore("memory://a"), MemoryStore("memory://a")
    found = look(4, lambda rank: one if rank < 3 else other)
    assert not found.fit
    assert shared(found).state == "fail"
    assert "ranks 0-2 on" in shared(found).found
    assert "do not see what rank 3 wrote" in shared(found).found
    assert "rank 3 on" in shared(found).found
    assert "does not see what ranks 0-2 wrote" in shared(found).found
    assert "Mount one file system" in shared(found).advice
    assert not one.objects
    assert not other.objects


def test_rank_that_cannot_write_is_named(monkeypatch):
    monkeypatch.setattr("milepost.doctor.ranks.PATIENCE_S", 0.2)

    class Closed(CountingStore):
        def before(self, number, call):
            if call.startswith("create"):
                raise PermissionError(13, "Permission denied")

    store = MemoryStore("memory://a")
    found = look(3, lambda rank: Closed(store) if rank == 1 else store)
    assert not found.fit
    assert f"rank 1 on {socket.gethostname()}: " in shared(found).found
    assert "Permission denied" in shared(found).found


def test_create_that_is_not_exclusive_between_ranks_is_told():
    class Overwrites(CountingStore):
        def create(self, name, *data):
            self.inner.delete(name)
            self.inner.create(name, *data)

    store = MemoryStore("memory://a")
    found = look(3, lambda _: Overwrites(store))
    assert "of 3 ranks that created one name, 3 were told" in shared(found).found


def launch(world, script, **further):
    """Run a shell script as the ranks of a job; gives how torchrun ended, and what the ranks printed."""
    command = [TORCHRUN, f"--nproc-per-node={world}", "--standalone", "--no-python", "bash", "-c", script]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{TORCHRUN.parent}:{os.environ['PATH']}", **further}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)


@pytest.mark.slow
def test_torchrun_tells_once_what_all_ranks_see(tmp_path):
    done = launch(3, f"python -m milepost doctor --json --size 64K {tmp_path / 'place'}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # of one rank only
    assert found["fit"]
    assert [view["rank"] for view in found["ranks"]] == [0, 1, 2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_torchrun_finds_a_rank_with_a_disk_of_its_own(tmp_path):
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces for this user")
    (tmp_path / "place").mkdir()
    doctor = f"python -m milepost doctor --size 64K {tmp_path / 'place'}"
    script = f"""
    if [ $RANK = 1 ]; then exec unshare -m sh -c 'mount -t tmpfs none {tmp_path / "place"} && exec {doctor}'; fi
    {doctor}
    """
    done = launch(3, script)
    assert done.returncode != 0
    assert "rank 1 on" in done.stdout
    assert "does not see what ranks 0, 2 wrote" in done.stdout
    assert "not fit for checkpoints" in done.stdout
    assert list((tmp_path / "place").iterdir()) == []


@pytest.mark.slow
def test_rank_that_never_comes_is_named(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "milepost", "doctor", "--timeout", "15", str(tmp_path / "place")]
    ranks = [
        subprocess.Popen(command, env=os.environ | job | {"RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in ("0", "2")
    ]
    for process in ranks:
        told = process.communicate(timeout=150)[1]
        assert process.returncode == 5, told
        assert "rank 1 did not come" in told
    assert list(tmp_path.iterdir()) == []
