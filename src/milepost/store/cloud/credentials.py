"""Who asks: credentials from the options, the environment, profile files and instance roles.

What obstore finds by itself stays with obstore: keys in the environment, roles of instances, containers and pods,
Google's application default credentials, Azure's identities. The profile files of AWS are read by boto3.
"""

import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from milepost.errors import InvalidRequest
from milepost.store.cloud.options import ONE_LINE, CloudOptions, has_control

Config = dict[str, Any]
"""Settings of one of obstore's stores."""

ASK_BOTO_AGAIN = timedelta(minutes=10)

_AWS_SOURCES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_AWS_HEADERS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_AZURE_SOURCES = (
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_MASTER_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
    "AZURE_CLIENT_ID",
    "AZURE_STORAGE_CLIENT_ID",
    "AZURE_FEDERATED_TOKEN_FILE",
    "AZURE_MSI_ENDPOINT",
    "AZURE_IDENTITY_ENDPOINT",
    "IDENTITY_ENDPOINT",
)


class CredentialSource:
    """A callable of the user's, in the form that obstore calls. Keeps what it returns until that is about to expire.

    `translate` turns fields of `CloudOptions` into obstore's. `error`: what the callable raised last; of that, obstore
    keeps only the text.
    """

    def __init__(self, ask: Callable[[], Mapping[str, object]], translate: Callable[[Config], Config]) -> None:
        self._ask, self._translate = ask, translate
        self._lock = threading.Lock()
        self._kept: Config | None = None
        self.error: BaseException | None = None

    def __call__(self) -> Config:
        """The credentials, as obstore takes them. Each of its clients asks."""
        with self._lock:
            if self._kept is None or _is_near(self._kept["expires_at"]):
                try:
                    self._kept = self._fetch()
                except BaseException as error:
                    self.error = error
                    raise
                self.error = None
            return dict(self._kept)

    def _fetch(self) -> Config:
        given = dict(self._ask())
        expires = given.pop("expires_at", None)
        if expires is not None and not (isinstance(expires, datetime) and expires.tzinfo):
            raise InvalidRequest("expires_at of credentials is a datetime with a time zone")
        return self._translate(given) | {"expires_at": expires}


def _is_near(expires: datetime | None) -> bool:
    return expires is not None and expires - datetime.now(UTC) < timedelta(minutes=5)


_SECRET_NAME = re.compile(r"(?:AWS|AZURE|GOOGLE)_\w*(?:SECRET\w*|TOKEN|KEY|KEY_BASE64|STRING|PASSWORD)")


def known_secrets(options: CloudOptions, env: Mapping[str, str]) -> list[str]:
    """Every secret that the options or the environment hold, for those who keep them out of messages."""
    found = [value for name, value in env.items() if _SECRET_NAME.fullmatch(name) and len(value) > 3]
    return [*options.secrets(), *found]


def s3_credentials(options: CloudOptions, env: Mapping[str, str]) -> tuple[Config, Callable[[], Config] | None]:
    """Settings for obstore's S3 store, and where credentials come from if obstore cannot find them itself."""
    if options.anonymous:
        return {"skip_signature": True}, None
    if options.credentials is not None:
        return {}, CredentialSource(options.credentials, _s3_keys)
    if options.access_key_id is not None:
        keys = {"access_key_id": options.access_key_id, "secret_access_key": options.secret_access_key}
        return keys | ({"session_token": options.session_token} if options.session_token else {}), None
    if options.profile is not None or _needs_profile(env):
        return _from_profile(options.profile)
    for name in _AWS_HEADERS:
        if has_control(env.get(name, "")):
            raise InvalidRequest(f"{name} of the environment {ONE_LINE}")
    return {}, None


def _needs_profile(env: Mapping[str, str]) -> bool:
    if any(env.get(name) for name in _AWS_SOURCES):
        return False
    files = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
    return bool(env.get("AWS_PROFILE")) or any(
        Path(env.get(name) or path).expanduser().is_file() for name, path in files.items()
    )


def _from_profile(profile: str | None) -> tuple[Config, Callable[[], Config] | None]:
    try:
        from boto3 import Session  # noqa: PLC0415  # optional, and slow to import
        from botocore.exceptions import BotoCoreError  # noqa: PLC0415
    except ImportError:
        if profile is None and not os.environ.get("AWS_PROFILE"):
            return {}, None  # files without boto3: what obstore finds by itself must do
        raise InvalidRequest('profiles of AWS are read by boto3: pip install "milepost[s3]"') from None
    try:
        session = Session(profile_name=profile)
        found = session.get_credentials()
    except BotoCoreError as error:
        raise InvalidRequest(f"the profile {profile or os.environ.get('AWS_PROFILE')!r} of AWS: {error}") from None
    settings = {"region": session.region_name} if session.region_name else {}
    if found is None:
        if profile is not None:
            raise InvalidRequest(f"the profile {profile!r} of AWS has no credentials")
        return settings, None

    def frozen() -> Config:
        now = found.get_frozen_credentials()  # botocore fetches them anew when they are about to expire
        keys = {"access_key_id": now.access_key, "secret_access_key": now.secret_key, "session_token": now.token}
        return keys | {"expires_at": datetime.now(UTC) + ASK_BOTO_AGAIN}

    return settings, CredentialSource(frozen, _s3_keys)


