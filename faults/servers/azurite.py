"""Azurite: Microsoft's emulator of Azure's blob storage, from npm."""

import base64
import hashlib
import hmac
import shutil
import sys
import urllib.parse
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree as ET

from faults.servers.asking import Answer, ask
from faults.servers.object_server import BUCKET, BUCKETS, ObjectServer

ACCOUNT = "milepost"
KEY = base64.b64encode(b"a key of the tests, no secret at all").decode()
_VERSION = "2021-12-02"


class Azurite(ObjectServer):
    """Azurite's blob server, which `./scripts/setup` installs under .venv where npm is there."""

    scheme = "az"

    @staticmethod
    def why_not() -> str | None:
        """Why it cannot be started here; None if it can."""
        if not shutil.which("node"):
            return "Azurite needs node, which is not installed"
        return None if _program().is_file() else "Azurite is not installed; ./scripts/setup installs it where npm is"

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which clients find account and key."""
        return {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}

    @property
    def settings(self) -> dict[str, str]:
        """What a URL's query says besides the endpoint."""
        return {"account": ACCOUNT}

    def endpoint_at(self, host: str) -> str:
        """Here the account is part of the path."""
        return f"{host}/{ACCOUNT}"

    def own_environment(self) -> dict[str, str]:
        """The account that it serves."""
        return {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}

    def command(self) -> list[str]:
        """The command that starts it."""
        (self.folder / "data").mkdir(exist_ok=True)
        host, port = self.address
        return [
            str(shutil.which("node")), str(_program()), "--location", str(self.folder / "data"), "--blobHost", host,
            "--blobPort", str(port), "--silent", "--skipApiVersionCheck", "--disableTelemetry",
        ]  # fmt: skip

    def is_ready(self) -> bool:
        """Whether the containers are there."""
        return all(self._ask("PUT", f"/{name}", {"restype": "container"}).status in (201, 409) for name in BUCKETS)

    def remove(self, prefix: str) -> None:
        """Remove the objects below a prefix."""
        while names := self._names(prefix):
            for name in names:
                self._ask("DELETE", f"/{BUCKET}/{urllib.parse.quote(name)}", {})

    def _names(self, prefix: str) -> list[str]:
        listing = self._ask("GET", f"/{BUCKET}", {"restype": "container", "comp": "list", "prefix": f"{prefix}/"}).body
        return [found.text or "" for found in ET.fromstring(listing).iterfind("Blobs/Blob/Name")]

    def _ask(self, method: str, path: str, query: dict[str, str]) -> Answer:
        """A request with a signature by the account's key, without a body."""
        date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = {"x-ms-date": date, "x-ms-version": _VERSION}
        said = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
        asked = "".join(f"\n{name}:{value}" for name, value in sorted(query.items()))
        text = f"{method}{12 * chr(10)}{said}/{ACCOUNT}/{ACCOUNT}{path}{asked}"
        digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        target = f"/{ACCOUNT}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        return ask(self.address[1], method, target, None, headers)


def _program() -> Path:
    """Where `./scripts/setup` puts it: in the virtual environment of this Python."""
    return Path(sys.prefix, "azurite/node_modules/azurite/dist/src/blob/main.js")
