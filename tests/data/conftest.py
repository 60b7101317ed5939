"""What the tests of the data path share."""

import pytest

from tests.data.states import mixed_state


@pytest.fixture(scope="module")
def state():
    return mixed_state()
