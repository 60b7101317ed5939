"""Tests with real frameworks: all are marked `frameworks`. Warnings of the frameworks are their own affair."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.frameworks)
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_ignore_collect(config):
    """Frameworks take long to import: where their tests do not run, the files are not imported either."""
    return True if "not frameworks" in (config.getoption("markexpr") or "") else None
