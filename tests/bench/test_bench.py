"""A benchmark of a place: which contenders there are, what the ratios are of, and that nothing of it remains."""

import json
import signal
import subprocess
import sys
import time

import jsonschema
import pytest

from faults.power import Disk, NotHere
from milepost.bench.measure import measure
from milepost.bench.rounds import Contender, rows_of, run_rounds
from milepost.cli.app import main
from milepost.cli.app import milepost as group
from milepost.cli.schema import schema_of
from milepost.core.limits import MIB
from milepost.errors import InvalidRequest, StorageError
from milepost.store import MemoryStore, store_at
from tests.commit.object_places import objects
from tests.store.direct_files import does_direct


def contenders_of(found):
    return {(row.case, row.contender): row for row in found.rows}


def test_folder_is_measured_and_nothing_remains(tmp_path):
    found = measure(tmp_path / "new" / "place", size_bytes=2 * MIB, seconds=0.1)
    rows = contenders_of(found)
    expected = {
        ("durable write", "raw, cached"), ("durable write", "raw, direct"), ("durable write", "milepost.save"),
        ("read, cached", "raw"), ("read, cached", "milepost.load"),
        ("read, not cached", "raw, cached"), ("read, not cached", "raw, direct"), ("read, not cached", "milepost.load"),
        ("small write", "raw"), ("small write", "milepost.save"),
        ("small read", "raw"), ("small read", "milepost.load"),
    }  # fmt: skip
    assert set(rows) == {one for one in expected if does_direct(tmp_path) or one[1] != "raw, direct"}
    assert (found.kind, found.size_bytes, found.rounds) == ("folder", 2 * MIB, 2)
    for row in found.rows:
        assert 0 < row.fastest_s <= row.median_s <= row.slowest_s
        assert row.bytes_per_s > 0 or row.case.startswith("small")
        assert row.times_raw > 0
    assert list(tmp_path.iterdir()) == []


def test_object_store_is_measured_and_nothing_remains():
    store = objects()
    found = measure(store, size_bytes=MIB, seconds=0.1)
    assert set(contenders_of(found)) == {
        (case, who)
        for case, raw, ours in (
            ("durable write", "requests alone", "milepost.save"),
            ("read", "requests alone", "milepost.load"),
            ("small write", "one request", "milepost.save"),
            ("small read", "one request", "milepost.load"),
        )
        for who in (raw, ours)
    }
    assert store.objects == {}


def test_ratio_is_that_of_one_round():
    def contender(name, is_raw):
        return Contender("read", name, is_raw, lambda: None, lambda: None, 100)

    entries = [contender("a", True), contender("b", True), contender("ours", False)]
    rounds = [
        {"read/a": 1.0, "read/b": 2.0, "read/ours": 3.0},
        {"read/a": 20.0, "read/b": 10.0, "read/ours": 20.0},
        {"read/a": 4.0, "read/b": 5.0, "read/ours": 4.0},
    ]
    ours = rows_of(entries, rounds)[2]
    assert (ours.times_raw, ours.median_s, ours.fastest_s, ours.slowest_s) == (2.0, 4.0, 3.0, 20.0)
    assert ours.bytes_per_s == 25
    runs = []
    many = [Contender("read", str(i), True, lambda: None, lambda i=i: runs.append(i)) for i in range(4)]
    counted = run_rounds(many, 0.0)
    assert len(counted) == 2
    assert sorted(runs) == sorted(list(range(4)) * 3), "one round warms up"
    assert runs[:4] != runs[4:8] or runs[4:8] != runs[8:], "they take turns in other orders"


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="neither a folder nor an object store"):
        measure(MemoryStore(), size_bytes=MIB, seconds=0.1)
    with pytest.raises(InvalidRequest, match="only read"):
        measure("https://example.org/a", size_bytes=MIB)
    with pytest.raises(InvalidRequest, match="there is no memory for three times"):
        measure(tmp_path / "a", size_bytes=1 << 50)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_told_with_its_place(tmp_path):
    try:
        with Disk(tmp_path, "tmpfs", MIB) as disk:
            with pytest.raises(StorageError, match=r"cannot measure .*/a: No space left on device\. Free some space"):
                measure(disk.path / "a", size_bytes=4 * MIB, seconds=0.1)
            assert list(disk.path.iterdir()) == []
    except NotHere as error:
        pytest.skip(str(error))


def test_command_prints_a_table_or_json(tmp_path, capsys):
    arguments = ["bench", str(tmp_path / "place"), "--size", "1M", "--seconds", "1"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, schema_of(group.get_command(None, "bench")))
    assert found["size_bytes"] == MIB
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "TIME / RAW" in text
    assert "milepost.save" in text
    assert main([*arguments, "--size", "many"]) == 2
    assert "'many' is not a size: 256M, 1G, for example" in capsys.readouterr().err


@pytest.mark.slow
def test_interrupted_bench_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "milepost", "bench", tmp_path / "place", "--size", "64M", "--seconds", "60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("place/*/write/*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_real_object_store_is_measured(seaweed, monkeypatch):
    for key, value in seaweed.environment.items():
        monkeypatch.setenv(key, value)
    with seaweed.place() as url:
        found = measure(url, size_bytes=20 * MIB, seconds=1)
        assert all(row.median_s > 0 for row in found.rows)
        assert list(store_at(url).list("")) == []
