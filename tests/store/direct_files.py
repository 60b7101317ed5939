"""Files of a LocalStore that go past the page cache."""

import mmap
import os
import tempfile

import numpy as np

from milepost.core.limits import PAGE_BYTES
from milepost.store import linux

NAME = "data/file"
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


def write_blocks(store, whole, block=16 * PAGE):
    """Write as a save does: a header from bytes, blocks from aligned memory, a short table."""
    writer = store.writer(NAME, len(whole))
    writer.write(0, [whole[:PAGE]])
    for start in range(PAGE, len(whole), block):
        writer.write(start, [aligned(whole[start : start + block])])
    return writer
