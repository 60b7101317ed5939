"""Places on the web: `https://` and `http://` URLs, which are only read.

HTTP has no listing. So `list` tries names: the manifests of the first generations, and the files by which other formats
are recognised. Where a place has been saved to more often, the URL of the manifest itself says which one is meant.
"""

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import SplitResult, quote, unquote

from milepost.core.limits import KIB, MIB
from milepost.core.manifest import generation_of, manifest_name
from milepost.errors import CheckpointDamaged, StorageError
from milepost.store.base import OneWayReader, Traits, check_name, top_names
from milepost.store.http_client import REFUSED, Found, HttpClient, HttpRefusal, login_of, refuse_change, split
from milepost.store.read_only import ReadOnlyStore
from milepost.store.stopping import side_by_side

TRIED_GENERATIONS = 32
"""The manifests of how many generations are looked for by name."""
_KNOWN = (
    ".metadata",
    "__0.metadata",
    "model.safetensors.index.json",
    "model.safetensors",
    "adapter_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
)
_AT_ONCE = 16
_TRIED_AT_ONCE = 4
"""How many names are tried at once. Simple servers let few connections wait."""
_REMEMBERED_S = 2.0
"""How long it is believed whether a name is there: one call lists a place several times."""
_FIRST_BYTES = 256 * KIB
"""How much the first request for an object asks for: a manifest or a header, as a rule, together with the size."""
_S3 = re.compile(r"(?:(?P<bucket>.+)\.)?s3[.-](?:(?P<region>[a-z0-9-]+)\.)?amazonaws\.com(?:\.cn)?")


class HttpStore(ReadOnlyStore):
    """The folder at an `https://` or `http://` URL, for reading. Can be pickled.

    The URL of a manifest (`.../manifest-00000040.json`) is the folder at that generation. The URL of a file of
    `torch.save` or of a safetensors file is read as that file. A name and password in the URL go to its host only, and
    its query (`?token=...`) goes with each request; no message shows them. Proxies come from the environment
    (`https_proxy`, `no_proxy`), certificates from the system or `SSL_CERT_FILE`.

    >>> milepost.store.HttpStore("https://example.org/runs/a?token=secret").url
    'https://example.org/runs/a'
    """

    def __init__(self, url: str) -> None:
        self._given = url
        parts = split(url)
        host = parts.netloc.rpartition("@")[2]
        path, generation = _folder_and_generation(quote(parts.path, safe="/%:@!$&'()*+,;=~").rstrip("/"))
        self._parts = parts._replace(netloc=host, path=path, fragment="")
        self._generation, self._refused = generation, ""
        self._looked: dict[str, tuple[float, bool]] = {}
        self._url = f"{parts.scheme}://{host}{path}"
        self._client = HttpClient(login_of(parts), host)

    def __reduce__(self) -> tuple[Any, ...]:
        return HttpStore, (self._given,)

    def __repr__(self) -> str:
        return f"HttpStore({self._url!r})"

    @property
    def url(self) -> str:
        """Where this is, for messages: without password and query."""
        return self._url

    @property
    def traits(self) -> Traits:
        """Long ranges, several at once."""
        return Traits(range_bytes=8 * MIB, requests=_AT_ONCE)

    def parent(self) -> "tuple[HttpStore, str] | None":
        """The folder around this place, and the name of this place in it; None at the top of a host."""
        above, _, name = self._parts.path.rpartition("/")
        if not name or self._generation:
            return None
        given = split(self._given)
        return HttpStore(given._replace(path=above, fragment="").geturl()), unquote(name)

    def reader(self, name: str, *, size_bytes: int | None = None) -> "HttpReader":
        """Open an object. Raises FileNotFoundError if there is none, StorageError if the server does not give it."""
        check_name(name)
        reader = HttpReader(self, name, size_bytes)
        if size_bytes is None:
            reader.look()
        return reader

    def fetch(self, name: str, start: int, views: Sequence[memoryview]) -> Found:
        """Fill views from an object, as far as it goes; see `HttpClient.read`."""
        path = f"{self._parts.path}/{quote(name)}"
        try:
            return self._client.read(self._parts._replace(path=path).geturl(), f"{self._url}/{name}", start, views)
        except HttpRefusal as error:
            better = cloud_spelling(self._parts)
            if error.status in REFUSED and better:
                raise HttpRefusal(f"{error} With your credentials it is read as {better}", error.status) from error
            raise

    def list(self, prefix: str, *, shallow: bool = False) -> Iterator[str]:
        """Those of the names by which checkpoints are recognised that start with `prefix` and are there.

        Beside a manifest only an index of DCP matters.
        """
        manifests = self._manifests(prefix)
        names = [n for n in _KNOWN if n.startswith(prefix) and (n.endswith(".metadata") or not manifests)]
        found = iter([*manifests, *self._there(names)])
        return top_names(found, prefix) if shallow else found

    def _manifests(self, prefix: str) -> tuple[str, ...]:
        numbers = [self._generation] if self._generation else [1, *range(2, TRIED_GENERATIONS + 1)]
        names = [name for name in map(manifest_name, numbers) if name.startswith(prefix)]
        # Most places were saved to once. Who reads also tries the generation above the newest that is listed.
        return self._there(names[:1]) or self._there(names[1:])

    def _there(self, names: Sequence[str]) -> tuple[str, ...]:
        found = side_by_side(self._is_there, names, _TRIED_AT_ONCE)
        return tuple(name for name, there in zip(names, found, strict=True) if there)

    def _is_there(self, name: str) -> bool:
        known = self._looked.get(name)
        if known is None or time.monotonic() - known[0] > _REMEMBERED_S:
            known = self._looked[name] = time.monotonic(), self._look(name)
        return known[1]

    def _look(self, name: str) -> bool:
        try:
            self.fetch(name, 0, [memoryview(bytearray(1))])
        except FileNotFoundError:
            return False
        except HttpRefusal as error:
            # Some stores answer so for names that they do not have, to those who may not list.
            if error.status not in REFUSED:
                raise
            self._refused = error.message
            return False
        return True

    def not_found(self) -> str:
        """What was tried here in vain, and what to do."""
        better = cloud_spelling(self._parts)
        advice = f", or read it as {better}" if better else ""
        return (
            f"there is no checkpoint at {self._url}. Nothing can be listed over HTTP: the manifests of generations 1 "
            f"to {TRIED_GENERATIONS} and the usual names of other formats were tried. Pass the URL of the manifest or "
            f"of the file itself{advice}{f'. {self._refused}' if self._refused else ''}"
        )

    def _why_not(self) -> str:
        better = cloud_spelling(self._parts)
        advice = f"save to {better}" if better else "save to a path or an object store, and serve it from there"
        return f"{self._url} is only read: a checkpoint cannot be saved over HTTP; {advice}"


