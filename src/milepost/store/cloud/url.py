"""The URLs of object stores: `s3://bucket/path?region=eu-west-1` and the other spellings that users have.

The path is the key, character for character: nothing is decoded, so `%20` is three characters. Only `?` ends it: what
follows are settings. Secrets are refused there, because URLs are shown in messages and logs.
"""

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl

from milepost.errors import InvalidRequest
from milepost.store.cloud.options import IN_URL, from_texts

Provider = Literal["s3", "gs", "az"]

PROVIDERS: dict[str, Provider] = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
}
"""The service of each spelling."""

_BUCKET = re.compile(r"[A-Za-z0-9._$-]{1,255}")
_ACCOUNT_HOST = re.compile(r"([a-z0-9-]+)\.(?:dfs|blob)\.core\.[a-z0-9.-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Bucket:
    """A place in a bucket. `root`: the prefix of all keys, without slashes at its ends."""

    scheme: str
    host: str
    bucket: str
    root: str = ""
    account: str | None = None

    @property
    def provider(self) -> Provider:
        """Whose service it is."""
        return PROVIDERS[self.scheme]

    @property
    def url(self) -> str:
        """The URL for messages: without settings."""
        return f"{self.scheme}://{self.host}" + (f"/{self.root}" if self.root else "")

    def key(self, name: str) -> str:
        """The key of a name below the root."""
        return f"{self.root}/{name}" if self.root else name


def parse_url(url: str) -> tuple[Bucket, dict[str, object]]:
    """The place that a URL names, and the options that its query sets.

    Raises InvalidRequest; its message shows nothing of the query's values.
    """
    address, _, query = url.partition("?")
    scheme, _, rest = address.partition("://")
    if scheme not in PROVIDERS:
        raise InvalidRequest(f"{scheme!r} is not the scheme of an object store; known: {', '.join(PROVIDERS)}")
    host, _, path = rest.partition("/")
    bucket, account = _bucket_of(scheme, host)
    place = Bucket(scheme, host, bucket, _root_of(f"{scheme}://{host}", path), account)
    return place, _settings_of(place.url, query)


def _bucket_of(scheme: str, host: str) -> tuple[str, str | None]:
    bucket, at, server = host.partition("@")
    account = None
    if at:
        match = _ACCOUNT_HOST.fullmatch(server)
        if PROVIDERS[scheme] != "az" or match is None or ":" in bucket:
            # Not shown: it may be a password.
            raise InvalidRequest(
                f"a URL with {scheme}:// has no user name or password before its bucket; pass credentials by "
                "CloudOptions or the environment"
            )
        account = match[1]
    if not _BUCKET.fullmatch(bucket):
        raise InvalidRequest(f"{bucket[:100]!r} is not the name of a bucket; write {scheme}://bucket/path")
    return bucket, account


def _root_of(where: str, path: str) -> str:
    root = path.removesuffix("/")
    if root and any(part in ("", ".", "..") for part in root.split("/")):
        raise InvalidRequest(
            f"{where}/{path[:200]}: no part of a path is empty, '.' or '..'; write one slash between two names"
        )
    if _CONTROL.search(root) or "\\" in root:  # some services take a backslash for a slash
        raise InvalidRequest(f"{where}/{path[:200]!r}: no path holds control characters or backslashes; write /")
    return root


def _settings_of(where: str, query: str) -> dict[str, object]:
    pairs = parse_qsl(query, keep_blank_values=True)
    texts = dict(pairs)
    unknown = sorted(name[:40] for name in texts if name not in IN_URL)
    if unknown:
        raise InvalidRequest(
            f"{where}: the URL's query cannot set {', '.join(map(repr, unknown))}; it can set {', '.join(IN_URL)}. "
            "Secrets never belong into a URL, which is shown in messages: pass them by CloudOptions or the environment"
        )
    if len(texts) < len(pairs):
        raise InvalidRequest(f"{where}: the URL's query sets something twice")
    try:
        return from_texts(texts)
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: in the URL's query, {error}") from None
