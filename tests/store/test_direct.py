"""The local store writes the right bytes past the page cache, through it, and in pieces; errors say what and where."""

import ctypes
import errno
import gc
import os
import shutil
import tempfile
import threading
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import milepost
from milepost.store import LocalStore, linux, local
from tests.store.direct_files import NAME, PAGE, aligned, content, does_direct, path_of, read, write_blocks
from tests.strategies import examples

FROM = local._DIRECT_FROM_BYTES


# ---- any writes give the file


@st.composite
def ranges(draw, size):
    """Cuts of 0..size, many of them at page boundaries."""
    pages = st.integers(0, size // PAGE).map(lambda n: n * PAGE)
    cuts = sorted({0, size, *draw(st.lists(pages | st.integers(0, size), max_size=9))})
    return list(pairwise(cuts))


def views_of(data, kind, rng):
    """The bytes as views: one or several, empty ones between, in memory of this kind."""
    if kind == "aligned":
        return [aligned(data)]
    if kind == "unaligned":
        return [aligned(data, rng.choice([1, 8, 512]))]
    cuts = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 1, 5, 3000])))})
    parts = [data[a:b] for a, b in pairwise(cuts)]
    make = {"bytes": bytes, "bytearray": bytearray, "views": aligned}[kind if len(parts) < 100 else "bytes"]
    return [b"", *map(make, parts), bytearray()]


@examples(60)
@given(st.data(), st.integers(0, 40 * PAGE), st.booleans(), st.integers(0, 999))
def test_writes_in_any_order_and_memory_give_the_file(data, size, direct, seed):
    whole, rng = content(size, seed), Random(seed)
    kinds = st.sampled_from(["aligned", "unaligned", "bytes", "bytearray", "views"])
    jobs = [(start, stop, data.draw(kinds)) for start, stop in data.draw(ranges(size))]
    rng.shuffle(jobs)
    errors = []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_DIRECT_FROM_BYTES", 1)
        store = LocalStore(folder)
        writer = store.writer(NAME, size, direct=direct)

        def work(mine):
            try:
                for start, stop, kind in mine:
                    writer.write(start, views_of(whole[start:stop], kind, Random(start)))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(jobs[i::3],)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.commit()
        assert errors == []
        assert path_of(store).read_bytes() == whole
        assert read(store) == whole


@pytest.mark.parametrize("size", [FROM - 1, FROM, FROM + 1, FROM + PAGE])
@pytest.mark.parametrize("direct", [True, False])
def test_only_large_files_go_past_the_cache_and_only_if_they_may(tmp_path, size, direct):
    store, whole = LocalStore(tmp_path), content(size)
    writer = store.writer(NAME, size, direct=direct)
    assert writer.aligned == (direct and size >= FROM and does_direct(tmp_path))
    writer.write(0, [aligned(whole)])
    writer.commit()
    assert path_of(store).read_bytes() == whole


def test_only_aligned_data_goes_past_the_cache(direct, monkeypatch):
    calls, pwrite = [], os.pwrite

    def record(handle, data, offset):
        calls.append((offset, len(data)))
        return pwrite(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", record)
    whole = content(20 * PAGE + 77)
    writer = direct.writer(NAME, len(whole))
    writer.write(0, [whole[:PAGE]])
    writer.write(PAGE, [aligned(whole[PAGE : 4 * PAGE], shift=64)])
    writer.write(4 * PAGE, [aligned(whole[4 * PAGE : 5 * PAGE]), aligned(whole[5 * PAGE : 6 * PAGE])])
    writer.write(6 * PAGE, [aligned(whole[6 * PAGE : 7 * PAGE - 1])])
    writer.write(7 * PAGE - 1, [aligned(whole[7 * PAGE - 1 : 9 * PAGE])])
    assert calls == []
    writer.write(9 * PAGE, [aligned(whole[9 * PAGE :])])
    assert calls == [(9 * PAGE, 11 * PAGE)]
    assert writer.aligned
    writer.commit()
    assert path_of(direct).read_bytes() == whole


def test_more_views_than_the_kernel_takes_at_once_are_written_and_read(store):
    whole = content(3000 * 37)
    writer = store.writer(NAME, len(whole))
    writer.write(0, [memoryview(whole)[i : i + 37] for i in range(0, len(whole), 37)])
    writer.commit()
    buffers = [bytearray(37) for _ in range(3000)]
    reader = store.reader(NAME)
    reader.read(0, [view for buffer in buffers for view in (memoryview(b"")[:0], memoryview(buffer))])
    assert b"".join(buffers) == whole


@pytest.fixture
def tmpfs():
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    if ["/dev/shm", "tmpfs"] not in mounts:
        pytest.skip("no tmpfs here")
    folder = tempfile.mkdtemp(dir="/dev/shm")
    yield LocalStore(folder)
    shutil.rmtree(folder)


def test_on_tmpfs_files_are_right_and_never_cold(tmpfs):
    whole = content(FROM + 5)
    writer = tmpfs.writer(NAME, len(whole))
    writer.write(0, [whole[:PAGE]])
    writer.write(PAGE, [aligned(whole[PAGE:])])
    writer.commit()
    assert read(tmpfs) == whole
    reader = tmpfs.reader(NAME)
    assert not reader.is_cold(0, len(whole))
    block = aligned(bytes(len(whole)))
    reader.read_cold(0, block)
    assert block == whole


def test_on_tmpfs_nothing_is_copied_to_be_aligned(tmpfs):
    writer = tmpfs.writer(NAME, FROM)
    writer.abort()
    assert not writer.aligned


# ---- file systems that refuse, or do less than they were asked for


def test_where_direct_io_is_refused_at_open_all_goes_through_the_cache(store, monkeypatch):
    monkeypatch.setattr(linux, "direct_handle", lambda *_: None)
    whole = content(100 * PAGE + 77)
    writer = write_blocks(store, whole)
    assert not writer.aligned
    writer.commit()
    reader = store.reader(NAME)
    assert not reader.is_cold(0, len(whole))
    block = aligned(bytes(len(whole)))
    reader.read_cold(0, block)
    assert block == whole == path_of(store).read_bytes()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP])
