"""obstore's clients, made when they are needed. Each has one time limit, so there is one for each size of request.

obstore repeats nothing here: `retry` decides. obstore runs its requests on threads that a fork does not copy, so a
process that was forked after the first request cannot make any.
"""

import math
import os
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from milepost.errors import InvalidRequest, StorageError
from milepost.store.cloud.credentials import (
    Config,
    CredentialSource,
    azure_credentials,
    google_credentials,
    known_secrets,
    s3_credentials,
)
from milepost.store.cloud.options import CloudOptions, wrong_url
from milepost.store.cloud.region import find_region
from milepost.store.cloud.replies import scrub
from milepost.store.cloud.url import Bucket

SLOWEST_BYTES_S = 4 << 20
"""A request that moves data gets at least the time that this speed needs."""
CONNECT_S = 5.0
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("STORAGE_EMULATOR_HOST",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""The variables that name another service than the provider's own."""
STANDSTILL_S = 15.0
"""A reply of which nothing comes for so long is given up."""
RENEWAL_S = 1.0
"""Credentials are fetched anew at most once in this time: requests that were under way with the old ones fail too."""
Use = Literal["read", "write", "delete one"]

# The process in which obstore's threads run, once they do.
_threads_of: list[int] = []


class Clients:
    """obstore's stores for one bucket, by time limit. Safe to use from several threads."""

    def __init__(self, place: Bucket, options: CloudOptions) -> None:
        self._place, self._options = place, options
        self._lock = threading.Lock()
        self._made: dict[tuple[int, Use], Any] = {}
        self._settings: tuple[Config, Any] | None = None
        self._forgot_at = -math.inf

    @property
    def source(self) -> CredentialSource | None:
        """Where credentials come from, if that is a callable."""
        provider = self._settings[1] if self._settings else None
        return provider if isinstance(provider, CredentialSource) else None

    def get(self, use: Use, size_bytes: int = 0, *, timeouts: int = 0) -> Any:
        """A client for requests that move this many bytes. After a timeout of the same request it waits longer.

        Raises InvalidRequest if obstore is missing or refuses a setting.
        """
        key = (doublings(self._options.timeout_s, size_bytes, timeouts), use)
        with self._lock:
            if key not in self._made:
                self._made[key] = self._make(self._options.timeout_s * 2 ** key[0], use)
            return self._made[key]

    def forget(self) -> None:
        """Make new clients from now on, with credentials that are fetched anew: once, if many requests fail at once."""
        with self._lock:
            now = time.monotonic()
            if now - self._forgot_at > RENEWAL_S:
                self._forgot_at = now
                self._made.clear()
                self._settings = None

    def _make(self, timeout_s: float, use: Use) -> Any:
        stores = _obstore()
        if self._settings is None:
            self._settings = store_settings(self._place, self._options, os.environ)
        config, provider = self._settings
        if self._place.provider == "s3" and use == "delete one":
            config = config | {"disable_bulk_delete": True}
        kind = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[self._place.provider]
        try:
            return kind(
                self._place.bucket,
                config=config,
                client_options=client_settings(self._options, config, os.environ) | limits(timeout_s, use),
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=timeout_s)},
                credential_provider=provider,
            )
        except InvalidRequest:
            raise  # our own words
        except Exception as error:  # noqa: BLE001  # obstore raises classes of its own, and ValueError
            words = str(error).partition("\n\nDebug source")[0]
        told = scrub(words, known_secrets(self._options, os.environ))
        raise InvalidRequest(f"{self._place.url}: the settings of the object store are wrong: {told}")


def doublings(timeout_s: float, size_bytes: int, timeouts: int) -> int:
    """How often to double the time limit of a small request for one that moves this much, and timed out so often."""
    needed = timeout_s + size_bytes / SLOWEST_BYTES_S
    slack = 0.1  # a few bytes need no more time
    return max(0, math.ceil(math.log2(needed / timeout_s) - slack)) + (min(timeouts, 1) if size_bytes else 0)


def has_obstore() -> bool:
    """Whether obstore is installed."""
    return find_spec("obstore") is not None


def _obstore() -> Any:
    try:
        import obstore.store as stores  # noqa: PLC0415  # optional, and slow to import
    except ImportError:
        raise InvalidRequest('object stores need obstore: pip install "milepost[cloud]"') from None
    return stores


def check_process(url: str) -> None:
    """Raises StorageError in a process that was forked after the first request."""
    if not _threads_of:
        _threads_of.append(os.getpid())
    elif _threads_of[0] != os.getpid():
        raise StorageError(
            f"{url}: this process was forked from one that had used an object store, and cannot use one itself. "
            'Start it by "spawn" or "forkserver" (multiprocessing), or fork before the first use'
        )


