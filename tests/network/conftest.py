"""A network file system with two clients."""

import pytest

from faults.netfs import NetworkFiles, why_not


@pytest.fixture
def network(tmp_path):
    if why_not():
        pytest.skip(f"no network file system: {why_not()}")
    with NetworkFiles(tmp_path / "network", clients=2) as files:
        yield files
