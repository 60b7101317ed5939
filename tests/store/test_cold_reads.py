"""The local store reads the right bytes past the page cache, and closes what it opened."""

import gc
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.core.limits import KIB
from milepost.store import LocalStore
from tests.store.direct_files import NAME, PAGE, aligned, content, path_of, read, write_blocks
from tests.strategies import examples

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