def limits(timeout_s: float, use: Use) -> Config:
    """How long a request may take. One that reads may also not stand still."""
    found = {"timeout": timedelta(seconds=timeout_s), "connect_timeout": timedelta(seconds=min(CONNECT_S, timeout_s))}
    if use == "read":  # for one that writes, the whole upload would count as standing still
        found["read_timeout"] = timedelta(seconds=min(STANDSTILL_S, timeout_s))
    return found


def client_settings(options: CloudOptions, config: Config, env: Mapping[str, str]) -> Config:
    """How obstore connects. `http://` is allowed only where the endpoint says so."""
    endpoint = str(config.get("endpoint") or config.get("base_url") or "https://")
    found: Config = {
        "allow_http": endpoint.startswith("http://"),
        "user_agent": "milepost",
        "http1_only": True,  # a connection for each request under way: one that all share does not fill the line
    }
    if options.proxy is not None:
        found["proxy_url"] = options.proxy
    ca_file = options.ca_file or env.get("AWS_CA_BUNDLE")
    if ca_file:
        try:
            found["root_certificate"] = Path(ca_file).read_bytes()
        except OSError as error:
            raise InvalidRequest(f"ca_file {os.fspath(ca_file)!r} cannot be read: {error.strerror}") from None
    return found


def store_settings(place: Bucket, options: CloudOptions, env: Mapping[str, str]) -> tuple[Config, Any]:
    """The settings of obstore's store, and a source of credentials if obstore needs one."""
    build = {"s3": _s3_settings, "gs": _google_settings, "az": _azure_settings}[place.provider]
    return build(place, options, env)


def endpoint_of(place: Bucket, options: CloudOptions, env: Mapping[str, str]) -> str | None:
    """The URL of a service that is not the provider's own. Raises InvalidRequest if a variable holds something else."""
    if options.endpoint:
        return options.endpoint
    for name in _ENDPOINTS[place.provider]:
        if found := env.get(name):
            url = f"http://{found}" if place.provider == "gs" and "://" not in found else found
            if wrong := wrong_url("endpoint", url):
                raise InvalidRequest(f"{place.url}: {name} of the environment {wrong}")
            return url
    return None


def _s3_settings(place: Bucket, options: CloudOptions, env: Mapping[str, str]) -> tuple[Config, Any]:
    config, provider = s3_credentials(options, env)
    region = options.region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or config.get("region")
    endpoint = endpoint_of(place, options, env)
    config["region"] = region or (None if endpoint else find_region(place.bucket, options)) or "us-east-1"
    path_style = options.path_style if options.path_style is not None else bool(endpoint or "." in place.bucket)
    if endpoint:
        endpoint = endpoint.rstrip("/")
        if not path_style:
            parts = urlsplit(endpoint)
            endpoint = f"{parts.scheme}://{place.bucket}.{parts.netloc}{parts.path}"
        config["endpoint"] = config["aws_endpoint_url_s3"] = endpoint
    config["virtual_hosted_style_request"] = not path_style
    # The service compares what arrived. A signature has the SHA-256 anyway, but some services do not look at that one.
    config["checksum_algorithm"] = "CRC64NVME" if options.unsigned else "SHA256"
    if options.unsigned:
        config["unsigned_payload"] = True
    if options.kms_key is not None:
        config |= {"server_side_encryption": "aws:kms", "sse_kms_key_id": options.kms_key}
    return config, provider


def _google_settings(place: Bucket, options: CloudOptions, env: Mapping[str, str]) -> tuple[Config, Any]:
    config, provider = google_credentials(options)
    endpoint = endpoint_of(place, options, env)
    if endpoint:
        config["base_url"] = endpoint.rstrip("/")
    return config, provider


def _azure_settings(place: Bucket, options: CloudOptions, env: Mapping[str, str]) -> tuple[Config, Any]:
    config, provider = azure_credentials(options, env)
    named = options.account or place.account
    account = named or config.get("account_name") or env.get("AZURE_STORAGE_ACCOUNT_NAME")
    account = account or env.get("AZURE_STORAGE_ACCOUNT")
    if not account:
        raise InvalidRequest(
            f"{place.url}: whose storage account? Pass CloudOptions(account=...) or ?account=..., set "
            "AZURE_STORAGE_ACCOUNT_NAME, or write abfss://container@account.dfs.core.windows.net/path"
        )
    config["account_name"] = account
    endpoint = endpoint_of(place, options, env)
    if endpoint:
        config["endpoint"] = endpoint.rstrip("/")
    return config, provider
