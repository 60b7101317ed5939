"""The file system that the other tests here use is as bad as it says."""

import errno
import os
import time
from contextlib import contextmanager

import pytest

STALE_S = 0.6


@contextmanager
def fails(*numbers):
    with pytest.raises(OSError) as caught:
        yield
    assert caught.value.errno in numbers, caught.value


def test_clients_see_the_same_files(network):
    one, other = network.clients
    (one / "a" / "b").mkdir(parents=True)
    (one / "a" / "b" / "file").write_bytes(b"x" * 3_000_000)
    os.link(one / "a" / "b" / "file", one / "second")
    assert (other / "second").read_bytes() == b"x" * 3_000_000
    assert os.path.samefile(other / "second", other / "a" / "b" / "file")
    os.rename(other / "second", other / "third")
    os.unlink(other / "a" / "b" / "file")
    assert sorted(str(path.relative_to(one)) for path in one.rglob("*")) == ["a", "a/b", "third"]


def test_names_absences_and_listings_are_believed(network):
    one, other = network.clients
    (one / "old").write_text("1")
    network.believe(names_s=STALE_S, absence_s=STALE_S, listings_s=STALE_S, attributes_s=STALE_S)
    assert os.listdir(other) == ["old"]
    assert not (other / "new").exists()
    assert (other / "old").exists()
    os.unlink(one / "old")
    (one / "new").write_text("2")
    assert os.listdir(one) == ["new"], "own changes are seen at once"
    assert os.listdir(other) == ["old"]
    assert not (other / "new").exists()
    assert (other / "old").exists()
    with fails(errno.EEXIST):  # an exclusive create asks the server
        os.open(other / "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    time.sleep(STALE_S + 0.1)  # the kernel counts in jiffies
    assert os.listdir(other) == ["new"]
    assert (other / "new").read_text() == "2"
    assert not (other / "old").exists()


def test_writes_are_seen_after_close_and_open(network):
    one, other = network.clients
    network.believe(names_s=60, attributes_s=60)
    with (one / "file").open("wb", buffering=0) as file:
        file.write(b"first")
        assert (one / "file").read_bytes() == b"first"
        assert (other / "file").read_bytes() == b""
    assert os.stat(other / "file").st_size == 0, "attributes are believed"
    with (other / "file").open("rb") as reader:
        assert os.fstat(reader.fileno()).st_size == 5, "an open asks for them"
        assert reader.read() == b"first"
        with (one / "file").open("r+b") as file:
            file.write(b"FIRST")
        reader.seek(0)
        assert reader.read() == b"first"
    assert (other / "file").read_bytes() == b"FIRST"


def test_lost_replies_look_like_failures(network):
    root = network.client
    (root / "file").write_text("x")
    for call in ("mkdir", "link", "create", "rename", "unlink", "rmdir"):
        network.lose_reply(call, name="new")
    with fails(errno.EEXIST):
        os.link(root / "file", root / "new-link")
    assert os.path.samefile(root / "file", root / "new-link")
    with fails(errno.EEXIST):
        os.open(root / "new-file", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    with fails(errno.EEXIST):
        os.mkdir(root / "new-folder")
    with fails(errno.ENOENT):
        os.rename(root / "file", root / "new-name")
    with fails(errno.ENOENT):
        os.unlink(root / "new-name")
    with fails(errno.ENOENT):
        os.rmdir(root / "new-folder")
    assert sorted(os.listdir(root)) == ["new-file", "new-link"]
    assert network.hits == 6
    os.unlink(root / "new-file")


def test_what_another_client_deleted_is_stale(network):
    one, other = network.clients
    (one / "folder").mkdir()
    (one / "folder" / "file").write_text("x")
    folder = os.open(other / "folder", os.O_RDONLY)
    reader = os.open(other / "folder" / "file", os.O_RDONLY)
    os.unlink(one / "folder" / "file")
    os.rmdir(one / "folder")
    for call in (lambda: os.pread(reader, 1, 0), lambda: os.listdir(folder), lambda: os.fsync(folder)):
        with fails(errno.ESTALE):
            call()
    with fails(errno.ESTALE):
        os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=folder)
    os.close(reader)
    os.close(folder)
    with fails(errno.ENOENT):
        os.stat(other / "folder" / "file")


def test_open_file_keeps_a_silly_name_until_it_is_closed(network):
    one, other = network.clients
    (one / "folder").mkdir()
    (one / "folder" / "file").write_text("x")
    with (one / "folder" / "file").open() as file:
        os.unlink(one / "folder" / "file")
        (silly,) = os.listdir(other / "folder")
        assert silly.startswith(".nfs")
        with fails(errno.ENOTEMPTY):
            os.rmdir(one / "folder")
        with fails(errno.EBUSY):
            os.unlink(one / "folder" / silly)
        assert file.read() == "x"
    deadline = time.monotonic() + 5  # the kernel tells of a close after it has returned
    while os.listdir(one / "folder") and time.monotonic() < deadline:
        time.sleep(0.01)
    os.rmdir(one / "folder")


def test_what_is_missing_is_refused(network):
    root = network.client
    (root / "file").write_text("x")
    network.without_links(errno.EOPNOTSUPP)
    network.without_direct()
    with fails(errno.EOPNOTSUPP):
        os.link(root / "file", root / "link")
    with fails(errno.EINVAL):
        os.open(root / "file", os.O_RDONLY | os.O_DIRECT)
    with fails(errno.EOPNOTSUPP, errno.ENOSYS):
        os.open(root, os.O_TMPFILE | os.O_WRONLY)
    with (root / "file").open("wb") as file, fails(errno.EOPNOTSUPP, errno.ENOSYS):
        _fallocate(file.fileno())


def _fallocate(handle):
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(handle, 0, ctypes.c_int64(0), ctypes.c_int64(100)):
        raise OSError(ctypes.get_errno(), "fallocate")


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_write_errors_come_with_sync_or_close(network, error):
    for end in (os.fsync, os.close):
        network.fail("store", error, name="file")
        file = os.open(network.client / "file", os.O_CREAT | os.O_WRONLY)
        os.write(file, b"lost")
        with fails(error):
            end(file)
        if end is os.fsync:
            os.close(file)
        assert (network.client / "file").read_bytes() == b""


def test_cut_client_loses_what_it_has_not_sent(network):
    one, other = network.clients
    (one / "closed").write_bytes(b"closed")
    written = os.open(one / "written", os.O_CREAT | os.O_WRONLY)
    os.write(written, b"written")
    network.cut(0)
    with fails(errno.ENOTCONN, errno.ECONNABORTED):
        os.fsync(written)
    with fails(errno.ENOTCONN, errno.ECONNABORTED):
        os.close(written)
    assert {path.name: path.read_bytes() for path in other.iterdir()} == {"closed": b"closed", "written": b""}


def test_crashed_server_loses_what_was_not_synced(network):
    root = network.client
    for name in ("kept", "emptied"):
        with (root / name).open("wb") as file:
            file.write(b"bytes")
            file.flush()
            if name == "kept":
                os.fsync(file.fileno())
    folder = os.open(root, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    os.link(root / "kept", root / "second")
    (root / "folder").mkdir()
    network.crash()
    assert {path.name: path.read_bytes() for path in root.iterdir()} == {"kept": b"bytes", "emptied": b""}