def _s3_keys(given: Config) -> Config:
    _only(given, "access_key_id", "secret_access_key", "session_token")
    found = {"access_key_id": given.get("access_key_id"), "secret_access_key": given.get("secret_access_key")}
    if not all(found.values()):
        raise InvalidRequest(
            "credentials for S3 are access_key_id, secret_access_key and, if there is one, session_token"
        )
    return found | {"token": given.get("session_token")}


def google_credentials(options: CloudOptions) -> tuple[Config, Callable[[], Config] | None]:
    """Settings for obstore's store of Google Cloud Storage, and where credentials come from if it cannot find them."""
    if options.anonymous:
        return {"skip_signature": True}, None
    if options.credentials is not None:
        return {}, CredentialSource(options.credentials, _google_token)
    if options.service_account is not None:
        return {"service_account": os.fspath(options.service_account)}, None
    if options.service_account_key is not None:
        return {"service_account_key": options.service_account_key}, None
    return ({"bearer_token": options.token} if options.token else {}), None


def _google_token(given: Config) -> Config:
    _only(given, "token")
    if not given.get("token"):
        raise InvalidRequest("credentials for Google Cloud Storage are a token")
    return given


def azure_credentials(options: CloudOptions, env: Mapping[str, str]) -> tuple[Config, Callable[[], Config] | None]:
    """Settings for obstore's Azure store, and where credentials come from if obstore cannot find them itself."""
    if options.anonymous:
        return {"skip_signature": True}, None
    if options.credentials is not None:
        return {}, CredentialSource(options.credentials, _azure_credential)
    names = {"account_key": "account_key", "sas": "sas_key", "token": "token", "client_id": "client_id"}
    names |= {"client_secret": "client_secret", "tenant_id": "tenant_id"}
    found = {theirs: getattr(options, ours) for ours, theirs in names.items() if getattr(options, ours) is not None}
    return found or _azure_environment(options, env), None


def _azure_environment(options: CloudOptions, env: Mapping[str, str]) -> Config:
    """What the environment says in ways that obstore does not know."""
    text = options.connection_string or env.get("AZURE_STORAGE_CONNECTION_STRING")
    if text:
        return connection_settings(text)
    if env.get("AZURE_STORAGE_KEY"):  # the name that Azure's command line takes
        return {"account_key": env["AZURE_STORAGE_KEY"]}
    if not any(env.get(name) for name in _AZURE_SOURCES) and _signed_in_to_azure(env):
        return {"use_azure_cli": True}
    return {}


def _signed_in_to_azure(env: Mapping[str, str]) -> bool:
    folder = Path(env.get("AZURE_CONFIG_DIR") or "~/.azure").expanduser()
    return shutil.which("az") is not None and (folder / "azureProfile.json").is_file()


def connection_settings(text: str) -> Config:
    """What a connection string of Azure says. Raises InvalidRequest; the message shows nothing of it."""
    parts = dict(part.strip().partition("=")[::2] for part in text.strip().strip(";").split(";"))
    names = {"AccountName": "account_name", "AccountKey": "account_key", "SharedAccessSignature": "sas_key"}
    found = {theirs: parts[ours] for ours, theirs in names.items() if parts.get(ours)}
    if parts.get("BlobEndpoint"):
        found["endpoint"] = parts["BlobEndpoint"].rstrip("/")
    elif parts.get("EndpointSuffix") and "account_name" in found:
        scheme = parts.get("DefaultEndpointsProtocol") or "https"
        found["endpoint"] = f"{scheme}://{found['account_name']}.blob.{parts['EndpointSuffix']}"
    if "account_key" not in found and "sas_key" not in found:
        raise InvalidRequest("the connection string of Azure holds neither AccountKey nor SharedAccessSignature")
    return found


def _azure_credential(given: Config) -> Config:
    _only(given, "account_key", "sas", "token")
    names = {"account_key": "access_key", "sas": "sas_token", "token": "token"}
    found = {theirs: given[ours] for ours, theirs in names.items() if given.get(ours)}
    if len(found) != 1:
        raise InvalidRequest("credentials for Azure are one of account_key, sas and token")
    return found


def _only(given: Config, *names: str) -> None:
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise InvalidRequest(f"credentials hold {', '.join(map(repr, unknown))}; known: {', '.join(names)}, expires_at")