class HttpReader(OneWayReader):
    """Reads one object by ranges, from several threads at once."""

    def __init__(self, store: HttpStore, name: str, size_bytes: int | None) -> None:
        self._store, self._name, self._expected = store, name, size_bytes
        self._where = f"{store.url}/{name}"
        self._found: Found | None = None
        self._first = b""

    def look(self) -> None:
        """Ask for the size, and keep the first bytes: they are what is read next."""
        first = bytearray(_FIRST_BYTES)
        self._found = self._store.fetch(self._name, 0, [memoryview(first)])
        self._first = bytes(memoryview(first)[: self._found.read_bytes])

    @property
    def size_bytes(self) -> int:
        """The size of the object."""
        if self._expected is not None:
            return self._expected
        assert self._found is not None
        return self._found.size_bytes

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill all of `views`, one after the other, from `offset`."""
        stop = offset + sum(map(len, views))
        if stop <= len(self._first):
            for view in views:
                view[:] = self._first[offset : offset + len(view)]
                offset += len(view)
            return
        found = self._store.fetch(self._name, offset, views)
        refuse_change(self._where, self._found, found)
        if self._expected is not None and found.size_bytes != self._expected:
            raise CheckpointDamaged(f"{self._where} has {found.size_bytes} bytes and was saved with {self._expected}")
        if stop > found.size_bytes:
            raise StorageError(f"{self._where} ends before byte {stop}: it has {found.size_bytes} bytes")
        self._found = found

    def close(self) -> None:
        """Nothing to close: connections belong to the store."""


def _folder_and_generation(path: str) -> tuple[str, int]:
    """The folder of a manifest and its number; or the path itself, and 0."""
    folder, _, name = path.rpartition("/")
    number = generation_of(name)
    return (path, 0) if number is None else (folder, number)


def cloud_spelling(parts: SplitResult) -> str:
    """How Milepost spells the place of a well-known object store; empty for other hosts."""
    host, path = (parts.hostname or "").lower(), unquote(parts.path).strip("/")
    first, _, rest = path.partition("/")
    if host.endswith((".blob.core.windows.net", ".dfs.core.windows.net")) and first:
        account = host.partition(".")[0]
        return f"abfss://{first}@{account}.dfs.core.windows.net/{rest}"
    if host == "storage.googleapis.com" and first:
        return f"gs://{path}"
    if host.endswith(".storage.googleapis.com"):
        return f"gs://{host.removesuffix('.storage.googleapis.com')}/{path}"
    match = _S3.fullmatch(host)
    if match is None or not (match["bucket"] or first):
        return ""
    region = f"?region={match['region']}" if match["region"] else ""
    return f"s3://{match['bucket']}/{path}{region}" if match["bucket"] else f"s3://{path}{region}"