@pytest.mark.parametrize("at", [1, 3])
def test_direct_io_refused_at_a_write_falls_back_to_the_cache(direct, monkeypatch, at, number):
    calls, pwrite = [], os.pwrite

    def refuse(handle, data, offset):
        calls.append(offset)
        if len(calls) == at:
            raise OSError(number, os.strerror(number))
        return pwrite(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    whole = content(100 * PAGE + 77)
    writer = write_blocks(direct, whole)
    assert not writer.aligned
    assert len(calls) == at, "it is not tried again"
    writer.commit()
    assert path_of(direct).read_bytes() == whole


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_where_direct_io_is_refused_at_a_read_the_cache_serves(direct, monkeypatch, number):
    whole = content(20 * PAGE + 77)
    write_blocks(direct, whole).commit()
    reader, preadv = direct.reader(NAME), os.preadv
    reader.is_cold(0, len(whole))

    def refuse(handle, views, offset):
        if handle == reader._direct:
            raise OSError(number, os.strerror(number))
        return preadv(handle, views, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    block = aligned(bytes(len(whole)))
    reader.read_cold(0, block)
    assert block == whole


def plain_write(handle, data, offset):
    """Write through another handle: a direct one takes no part of a page."""
    other = os.open(f"/proc/self/fd/{handle}", os.O_WRONLY)
    try:
        return os.pwritev(other, [data], offset)
    finally:
        os.close(other)


@pytest.mark.parametrize("most", [1, 511, PAGE, PAGE + 1, 3 * PAGE, 7 * PAGE - 1])
def test_writes_and_reads_that_stop_early_are_carried_on(direct, monkeypatch, most):
    whole = content(50 * PAGE + 77 if most >= PAGE else 3 * PAGE + 77)
    pwrite, pwritev, preadv = os.pwrite, os.pwritev, os.preadv
    short = []

    def write_some(handle, data, offset):
        assert offset % PAGE == 0, "a direct write starts at a page"
        short.append(offset)
        return (pwrite if most % PAGE == 0 else plain_write)(handle, data[:most], offset)

    def some_of(move):
        def moved(handle, views, offset):
            # The first views whole and one of them in part, as the kernel does it.
            room, taken = most, []
            for view in views:
                taken.append(view[:room])
                room -= len(taken[-1])
                if not room:
                    break
            return move(handle, taken, offset)

        return moved

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write_some)
        if most % PAGE == 0:
            patch.setattr(os, "pwritev", some_of(pwritev))
        writer = write_blocks(direct, whole, 16 * PAGE)
        writer.commit()
    assert short, "some of it went past the cache"
    assert writer.aligned, "that one write stopped early says nothing about the next"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", some_of(pwritev))
        writer = direct.writer("data/cached", len(whole), direct=False)
        writer.write(0, [whole[:100], b"", whole[100:5000], whole[5000:]])
        writer.commit()
    assert path_of(direct).read_bytes() == (direct.root / "data/cached").read_bytes() == whole
    reader = direct.reader(NAME)
    reader.is_cold(0, len(whole))
    monkeypatch.setattr(os, "preadv", some_of(preadv))
    first, rest = bytearray(1234), bytearray(len(whole) - 1234)
    reader.read(0, [memoryview(first), memoryview(rest)])
    assert first + rest == whole
    block = aligned(bytes(len(whole)))
    reader.read_cold(0, block)
    assert block == whole


@pytest.mark.parametrize("call", ["pwrite", "pwritev"])
def test_a_write_that_makes_no_progress_is_an_error_and_not_a_loop(direct, monkeypatch, call):
    calls = []

    def nothing(*_):
        calls.append(call)
        if len(calls) > 100:
            pytest.fail("it is tried for ever")
        return 0

    writer = direct.writer(NAME, 2 * PAGE, direct=call == "pwrite")
    monkeypatch.setattr(os, call, nothing)
    try:
        with pytest.raises(milepost.StorageError, match=NAME):
            writer.write(0, [aligned(bytes(2 * PAGE))])
    finally:
        writer.abort()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["pwrite", "pwritev", "fsync"])
