"""Tests with real frameworks: all are marked `frameworks`. Warnings of the frameworks are their own affair."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.frameworks)
            item.add_marker(pytest.mark.filterwarnings("default"))
