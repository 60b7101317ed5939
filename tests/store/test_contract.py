"""Every store passes the same contract."""

import contextlib
import errno
import os
import secrets
import threading
from pathlib import Path

import pytest

import milepost
from faults.netfs import NetworkFiles, why_not
from milepost.store import CloudStore, LocalStore, MemoryStore, Within, store_at
from milepost.store.base import CLAIM
from milepost.store.fsspec_store import FsspecStore
from milepost.store.local import LocalWriter
from milepost.testing import CountingStore, UnsyncedStore
from tests.dcp.file_systems import Moving

CLOUDS = {"s3": "seaweed"}
"""The fixture with the server of each object store."""


@pytest.fixture(
    params=[
        "local",
        "no links",
        "memory",
        "counting",
        "within",
        "within memory",
        "fsspec",
        "fsspec by move",
        "unsynced",
        "network",
        "network without links",
        *CLOUDS,
    ]
)
def store(request, tmp_path, monkeypatch):
    if request.param in CLOUDS:
        with request.getfixturevalue(CLOUDS[request.param]).place() as url:
            yield CloudStore(url)
        return
    if request.param == "no links":
        monkeypatch.setattr(os, "link", no_links)
    if request.param.startswith("network"):
        if why_not():
            pytest.skip(f"no network file system: {why_not()}")
        with NetworkFiles(tmp_path) as network:
            network.believe(attributes_s=1, names_s=1, absence_s=1, listings_s=1)
            if request.param == "network without links":
                network.without_links()
            yield LocalStore(network.client / "folder")
    else:
        yield other_store(request.param, tmp_path)


def other_store(kind, tmp_path):
    if kind in ("local", "no links"):
        return LocalStore(tmp_path / "new" / "folder")
    if kind == "memory":
        return MemoryStore()
    if kind == "unsynced":
        return UnsyncedStore()
    if kind.startswith("fsspec"):
        fsspec = pytest.importorskip("fsspec")
        fsspec.register_implementation("moving", Moving, clobber=True)
        return FsspecStore(f"{'memory' if kind == 'fsspec' else 'moving'}://{secrets.token_hex(8)}/step")
    if kind == "within":
        return Within(LocalStore(tmp_path / "outer"), "step/a")
    if kind == "within memory":
        return Within(MemoryStore(), "step")
    return CountingStore(LocalStore(tmp_path / "counted"))


def no_links(*_args, **_options):
    raise PermissionError(errno.EPERM, "Operation not permitted")


def read(store, name):
    reader = store.reader(name)
    buffer = bytearray(reader.size_bytes)
    reader.read(0, [memoryview(buffer)])
    reader.close()
    return bytes(buffer)


def write(store, name, *pieces):
    writer = store.writer(name, sum(map(len, pieces)))
    at = 0
    for piece in pieces:
        writer.write(at, [piece])
        at += len(piece)
    writer.commit()


def test_what_was_created_or_written_is_read_back(store):
    store.create("small", b"abc")
    write(store, "data/x/large", b"one", memoryview(b"two"), b"")
    assert read(store, "small") == b"abc"
    assert read(store, "data/x/large") == b"onetwo"
    reader = store.reader("data/x/large")
    buffer = bytearray(2)
    reader.read(2, [memoryview(buffer)])
    assert buffer == b"et"
    with pytest.raises(milepost.StorageError, match="ends before"):
        reader.read(5, [memoryview(bytearray(2))])
    reader.close()


def test_a_name_is_created_only_once(store):
    store.create("name", b"first")
    with pytest.raises(milepost.AlreadyExists, match="name"):
        store.create("name", b"second")
    with pytest.raises(milepost.AlreadyExists):
        store.writer("name", 0)
    assert read(store, "name") == b"first"


