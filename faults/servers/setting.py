"""The environment of this process, for a while."""

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def set_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these variables; afterwards each is as it was."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
