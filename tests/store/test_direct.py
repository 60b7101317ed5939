"""The local store writes and reads the right bytes by whatever way they go: past the page cache, through it, in pieces."""

import ctypes
import errno
import gc
import mmap
import os
import shutil
import tempfile
import threading
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import milepost
from milepost.core.limits import KIB, PAGE_BYTES
from milepost.store import LocalStore, linux, local
from tests.strategies import examples

NAME = "data/file"
FROM = local._DIRECT_FROM_BYTES
PAGE = PAGE_BYTES


def content(size, seed=0):
    return np.random.default_rng(seed).bytes(size)


def aligned(data, shift=0):
    """The same bytes in memory that starts `shift` bytes behind a page boundary."""
    memory = memoryview(mmap.mmap(-1, len(data) + shift + 1))[shift : shift + len(data)]
    memory[:] = data
    return memory


def path_of(store):
    return store.root / NAME


def read(store, offset=0, length=None):
    reader = store.reader(NAME)
    buffer = bytearray(reader.size_bytes - offset if length is None else length)
    reader.read(offset, [memoryview(buffer)])
    reader.close()
    return bytes(buffer)


def does_direct(folder):
    with tempfile.TemporaryFile(dir=folder) as file:
        handle = linux.direct_handle(file.fileno(), os.O_RDONLY)
    if handle is not None:
        os.close(handle)
    return handle is not None


@pytest.fixture
def store(tmp_path):
    """A store whose files all go past the cache, where the file system can do that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_DIRECT_FROM_BYTES", 1)
        yield LocalStore(tmp_path)


@pytest.fixture
def direct(store):
    if not does_direct(store.root):
        pytest.skip("no direct I/O on this file system")
    return store


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
def test_writes_in_any_order_from_several_threads_and_any_memory_give_the_file(data, size, direct, seed):
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


def test_only_what_is_aligned_goes_past_the_cache_and_the_rest_does_not_stop_it(direct, monkeypatch):
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


def write_blocks(store, whole, block=16 * PAGE):
    """Write as a save does: a header from bytes, blocks from aligned memory, a short table."""
    writer = store.writer(NAME, len(whole))
    writer.write(0, [whole[:PAGE]])
    for start in range(PAGE, len(whole), block):
        writer.write(start, [aligned(whole[start : start + block])])
    return writer


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
def test_where_direct_io_is_refused_at_a_write_the_rest_goes_through_the_cache(direct, monkeypatch, at, number):
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


def test_a_file_larger_than_the_file_system_can_hold_is_refused_by_a_real_one(store):
    with pytest.raises(milepost.StorageError, match=str(path_of(store))) as caught:
        store.writer(NAME, 2**62)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    assert not path_of(store).exists()


def test_a_file_that_became_shorter_is_an_error_and_its_holes_read_as_zeros(store):
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


# ---- reading past the cache


def drop_cache(path):
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def kept_file(size, seed):
    with tempfile.TemporaryDirectory() as folder:
        store, whole = LocalStore(folder), content(size, seed)
        writer = store.writer(NAME, size, direct=False)
        writer.write(0, [whole])
        writer.commit()
        yield store, whole


@examples(40)
@given(st.data(), st.integers(1, 30 * PAGE), st.booleans(), st.booleans())
def test_cold_reads_give_the_same_bytes_as_others(data, size, ask, drop):
    with kept_file(size, size) as (store, whole):
        if drop:
            drop_cache(path_of(store))
        reader = store.reader(NAME)
        if ask:
            reader.is_cold(0, size)
        for _ in range(4):
            start = data.draw(st.integers(0, (size - 1) // PAGE)) * PAGE
            length = data.draw(st.integers(0, size - start) | st.just(size - start))
            block = aligned(bytes(length))
            reader.read_cold(start, block)
            assert block == whole[start : start + length] == read(store, start, length)
        reader.close()


def test_what_was_just_written_is_warm_and_what_was_dropped_is_cold():
    with kept_file(512 * KIB, 1) as (store, whole):
        reader = store.reader(NAME)
        assert not reader.is_cold(0, len(whole))
        assert not reader.is_cold(100 * PAGE, PAGE)
        assert not reader.is_cold(len(whole), PAGE), "behind the end there is nothing to get"
        drop_cache(path_of(store))
        if not reader.is_cold(0, len(whole)):
            pytest.skip("this file system keeps its pages, or does no direct I/O")
        block = aligned(bytes(len(whole)))
        reader.read_cold(0, block)
        assert block == whole
        assert reader.is_cold(0, len(whole)), "it went past the cache"
        reader.read(0, [block])
        assert not reader.is_cold(0, len(whole))
        reader.close()
        assert not reader.is_cold(0, len(whole))


def test_what_went_past_the_cache_is_cold(direct):
    write_blocks(direct, content(100 * PAGE)).commit()
    assert direct.reader(NAME).is_cold(PAGE, 90 * PAGE)


def test_a_reader_that_is_forgotten_closes_its_files_and_mappings(store):
    write_blocks(store, content(20 * PAGE)).commit()
    gc.collect()
    handles = len(os.listdir("/proc/self/fd"))
    readers = [store.reader(NAME) for _ in range(20)]
    for reader in readers:
        reader.is_cold(0, PAGE)
    assert len(os.listdir("/proc/self/fd")) >= handles + 20
    del reader, readers
    assert len(os.listdir("/proc/self/fd")) == handles
    assert str(path_of(store)) not in Path("/proc/self/maps").read_text()


def test_a_writer_closes_its_files_whether_it_commits_or_aborts(store):
    gc.collect()
    handles = len(os.listdir("/proc/self/fd"))
    write_blocks(store, content(20 * PAGE)).commit()
    store.delete(NAME)
    write_blocks(store, content(20 * PAGE)).abort()
    assert len(os.listdir("/proc/self/fd")) == handles