def test_of_many_creators_at_once_one_wins(store):
    wins, start = [], threading.Barrier(8)

    def race(i):
        start.wait()
        try:
            store.create("prize", str(i).encode() * 1000)
            wins.append(i)
        except milepost.AlreadyExists:
            pass

    threads = [threading.Thread(target=race, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert read(store, "prize") == str(wins[0]).encode() * 1000
    assert list(store.list("")) == ["prize"], "the losers leave nothing"


def test_an_aborted_object_leaves_nothing(store):
    writer = store.writer("gone/away", 100)
    writer.write(0, [b"x" * 100])
    writer.abort()
    assert list(store.list("")) == []
    with pytest.raises(FileNotFoundError):
        store.reader("gone/away")


def test_listing_is_by_prefix_and_deleting_is_idempotent(store):
    for name in ["a", "ab", "b/c", "b/d/e", "bc"]:
        store.create(name, b"")
    assert sorted(store.list("")) == ["a", "ab", "b/c", "b/d/e", "bc"]
    assert sorted(store.list("a")) == ["a", "ab"]
    assert sorted(store.list("b/")) == ["b/c", "b/d/e"]
    assert list(store.list("b/d/e")) == ["b/d/e"]
    assert list(store.list("nothing/here")) == []
    store.delete("b/d/e")
    store.delete("b/d/e")
    assert sorted(store.list("b")) == ["b/c", "bc"]


def test_a_shallow_listing_names_what_lies_deeper_once(store):
    for name in ["a", "b/c", "b/d/e", "b/d/f", "bc/g"]:
        store.create(name, b"")
    assert sorted(store.list("", shallow=True)) == ["a", "b/", "bc/"]
    assert sorted(store.list("b", shallow=True)) == ["b/", "bc/"]
    assert sorted(store.list("b/", shallow=True)) == ["b/c", "b/d/"]
    assert list(store.list("b/d/e", shallow=True)) == ["b/d/e"]
    assert list(store.list("nothing/", shallow=True)) == []


def test_objects_are_created_from_several_views_and_deleted_together(store):
    memory = bytearray(b"onetwothree")
    store.create("data/parts", memoryview(memory)[:3], b"", memoryview(memory)[3:])
    memory[:] = b"-----------"
    store.create("data/empty")
    assert read(store, "data/parts") == b"onetwothree"
    assert read(store, "data/empty") == b""
    store.delete("data/parts", "data/absent", "data/empty", durable=True)
    store.delete()
    assert list(store.list("")) == []


def test_a_known_size_is_looked_at_by_the_first_read_at_the_latest(store):
    store.create("name", b"12345")
    store.reader("name", size_bytes=5).read(0, [memoryview(bytearray(5))])
    with pytest.raises(FileNotFoundError):
        store.reader("absent", size_bytes=5).read(0, [memoryview(bytearray(5))])
    for wrong in (4, 6):
        with contextlib.suppress(milepost.CheckpointDamaged):
            reader = store.reader("name", size_bytes=wrong)
            reader.read(0, [memoryview(bytearray(2))])
            assert reader.size_bytes == 5, "a store that says nothing tells the size"


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", ".", "a\\b", "a\0b"])
def test_names_that_could_lead_out_are_refused(store, name):
    for call in (store.reader, lambda n: store.writer(n, 0), lambda n: store.create(n, b"")):
        with pytest.raises(milepost.UnsafeCheckpoint):
            call(name)


def test_local_links_pipes_and_folders_are_not_opened(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(outside / "secret")
    (root / "folder").symlink_to(outside)
    os.mkfifo(root / "pipe")
    (root / "real").mkdir()
    store = LocalStore(root)
    for name in ["link", "folder/secret", "pipe", "real"]:
        with pytest.raises(milepost.UnsafeCheckpoint, match=r"link|regular"):
            store.reader(name)
    assert list(store.list("folder/")) == []


def test_the_checkpoints_own_folder_may_be_reached_through_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    LocalStore(tmp_path / "alias").create("a", b"1")
    assert read(LocalStore(tmp_path / "real"), "a") == b"1"


def test_without_hard_links_a_claim_and_a_rename_do(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = LocalStore(tmp_path)
    store.create("name", b"whole")
    with pytest.raises(milepost.AlreadyExists):
        store.create("name", b"other")
    assert read(store, "name") == b"whole"
    assert list(store.list("")) == ["name"]


def test_without_hard_links_a_name_that_another_has_claimed_is_taken(tmp_path, monkeypatch):
    """It is between its claim and its rename, or died there."""

    def refuse(*_args, **_kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = LocalStore(tmp_path)
    (tmp_path / f"name{CLAIM}").write_bytes(b"")
    with pytest.raises(milepost.AlreadyExists):
        store.create("name", b"other")
    assert list(store.list("")) == [f"name{CLAIM}"], "which is not ours to remove"


def test_writer_with_a_swept_temporary_file_finds_the_name_taken(tmp_path, monkeypatch):
    link = os.link

    def late(temporary, path):
        os.rename(temporary, path)
        link(temporary, path)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(milepost.AlreadyExists):
        LocalStore(tmp_path).create("name", b"whole")
    assert os.listdir(tmp_path) == ["name"]


def test_a_full_disk_and_missing_rights_say_what_and_where(tmp_path):
    full = LocalWriter(Path("/dev/full"), os.open("/dev/full", os.O_WRONLY), tmp_path, 0, direct=False)
    with pytest.raises(
        milepost.StorageError, match=r"cannot write /dev/full: No space left .* Free some space"
    ) as caught:
        full.write(0, [b"x"])
    assert caught.value.errno == 28
    assert isinstance(caught.value, OSError)
    (tmp_path / "file").write_text("")
    with pytest.raises(milepost.StorageError, match=r"cannot create .*file/x"):
        LocalStore(tmp_path / "file").create("x", b"")


def test_places_are_paths_urls_or_stores(tmp_path):
    assert store_at(tmp_path).url == str(tmp_path)
    assert store_at(f"file://{tmp_path}").url == str(tmp_path)
    assert store_at("memory://contract/a") is store_at("memory://contract/a")
    store = MemoryStore()
    assert store_at(store) is store
    # All of a file URL is its path: two places must not become one.
    assert store_at(f"file://{tmp_path}/a?b#c").url == f"{tmp_path}/a?b#c"
    assert store_at("file:///a%fe").url != store_at("file:///a%ff").url
    for bad in ["", "nowhere://a", "s3://", "file://host/x", "file://", "file://localhost", "a\0b", "a\ud800"]:
        with pytest.raises(milepost.InvalidRequest):
            store_at(bad)
