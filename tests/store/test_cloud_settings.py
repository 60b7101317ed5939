"""URLs and options of object stores: every spelling, every setting, and no secret where it can be seen."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import milepost
from milepost.store import CloudOptions, CloudStore, store_at
from milepost.store.cloud import client
from milepost.store.cloud.client import client_settings, doublings, limits, store_settings
from milepost.store.cloud.credentials import connection_settings
from milepost.store.cloud.region import find_region
from milepost.store.cloud.url import parse_url

SPELLINGS = {
    "s3://bucket": ("s3", "bucket", "", None),
    "s3://bucket/": ("s3", "bucket", "", None),
    "s3a://bucket/a/b/": ("s3", "bucket", "a/b", None),
    "gs://my.bucket/a": ("gs", "my.bucket", "a", None),
    "gcs://bucket/a#b": ("gs", "bucket", "a#b", None),
    "az://container/a%20b": ("az", "container", "a%20b", None),
    "azure://container/é": ("az", "container", "é", None),
    "abfs://container/a": ("az", "container", "a", None),
    "abfss://container@account.dfs.core.windows.net/a": ("az", "container", "a", "account"),
    "abfs://container@account.blob.core.chinacloudapi.cn/a": ("az", "container", "a", "account"),
}


@pytest.mark.parametrize("url", SPELLINGS)
def test_every_spelling_names_a_place(url):
    place, settings = parse_url(url)
    assert (place.provider, place.bucket, place.root, place.account) == SPELLINGS[url]
    assert settings == {}
    assert store_at(url).url == url.rstrip("/")


BAD = [
    "s3://",
    "s3:///a",
    "s3://bucket/a//b",
    "s3://bucket//a",
    "s3://bucket/../a",
    "s3://bucket/./a",
    "s3://bucket/a\nb",
    "s3://bucket/a\\b",
    "s3://bucket/a?region=eu-west-1%0A",
    "s3://bucket/a?patience_s=1e300",
    "s3://buc ket/a",
    "s3://key:hidden@bucket/a",
    "gs://hidden@bucket/a",
    "az://hidden@host/a",
    "s3://bucket/a?secret_access_key=hidden",
    "s3://bucket/a?X-Amz-Signature=hidden&X-Amz-Credential=hidden",
    "az://bucket/a?sv=2024&sig=hidden",
    "az://bucket/a?account_key=hidden",
    "s3://bucket/a?region=hidden&region=hidden",
    "s3://bucket/a?path_style=hidden",
    "s3://bucket/a?requests=hidden",
    "s3://bucket/a?requests=0",
    "s3://bucket/a?patience_s=nan",
    "s3://bucket/a?timeout_s=-1",
    "s3://bucket/a?proxy=http://user:hidden@proxy",
    "s3://bucket/a?endpoint=http://user:hidden@host",
    "s3://bucket/a?endpoint=hidden",
    "s3://bucket/a?endpoint=ftp://hidden",
    "s3://bucket/a?endpoint=http://host?x=hidden",
    "s3://bucket/a?region=",
]


@pytest.mark.parametrize("url", BAD)
def test_a_url_that_names_no_place_or_holds_a_secret_is_refused(url):
    with pytest.raises(milepost.InvalidRequest) as raised:
        store_at(url)
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": 5},
        {"endpoint": "hidden"},
        {"region": ""},
        {"path_style": "yes"},
        {"anonymous": None},
        {"requests": 0},
        {"requests": 1.5},
        {"requests": 10**400},
        {"timeout_s": 1e12},
        {"token": "hidden\n"},
        {"patience_s": float("inf")},
        {"timeout_s": True},
        {"credentials": "hidden"},
        {"secret_access_key": "hidden"},
        {"account_key": b"hidden"},
    ],
)
def test_wrong_options_are_named_and_not_shown(wrong):
    with pytest.raises(milepost.InvalidRequest, match=next(iter(wrong))) as raised:
        CloudOptions(**wrong)
    assert "hidden" not in str(raised.value)
    for options in ("options", {"region": "a"}):
        with pytest.raises(milepost.InvalidRequest, match="CloudOptions"):
            CloudStore("s3://bucket/a", options)


def settings_of(url, env=(), **options):
    store = CloudStore(url, CloudOptions(**options))
    return store_settings(parse_url(url)[0], store.options, dict(env))[0]


def test_settings_of_s3_come_from_options_query_and_environment():
    keys = {"AWS_ACCESS_KEY_ID": "a"}
    found = settings_of("s3://bucket/a?region=eu-west-1", keys | {"AWS_REGION": "eu-west-2"})
    assert found["region"] == "eu-west-1"
    assert found["virtual_hosted_style_request"] is True
    assert "endpoint" not in found
    assert settings_of("s3://bucket/a", keys | {"AWS_DEFAULT_REGION": "eu-west-2"})["region"] == "eu-west-2"
    assert settings_of("s3://my.bucket/a", keys, region="a")["virtual_hosted_style_request"] is False
    both = keys | {"AWS_ENDPOINT_URL": "http://one", "AWS_ENDPOINT_URL_S3": "http://two"}
    assert settings_of("s3://bucket/a", both)["endpoint"] == "http://two"
    assert settings_of("s3://bucket/a", both, endpoint="https://three/")["endpoint"] == "https://three"
    hosted = settings_of("s3://bucket/a?endpoint=https://host:9000/x&path_style=false", keys)
    assert hosted["endpoint"] == "https://bucket.host:9000/x"
    assert settings_of("s3://bucket/a", both)["virtual_hosted_style_request"] is False
    assert settings_of("s3://bucket/a", both, anonymous=True)["skip_signature"] is True
    assert settings_of("s3://bucket/a", both)["checksum_algorithm"] == "SHA256"
    unsigned = settings_of("s3://bucket/a", both, unsigned=True)
    assert (unsigned["unsigned_payload"], unsigned["checksum_algorithm"]) == (True, "CRC64NVME")
    assert settings_of("s3://bucket/a", both, kms_key="key")["sse_kms_key_id"] == "key"


def test_settings_of_azure_come_from_url_options_and_environment():
    inside = "abfss://container@account.dfs.core.windows.net/a"
    assert settings_of(inside)["account_name"] == "account"
    assert settings_of("az://container/a?account=b")["account_name"] == "b"
    assert settings_of("az://container/a", {"AZURE_STORAGE_ACCOUNT": "c"})["account_name"] == "c"
    assert settings_of("az://container/a", account="d", sas="s")["sas_key"] == "s"
    text = "DefaultEndpointsProtocol=https;AccountName=e;AccountKey=a2V5PQ==;EndpointSuffix=core.windows.net"
    found = settings_of("az://container/a", {"AZURE_STORAGE_CONNECTION_STRING": text})
    assert found == {
        "account_name": "e",
        "account_key": "a2V5PQ==",
        "endpoint": "https://e.blob.core.windows.net",
    }
    local = connection_settings("BlobEndpoint=http://127.0.0.1:1/e/;SharedAccessSignature=sv=1&sig=a=;")
    assert local == {"sas_key": "sv=1&sig=a=", "endpoint": "http://127.0.0.1:1/e"}
    with pytest.raises(milepost.InvalidRequest, match="whose storage account"):
        settings_of("az://container/a")


def test_http_is_for_endpoints_that_say_so(tmp_path):
    plain = client_settings(CloudOptions(), {"endpoint": "http://host"}, {})
    assert plain["allow_http"] is True
    assert client_settings(CloudOptions(), {}, {})["allow_http"] is False
    assert client_settings(CloudOptions(), {"base_url": "https://host"}, {})["allow_http"] is False
    (tmp_path / "ca.pem").write_bytes(b"certificates")
    for options, env in [
        (CloudOptions(ca_file=tmp_path / "ca.pem", proxy="http://proxy"), {}),
        (CloudOptions(proxy="http://proxy"), {"AWS_CA_BUNDLE": str(tmp_path / "ca.pem")}),
    ]:
        found = client_settings(options, {}, env)
        assert (found["root_certificate"], found["proxy_url"]) == (b"certificates", "http://proxy")


def test_time_limits_grow_with_the_data_and_after_timeouts():
    assert doublings(30, 0, 0) == doublings(30, 1000, 0) == doublings(30, 0, 5) == 0
    assert doublings(30, 64 << 20, 0) == 1
    assert doublings(30, 64 << 20, 1) == doublings(30, 64 << 20, 100) == 2
    assert limits(30.0, "read")["read_timeout"] < limits(30.0, "read")["timeout"]
    assert "read_timeout" not in limits(30.0, "write")


class Redirecting(BaseHTTPRequestHandler):
    """Answers as S3 does to those who ask at the wrong place, or may not ask."""

    def do_HEAD(self):
        status, region = {"/away": (301, "eu-west-1"), "/closed": (403, "us-west-2")}.get(self.path, (404, None))
        self.send_response(status)
        if region:
            self.send_header("x-amz-bucket-region", region)
        self.end_headers()

    def log_message(self, *_args):
        pass


def test_the_region_of_a_bucket_is_asked_for():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Redirecting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = f"http://127.0.0.1:{server.server_port}"
    try:
        assert find_region("away", CloudOptions(), where) == "eu-west-1"
        assert find_region("closed", CloudOptions(), where) == "us-west-2"
        assert find_region("absent", CloudOptions(), where) is None
    finally:
        server.shutdown()
        server.server_close()
    assert find_region("away", CloudOptions(), where) is None, "nobody is there"


def test_the_region_is_asked_for_where_nobody_says_it(monkeypatch):
    asked = []
    monkeypatch.setattr(client, "find_region", lambda bucket, _options: asked.append(bucket) or "eu-west-3")
    keys = {"AWS_ACCESS_KEY_ID": "a"}
    assert settings_of("s3://bucket/a", keys)["region"] == "eu-west-3"
    assert settings_of("s3://bucket/a", keys, endpoint="http://host")["region"] == "us-east-1"
    assert settings_of("s3://bucket/a", keys, region="here")["region"] == "here"
    assert asked == ["bucket"]
