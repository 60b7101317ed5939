"""Settings of an object store: where it is, how to reach it, who asks."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from urllib.parse import urlsplit

from milepost.errors import InvalidRequest

Credentials = Mapping[str, object]
"""What a callable of `CloudOptions.credentials` returns: fields of `CloudOptions` by name, and `expires_at`."""

_FLAGS = ("path_style", "anonymous", "unsigned")
_NUMBERS = ("requests", "patience_s", "timeout_s")
_URLS = ("endpoint", "proxy")
LARGEST = 10**7
"""Of any number: four months, if it is one of seconds."""
ONE_LINE = "holds a newline, or another control character: was it read from a file?"
IN_URL = (
    "endpoint",
    "region",
    "path_style",
    "proxy",
    "ca_file",
    "account",
    "anonymous",
    "profile",
    "unsigned",
    *_NUMBERS,
)
"""What a URL's query may set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudOptions:
    """How to reach an object store. What is left out comes from the environment, as the provider's own tools take it.

    `endpoint`: the URL of the service, for one that is not the provider's own. `region`: of the bucket (S3).
    `path_style`: the bucket is in the path of a request, not in its host (S3; default: with an endpoint). `proxy`:
    the URL of an HTTP proxy. `ca_file`: certificates to trust besides the system's, a PEM file. `account`: the storage
    account (Azure). `kms_key`: the key that encrypts new objects (S3). `unsigned`: leave the bodies of uploads out of
    their signatures (S3).

    Credentials: `anonymous` asks without any. `profile` is one of AWS's files. `access_key_id`, `secret_access_key`,
    `session_token`: of S3. `service_account` (a path) or `service_account_key` (its JSON): of Google. `account_key`,
    `sas`, `connection_string`, or `client_id`, `client_secret` and `tenant_id`: of Azure. `token`: a bearer token
    (Google, Azure). `credentials`: a callable that returns some of these fields and, if they expire, `expires_at` (a
    datetime with a time zone); it is called again then.

    `requests`: how many are under way at once. `patience_s`: how long failing requests are repeated, from the last one
    that succeeded. `timeout_s`: for a small request; those that carry data get more.

    The repr shows no secret. Raises InvalidRequest for a value of the wrong kind.

    >>> "hidden" in repr(milepost.store.CloudOptions(access_key_id="known", secret_access_key="hidden"))
    False
    """

    endpoint: str | None = None
    region: str | None = None
    path_style: bool | None = None
    proxy: str | None = field(default=None, repr=False)  # it may hold a password
    ca_file: str | os.PathLike[str] | None = None
    account: str | None = None
    kms_key: str | None = None
    unsigned: bool = False
    anonymous: bool = False
    profile: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    service_account: str | os.PathLike[str] | None = None
    service_account_key: str | None = field(default=None, repr=False)
    account_key: str | None = field(default=None, repr=False)
    sas: str | None = field(default=None, repr=False)
    connection_string: str | None = field(default=None, repr=False)
    client_id: str | None = None
    client_secret: str | None = field(default=None, repr=False)
    tenant_id: str | None = None
    token: str | None = field(default=None, repr=False)
    credentials: Callable[[], Credentials] | None = field(default=None, repr=False)
    requests: int = 16
    patience_s: float = 300.0
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in (one.name for one in fields(self)):
            _check(name, getattr(self, name))
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise InvalidRequest("CloudOptions needs both access_key_id and secret_access_key, or neither")

    def secrets(self) -> list[str]:
        """Every secret value that these options hold, for those who keep them out of messages."""
        hidden = [getattr(self, one.name) for one in fields(self) if not one.repr]
        return [value for value in hidden if isinstance(value, str) and value]


def _check(name: str, value: object) -> None:
    wrong = None
    if name in _FLAGS:
        if not isinstance(value, bool) and not (name == "path_style" and value is None):
            wrong = "is True or False"
    elif name in _NUMBERS:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            wrong = "is a number above 0"
        elif value > LARGEST:
            wrong = f"is at most {LARGEST:,}"
        elif name == "requests" and not isinstance(value, int):
            wrong = "is a whole number"
    elif name == "credentials":
        if value is not None and not callable(value):
            wrong = "is a callable that returns the fields"
    elif value is not None and not isinstance(value, os.PathLike):
        wrong = _wrong_text(name, value)
    if wrong is not None:  # the value is not shown: it may be a secret in the wrong place
        raise InvalidRequest(f"CloudOptions.{name} {wrong}")


def _wrong_text(name: str, value: object) -> str | None:
    if not isinstance(value, str) or not value:
        return "is a string that is not empty"
    if has_control(value) and name != "service_account_key":
        return ONE_LINE
    return wrong_url(name, value) if name in _URLS else None


def has_control(text: str) -> bool:
    """Whether it holds a newline or another character that no header takes. obstore panics there."""
    return any(ord(letter) < 32 or ord(letter) == 127 for letter in text)


def wrong_url(name: str, value: str) -> str | None:
    """What is wrong with the URL of an endpoint or a proxy, in words; None if nothing is."""
    try:
        parts = urlsplit(value)
        _ = parts.port
    except ValueError:
        return "is not a URL"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "is a URL that begins with https:// or http://"
    if name == "endpoint" and (parts.username or parts.query or parts.fragment):
        return "is a URL without user name, query and fragment"
    return None


def from_texts(texts: Mapping[str, str]) -> dict[str, object]:
    """Values of options from a URL's query. Raises InvalidRequest; the message shows no value."""
    found: dict[str, object] = {}
    for name, text in texts.items():
        if name not in IN_URL:
            raise InvalidRequest(f"{name!r} cannot be set there; known: {', '.join(IN_URL)}")
        if name in _FLAGS:
            found[name] = _flag(name, text)
        elif name in _NUMBERS:
            found[name] = _number(name, text)
        elif name == "proxy" and "@" in text:
            raise InvalidRequest("a proxy with a password belongs into CloudOptions.proxy: URLs are shown in messages")
        else:
            found[name] = text
    return found


def _flag(name: str, text: str) -> bool:
    value = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower())
    if value is None:
        raise InvalidRequest(f"{name} is true or false")
    return value


def _number(name: str, text: str) -> float:
    try:
        return int(text) if name == "requests" else float(text)
    except ValueError:
        raise InvalidRequest(f"{name} is a number") from None
