"""Stores whose files go past the page cache."""

import pytest

from milepost.store import LocalStore, local
from tests.store.direct_files import does_direct


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