def test_an_error_of_the_disk_says_what_and_where_and_leaves_nothing(direct, monkeypatch, call, number):
    whole, failed = content(20 * PAGE + 77), []

    def fail(*_):
        failed.append(call)
        raise OSError(number, os.strerror(number))

    writer = direct.writer(NAME, len(whole))
    monkeypatch.setattr(os, call, fail)

    def finish():
        writer.write(0, [aligned(whole)])
        writer.commit()

    with pytest.raises(milepost.StorageError) as caught:
        finish()
    writer.abort()
    writer.abort()
    assert failed
    assert caught.value.errno == number
    assert str(path_of(direct)) in str(caught.value)
    assert os.strerror(number) in str(caught.value)
    assert ("Free some space" in str(caught.value)) == (number != errno.EIO)
    assert [path for path in direct.root.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("cold", [True, False])
def test_an_error_while_reading_says_what_and_where(direct, monkeypatch, cold):
    write_blocks(direct, content(20 * PAGE)).commit()
    reader = direct.reader(NAME)
    reader.is_cold(0, PAGE)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(milepost.StorageError, match=f"cannot read {path_of(direct)}: Input/output error") as caught:
        (reader.read_cold if cold else lambda at, block: reader.read(at, [block]))(0, aligned(bytes(PAGE)))
    assert caught.value.errno == errno.EIO


# ---- making room


def test_room_is_made_before_anything_is_written(store):
    writer = store.writer(NAME, 100 * PAGE)
    status = path_of(store).stat()
    writer.abort()
    if status.st_size == 0:
        pytest.skip("this file system does not reserve")
    assert status.st_size == 100 * PAGE
    assert status.st_blocks * 512 >= 100 * PAGE, "reserved, not a hole"


def set_fallocate(monkeypatch, number):
    def fallocate(*_):
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(linux, "_fallocate", fallocate)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR, None])
def test_a_file_system_that_cannot_reserve_is_let_be(store, monkeypatch, number):
    if number is None:
        monkeypatch.setattr(linux, "_fallocate", None)
    else:
        set_fallocate(monkeypatch, number)
    whole = content(20 * PAGE + 77)
    writer = store.writer(NAME, len(whole))
    half = 10 * PAGE
    writer.write(half, [aligned(whole[half:])])
    writer.write(0, [aligned(whole[:half])])
    writer.commit()
    assert path_of(store).read_bytes() == whole


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_without_room_the_save_ends_before_it_writes_and_leaves_nothing(store, monkeypatch, number):
    set_fallocate(monkeypatch, number)
    gc.collect()
    handles = len(os.listdir("/proc/self/fd"))
    with pytest.raises(milepost.StorageError, match=f"make room for {path_of(store)}: .* Free some space") as caught:
        store.writer(NAME, PAGE)
    assert caught.value.errno == number
    assert not path_of(store).exists()
    assert len(os.listdir("/proc/self/fd")) == handles


def test_file_too_large_for_the_file_system_is_refused(store, place):
    if place != "here":
        pytest.skip("that file system does not reserve")
    with pytest.raises(milepost.StorageError, match=str(path_of(store))) as caught:
        store.writer(NAME, 2**62)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    assert not path_of(store).exists()


def test_shortened_file_is_an_error_and_holes_read_as_zeros(store):
    write_blocks(store, content(20 * PAGE)).commit()
    reader = store.reader(NAME)
    reader.is_cold(0, PAGE)
    os.truncate(path_of(store), 10 * PAGE)
    for get in (reader.read_cold, lambda at, block: reader.read(at, [block])):
        with pytest.raises(milepost.StorageError, match="ends before byte 81920"):
            get(0, aligned(bytes(20 * PAGE)))
    os.truncate(path_of(store), 20 * PAGE)
    block = aligned(b"x" * 10 * PAGE)
    reader.read_cold(10 * PAGE, block)
    assert not any(block)


def test_a_writer_closes_its_files_whether_it_commits_or_aborts(store):
    gc.collect()
    handles = len(os.listdir("/proc/self/fd"))
    write_blocks(store, content(20 * PAGE)).commit()
    store.delete(NAME)
    write_blocks(store, content(20 * PAGE)).abort()
    assert len(os.listdir("/proc/self/fd")) == handles
