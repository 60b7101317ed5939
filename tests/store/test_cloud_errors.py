"""Errors of object stores say what is wrong and what to do, and show no secret."""

import datetime as dt
import os
import shutil
import ssl
import subprocess
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import milepost
from faults.proxy import Rule
from faults.servers.seaweed import KEYS, OTHER_KEYS
from milepost.store import CloudOptions, CloudStore, store_at
from milepost.store.cloud import retry
from milepost.store.cloud.credentials import known_secrets
from milepost.store.cloud.replies import Why, scrub, understand

SECRET = "hidden+Secret/0123456789"
QUICK = {"patience_s": 0.1, "timeout_s": 1.0}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.01)


def shown(error):
    """All that anybody prints of an error: message, notes, and those that it was raised from or during."""
    found, seen = "", error
    while seen is not None:
        found += "".join(traceback.format_exception(seen)) + repr(seen) + repr(vars(seen))
        seen = seen.__cause__ or seen.__context__
    return found


VERBS = {
    "write": lambda store: store.create("data/name", b"1"),
    "read": lambda store: store.reader("name"),
    "read part of": lambda store: store.reader("name", size_bytes=5).read(0, [memoryview(bytearray(5))]),
    "list": lambda store: list(store.list("")),
    "delete": lambda store: store.delete("name", "other"),
}
ANSWERS = {
    "AccessDenied 403": "The credentials may not do this: they need s3:",
    "InvalidAccessKeyId 403": "The credentials are wrong",
    "SignatureDoesNotMatch 403": "The credentials are wrong",
    "ExpiredToken 400": "expired",
    "RequestTimeTooSkewed 403": "The clock of this machine is wrong",
    "NoSuchBucket 404": "There is no bucket 'milepost': create it",
    "PermanentRedirect 301": "in another region",
    "AuthorizationHeaderMalformed 400": "in another region",
    "SlowDown 503": "asked too much",
    "InternalError 500": "trouble of its own",
    "InvalidArgument 400": "Asking again does not help",
}


@pytest.mark.parametrize("verb", VERBS)
def test_each_answer_says_what_to_do_and_shows_no_secret(seaweed, s3_proxy, verb):
    keys = {"access_key_id": KEYS.access, "secret_access_key": KEYS.secret, "session_token": SECRET}
    with seaweed.place(s3_proxy.endpoint) as url:
        store = CloudStore(url, CloudOptions(**keys, **QUICK))
        for answer, expected in ANSWERS.items():
            code, status = answer.split()
            s3_proxy.set_rules(Rule("answer", status=int(status), code=code, times=None))
            with pytest.raises(milepost.StorageError) as raised:
                VERBS[verb](store)
            message = str(raised.value)
            assert expected in message
            assert message.startswith(f"cannot {verb.split()[0]} s3://milepost/place-")
            assert isinstance(raised.value, milepost.NoReply) == (verb == "write" and int(status) >= 500)
            for secret in (SECRET, KEYS.secret, "Signature=", "AWS4-HMAC", "X-Amz"):
                assert secret not in shown(raised.value)


PERMISSIONS = {"write": "s3:PutObject", "read": "s3:GetObject", "list": "s3:ListBucket", "delete": "s3:DeleteObject"}


def test_a_missing_permission_is_named(seaweed, s3_proxy):
    with seaweed.place(s3_proxy.endpoint) as url:
        s3_proxy.set_rules(Rule("answer", status=403, code="AccessDenied", times=None))
        for verb, permission in PERMISSIONS.items():
            with pytest.raises(milepost.StorageError, match=f"they need {permission}"):
                VERBS[verb](store_at(url))


UNREACHABLE = {
    "http://127.0.0.1:1": "connection refused",
    "http://no.such.host.invalid": "its name cannot be resolved",
}


@pytest.mark.parametrize("endpoint", UNREACHABLE)
def test_an_endpoint_that_is_not_there_is_an_error_soon(endpoint):
    options = CloudOptions(endpoint=endpoint, access_key_id="known", secret_access_key=SECRET, **QUICK)
    with pytest.raises(milepost.StorageError, match=UNREACHABLE[endpoint]) as raised:
        CloudStore("s3://bucket/a", options).create("x", b"")
    assert not isinstance(raised.value, milepost.NoReply), "nothing was sent"
    assert endpoint in str(raised.value)
    assert SECRET not in shown(raised.value)


def test_an_endpoint_of_the_environment_is_checked_and_named(monkeypatch):
    options = CloudOptions(access_key_id="known", secret_access_key=SECRET, region="us-east-1", **QUICK)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(milepost.StorageError, match=r"Is the endpoint http://127\.0\.0\.1:1 right"):
        CloudStore("s3://bucket-1/a", options).create("x", b"")
    variables = {"s3": "AWS_ENDPOINT_URL_S3", "gs": "STORAGE_EMULATOR_HOST", "az": "AZURE_STORAGE_ENDPOINT"}
    for scheme, name in variables.items():
        monkeypatch.setenv(name, "127.0.0.1:9000" if scheme != "gs" else "ftp://host")
        with pytest.raises(milepost.InvalidRequest, match=f"{name} of the environment is a URL that begins with http"):
            CloudStore(f"{scheme}://bucket-2/a", CloudOptions(account="a", **QUICK)).create("x", b"")


