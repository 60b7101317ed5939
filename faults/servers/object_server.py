"""What the object stores of this folder have in common: a life, an address, and a new place for each test."""

import contextlib
import os
import secrets
import shutil
import tempfile
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Self

from faults.servers.owned import NotStarted, OwnedProcess, free_ports

BUCKET = "milepost"
BUCKETS = (BUCKET, "my-bucket", "my-container")
"""All that a server has: the first is for tests, the others are those that the documentation names."""
_ATTEMPTS = 3


class ObjectServer(ABC):
    """A server with one bucket and its data in a folder of its own, which is removed at the end.

    with SeaweedFS() as server, server.place() as url:
        milepost.save(state, url)

    `kill` and `start` stop it as a crash does, and start it again at the same address.
    """

    scheme: ClassVar[str]
    """Of URLs."""
    port_names: ClassVar[tuple[str, ...]] = ("main",)
    """What it needs ports for. The first one is for clients."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where its data goes; by default the temporary folder."""
        self._parent = folder
        self._process: OwnedProcess | None = None
        self.ports: dict[str, int] = {}

    @staticmethod
    @abstractmethod
    def why_not() -> str | None:
        """Why it cannot be started here; None if it can."""

    @property
    @abstractmethod
    def environment(self) -> dict[str, str]:
        """The environment in which Milepost and other clients find the credentials."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, str]:
        """What a URL's query says besides the endpoint."""

    @abstractmethod
    def command(self) -> list[str]:
        """The command that starts it on the data in `folder`."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it takes requests, and the bucket is there. May raise OSError if not."""

    @abstractmethod
    def remove(self, prefix: str) -> None:
        """Remove the objects below a prefix."""

    # --- what clients need

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return "127.0.0.1", self.ports[self.port_names[0]]

    @property
    def endpoint(self) -> str:
        """The URL that clients take as endpoint."""
        return self.endpoint_at("http://{}:{}".format(*self.address))

    def endpoint_at(self, host: str) -> str:
        """The endpoint for clients that reach it at another host, such as that of a proxy."""
        return host

    def url(self, prefix: str, host: str | None = None, **settings: str) -> str:
        """The URL of a prefix in the bucket; by way of another host, such as that of a proxy; with more settings."""
        endpoint = self.endpoint_at(host) if host else self.endpoint
        query = urllib.parse.urlencode({"endpoint": endpoint, **self.settings, **settings}, safe=":/")
        return f"{self.scheme}://{BUCKET}/{prefix}?{query}"

    @contextlib.contextmanager
    def place(self, host: str | None = None, **settings: str) -> Iterator[str]:
        """The URL of a new, empty prefix. Inside, this process has the credentials in its environment.

        A process that was started before needs `environment`. The objects are removed at the end.
        """
        prefix = f"place-{secrets.token_hex(6)}"
        with set_environment(self.environment):
            try:
                yield self.url(prefix, host, **settings)
            finally:
                if self.is_running:
                    self.remove(prefix)

    # --- its life

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix=f"{type(self).__name__.lower()}-", dir=self._parent))
        for left in reversed(range(_ATTEMPTS)):
            self.ports = dict(zip(self.port_names, free_ports(len(self.port_names)), strict=True))
            try:
                self.start()
                break
            except NotStarted:  # another process may have taken a port
                if not left:
                    self.__exit__()
                    raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Start it on the data that it has. Returns once it takes requests."""
        environment = {**os.environ, "HOME": str(self.folder), **self.own_environment()}
        self._process = OwnedProcess(self.command(), self.folder / "log", environment)
        self._process.wait_until(self._is_ready)

    def own_environment(self) -> dict[str, str]:
        """What the server itself needs in its environment."""
        return {}

    def kill(self) -> None:
        """`kill -9`. `start` starts it again."""
        if self._process:
            self._process.kill()

    @property
    def is_running(self) -> bool:
        """Whether it was started, and has not ended."""
        return self._process is not None and self._process.is_running

    @property
    def log_tail(self) -> str:
        """The end of its log."""
        return self._process.log_tail if self._process else ""

    def _is_ready(self) -> bool:
        try:
            return self.is_ready()
        except OSError:
            return False


@contextlib.contextmanager
def set_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these variables of this process; afterwards each is as it was."""
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