def test_a_server_without_tls_is_told(seaweed):
    secure = seaweed.endpoint.replace("http:", "https:")
    with seaweed.place(secure) as url, pytest.raises(milepost.StorageError, match="does not speak TLS"):
        store_at(url).create("x", b"")


def openssl(folder, *arguments):
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


class Taking(BaseHTTPRequestHandler):
    """Takes objects, each name once."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(412 if self.path in self.server.taken else 200)
        self.server.taken.add(self.path)
        for name, value in (("ETag", '"1"'), ("Content-Length", "0")):
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_args):
        pass


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl, which is not there")
def test_a_certificate_of_ones_own_is_trusted_by_ca_file(tmp_path):
    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    names = ("-subj", "/CN=milepost tests", "-addext", "subjectAltName=IP:127.0.0.1")
    openssl(tmp_path, *new, "-keyout", "key.pem", "-out", "cert.pem", *names, "-addext", "basicConstraints=CA:FALSE")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Taking)
    server.taken = set()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = CloudOptions(endpoint=f"https://127.0.0.1:{server.server_port}", anonymous=True, **QUICK)
    try:
        with pytest.raises(milepost.StorageError, match=r"certificate is not trusted.*pass .* as ca_file"):
            CloudStore("s3://bucket/a", options).create("data/x", b"1")
        CloudStore("s3://bucket/a", replace(options, ca_file=tmp_path / "cert.pem")).create("data/x", b"1")
        assert server.taken == {"/bucket/a/data/x"}
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_missing_credentials_are_told(scheme, monkeypatch, tmp_path):
    for name in os.environ:
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://169.254.169.254")
    options = CloudOptions(region="us-east-1", account="account" if scheme == "az" else None, **QUICK)
    with pytest.raises(milepost.StorageError, match=r"no credentials were found.*Pass CloudOptions"):
        CloudStore(f"{scheme}://bucket/a", options).create("x", b"")


def test_wrong_settings_show_no_secret():
    wrong = [
        ("gs", {"service_account_key": '{"private_key": "' + SECRET + '"}'}),
        ("az", {"account": "a", "account_key": SECRET + "?"}),
        ("az", {"account": "a", "connection_string": f"AccountName=a;Key={SECRET}"}),
        ("s3", {"access_key_id": "a", "secret_access_key": SECRET, "ca_file": "absent-0123456789-abcdef.pem"}),
    ]
    for scheme, settings in wrong:
        with pytest.raises(milepost.InvalidRequest) as raised:
            CloudStore(f"{scheme}://bucket/a", CloudOptions(**settings)).create("x", b"")
        assert SECRET not in shown(raised.value)
    assert "absent-0123456789-abcdef.pem" in str(raised.value), "what can be shown is"


def test_a_newline_in_credentials_is_told_and_the_client_does_not_panic(seaweed, monkeypatch):
    """A secret that was read from a file often ends in one. obstore panics then, which no `except Exception` sees."""
    with seaweed.place() as url:
        keys = {"access_key_id": f"{SECRET}\n", "secret_access_key": SECRET}
        with pytest.raises(milepost.StorageError, match="hold a newline") as raised:
            CloudStore(url, CloudOptions(credentials=lambda: keys, **QUICK)).create("x", b"")
        assert SECRET not in shown(raised.value)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"{SECRET}\n")
        with pytest.raises(
            milepost.InvalidRequest, match="AWS_ACCESS_KEY_ID of the environment holds a newline"
        ) as raised:
            store_at(url).create("x", b"")
        assert SECRET not in shown(raised.value)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS.access)
        store_at(url).create("x", b"")


def test_credentials_of_a_callable_are_fetched_anew(seaweed, s3_proxy):
    asked = []

    def credentials():
        asked.append(1)
        soon = dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)
        keys = KEYS if len(asked) == 1 else OTHER_KEYS
        return {"access_key_id": keys.access, "secret_access_key": keys.secret, "expires_at": soon}

    with seaweed.place(s3_proxy.endpoint) as url:
        store = CloudStore(url, CloudOptions(credentials=credentials, **QUICK))
        store.create("a", b"1")
        assert len(asked) == 1, "they are kept while they are good"
        s3_proxy.set_rules(Rule("answer", header=KEYS.access, status=400, code="ExpiredToken", times=None))
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: store.create(name, b"2"), "bcdefghi"))
        assert len(asked) == 2, "once for all"
        assert sorted(store.list("")) == list("abcdefghi")


def test_a_callable_that_fails_is_named_and_its_words_are_not_shown(seaweed):
    def failing():
        raise RuntimeError(f"cannot sign in with {SECRET}")

    with seaweed.place() as url:
        with pytest.raises(milepost.StorageError, match="credentials raised RuntimeError") as raised:
            CloudStore(url, CloudOptions(credentials=failing, **QUICK)).create("x", b"")
        assert SECRET not in shown(raised.value)
        for wrong in ({"key": SECRET}, {"access_key_id": "a"}, {"access_key_id": "a", "expires_at": "soon"}):
            with pytest.raises(milepost.InvalidRequest, match="credentials") as raised:
                CloudStore(url, CloudOptions(credentials=lambda wrong=wrong: wrong, **QUICK)).create("x", b"")
            assert SECRET not in shown(raised.value)


def test_profiles_of_aws_are_read(seaweed, monkeypatch, tmp_path):
    with seaweed.place() as url:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        keys = f"aws_access_key_id = {KEYS.access}\naws_secret_access_key = {KEYS.secret}\n"
        (tmp_path / "credentials").write_text(f"[default]\n{keys}[wrong]\n{keys.rstrip()}x\n[training]\n{keys}")
        CloudStore(url).create("by default", b"")
        CloudStore(url, CloudOptions(profile="training")).create("by option", b"")
        monkeypatch.setenv("AWS_PROFILE", "training")
        CloudStore(url).create("by environment", b"")
        with pytest.raises(milepost.StorageError, match="credentials are wrong"):
            CloudStore(url, CloudOptions(profile="wrong", **QUICK)).create("x", b"")
        with pytest.raises(milepost.InvalidRequest, match="profile 'absent'"):
            CloudStore(url, CloudOptions(profile="absent")).create("x", b"")
        assert len(list(CloudStore(url).list(""))) == 3


def status(number, body):
    head = f"Generic error: Error performing PUT https://host/x?sig={SECRET} in 1ms - Server returned non-2xx"
    return f"{head} status code: {number} Words: {body}"


TEXTS = [
    (status(409, "<Error><Code>BlobAlreadyExists</Code>"), Why.TAKEN),
    (status(409, "<Error><Code>ConditionalRequestConflict</Code>"), Why.CONFLICT),
    (status(412, ""), Why.TAKEN),
    (status(404, "<Error><Code>ContainerNotFound</Code>"), Why.NO_BUCKET),
    (status(404, '{"error": {"message": "The specified bucket does not exist."}}'), Why.NO_BUCKET),
    (status(404, "<Error><Code>NoSuchKey</Code>"), Why.ABSENT),
    (status(401, '{"error": {"message": "Invalid Credentials"}}'), Why.EXPIRED),
    (
        status(403, f"<Error><Code>AuthenticationFailed</Code><Message>signature '{SECRET}' differs</Message>"),
        Why.BAD_CREDENTIALS,
    ),
    (status(403, f"<Code>AccessDenied</Code><Message>token={SECRET} is not allowed</Message>"), Why.DENIED),
    (status(503, "<Code>ServerBusy</Code>"), Why.THROTTLED),
    (status(503, ""), Why.THROTTLED),
    (status(429, ""), Why.THROTTLED),
    (status(400, "<Code>XAmzContentSHA256Mismatch</Code>"), Why.DAMAGED),
    (status(599, ""), Why.BUSY),
    ("x HttpError {\n kind: Timeout,", Why.LATE),
    ("x HttpError {\n kind: Interrupted,", Why.UNANSWERED),
    ("x HttpError {\n kind: Connect, invalid peer certificate: UnknownIssuer", Why.UNTRUSTED),
    ("Error performing PUT http://169.254.169.254/latest/api/token in 1s - HttpError", Why.NO_CREDENTIALS),
    (f"something new, with https://host/x?X-Amz-Signature={SECRET} in it", Why.REFUSED),
]


@pytest.mark.parametrize(("text", "why"), TEXTS)
def test_replies_are_understood_and_scrubbed(text, why):
    refusal = understand(text, [SECRET])
    assert refusal.why is why
    assert SECRET not in repr(refusal)
    assert SECRET not in repr(understand(text)), "known or not"


def test_secrets_of_the_environment_are_known():
    env = {"AWS_SECRET_ACCESS_KEY": "one1", "AZURE_STORAGE_CONNECTION_STRING": "two2", "AWS_SESSION_TOKEN": "three"}
    env |= {
        "AWS_ACCESS_KEY_ID": "public",
        "AWS_REGION": "here",
        "OTHER_KEY": "other",
        "GOOGLE_SERVICE_ACCOUNT_KEY": "four",
    }
    assert sorted(known_secrets(CloudOptions(token="five"), env)) == ["five", "four", "one1", "three", "two2"]


def test_what_looks_like_a_secret_is_scrubbed():
    for secret in [
        "AKIAIOSFODNN7EXAMPLE",
        "Bearer abc.def",
        "sig=abc%2F",
        "ya29.abc",
        "http://u:pw@host",
        "AccountKey=abc==",
    ]:
        for hidden in ("abc", "pw", "AKIA"):
            assert hidden not in scrub(f"it said {secret} there")
    assert "sesame" not in scrub("it said open sesame there", ["open sesame"]), "nor what is known to be one"
    assert scrub("The specified bucket does not exist") == "The specified bucket does not exist"


def test_a_long_answer_is_scrubbed_in_no_time():
    began = time.monotonic()
    assert len(scrub("a" * 1_000_000)) <= 300
    assert time.monotonic() - began < 5
