"""Places on the web are read as folders are, whatever their server is like; nothing is saved there."""

import argparse
import base64
import os
import pickle
import shutil
import subprocess

import pytest
import torch

import milepost
from milepost.formats.read.virtual import unpickled
from milepost.store import HttpStore, LocalStore, http, http_client, store_at
from tests.ranks import spawn
from tests.web import Web, busy, cut, fine, hang_up, other_range


def a_state(number=1.0):
    return {"w": torch.full((700, 300), number), "b": torch.arange(5), "step": 7}


def blank():
    return {"w": torch.zeros(700, 300), "b": torch.zeros(5, dtype=torch.int64), "step": 0}


def assert_loads(path, number=1.0):
    target = blank()
    milepost.load(target, path)
    assert torch.equal(target["w"], torch.full((700, 300), number))
    assert torch.equal(target["b"], torch.arange(5))
    assert target["step"] == 7


@pytest.fixture
def web(tmp_path):
    with Web(tmp_path) as web:
        yield web


def test_a_checkpoint_is_opened_verified_explained_and_loaded(web, tmp_path):
    milepost.save(a_state(), tmp_path / "run a" / "step~1")
    for url in (f"{web.url}/run a/step~1", f"{web.url}/run%20a/step~1/", f"{web.url}/run a/step~1".encode()):
        assert_loads(url)
    url = f"{web.url}/run%20a/step~1"
    with milepost.open(url) as checkpoint:
        assert checkpoint["w"][3:5, 7].tolist() == [1.0, 1.0]
        assert checkpoint.verify().ok
        assert checkpoint.url == url
    assert milepost.explain(blank(), url).fits()
    milepost.convert(url, tmp_path / "copy")
    assert_loads(tmp_path / "copy")


def test_opening_takes_few_requests_on_one_connection(web, tmp_path):
    milepost.save(a_state(), tmp_path / "a")
    milepost.open(f"{web.url}/a")
    assert len(web.requests) <= 6, web.requests
    before = len(web.requests)
    milepost.open(f"{web.url}/a")["w"].read()
    assert len(web.requests) - before <= 10


def test_later_generations_are_tried_or_named_by_the_manifest(web, tmp_path, monkeypatch):
    monkeypatch.setattr(http, "TRIED_GENERATIONS", 3)
    for number in range(3):
        milepost.save(a_state(float(number)), tmp_path / "a")
    assert milepost.open(f"{web.url}/a").generation == 3
    milepost.save(a_state(3.0), tmp_path / "a")
    with pytest.raises(milepost.CheckpointNotFound, match=r"Nothing can be listed.*URL of the manifest"):
        milepost.open(f"{web.url}/a")
    assert_loads(f"{web.url}/a/manifest-00000004.json", 3)


@pytest.mark.parametrize("fault", [busy, cut, hang_up, other_range])
def test_a_failure_at_any_request_is_tried_again(web, tmp_path, fault):
    milepost.save(a_state(), tmp_path / "a")
    assert_loads(f"{web.url}/a")
    count, web.requests[:] = len(web.requests), []
    for number in range(count):
        web.faults = [fine] * number + [fault]
        assert_loads(f"{web.url}/a")
        assert not web.faults


def test_a_server_without_ranges_is_read_from_the_start(tmp_path):
    milepost.save(a_state(), tmp_path / "a")
    with Web(tmp_path, ranges=False) as web:
        assert_loads(f"{web.url}/a")
        torch.save(a_state(2.0), tmp_path / "a.pt")
        assert torch.equal(milepost.open(f"{web.url}/a.pt")["w"].read(), a_state(2.0)["w"])


def test_redirects_and_pages_for_missing_files(tmp_path):
    milepost.save(a_state(), tmp_path / "a")
    with Web(tmp_path, page_for_missing=True) as web, Web(tmp_path, moved_to=web.url) as moved:
        assert_loads(f"{moved.url}/a")
        with pytest.raises(milepost.CheckpointNotFound):
            milepost.open(f"{moved.url}/b")
    with (
        Web(tmp_path, moved_to="file://") as moved,
        pytest.raises(milepost.StorageError, match="redirects to a file URL"),
    ):
        milepost.open(f"{moved.url}/a")


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (302, {"Location": "http://host:99999999/"}),
        (302, {"Location": "http://[1/"}),
        (206, {"Content-Range": "bytes 0-0/" + "9" * 5000}),
        (503, {"Retry-After": "\u00b2"}),
    ],
)
def test_nonsense_of_a_server_is_an_error_of_the_store(web, status, headers):
    def nonsense(handler):
        handler.answer(status, b"x", **headers)
        return True

    web.faults = [nonsense] * 100
    with pytest.raises(milepost.StorageError, match=f"cannot read {web.url}/a/x"):
        http_client.HttpClient(patience_s=0.1).read(f"{web.url}/a/x", f"{web.url}/a/x", 0, [memoryview(bytearray(1))])


def read_one(client, url):
    client.read(url, url, 0, [memoryview(bytearray(1))])


def test_address_that_nobody_listens_at_is_given_up_early(tmp_path):
    (tmp_path / "x").write_bytes(b"7")
    with Web(tmp_path) as web:
        known, new = (http_client.HttpClient(patience_s=1.0, refused_s=0.0) for _ in range(2))
        web.faults = [lambda handler: handler.answer(404, b"", sent=0) or True]  # and it keeps no connection
        with pytest.raises(FileNotFoundError):
            read_one(known, f"{web.url}/no")
    with pytest.raises(milepost.StorageError, match=r"refused.*Tried again for 0 s. Is the server up"):
        read_one(new, f"{web.url}/x")
    with pytest.raises(milepost.StorageError, match=r"refused.*Tried again for [1-9]"):
        read_one(known, f"{web.url}/x")


def test_a_redirect_that_is_not_quoted_is_followed(web, tmp_path):
    (tmp_path / "größe x").write_bytes(b"7")
    target = "/gr\u00c3\u00b6\u00c3\u009fe x"  # UTF-8, as a header shows it
    web.faults = [lambda handler: handler.answer(302, b"", Location=target) or True]
    data = bytearray(1)
    http_client.HttpClient().read(f"{web.url}/a", "a", 0, [memoryview(data)])
    assert data == b"7"


def test_secrets_are_sent_to_the_host_and_never_shown(web, tmp_path):
    milepost.save(a_state(), tmp_path / "a")
    host = web.url.removeprefix("http://")
    url = f"http://me:pass%20word@{host}/a?token=secret"
    with milepost.open(url) as checkpoint:
        checkpoint["w"].read()
        shown = [repr(checkpoint), checkpoint.url, repr(store_at(url))]
    assert all("?token=secret" in request for request in web.requests)
    assert set(web.logins) == {"Basic bWU6cGFzcyB3b3Jk"}
    for call in (
        lambda: milepost.open(f"{url}&x"),
        lambda: milepost.load(blank(), f"http://me:pass@{host}/no?token=secret"),
    ):
        try:
            call()
        except milepost.CheckpointError as error:
            shown += [str(error), repr(error)]
    with pytest.raises(milepost.InvalidRequest) as refused:
        milepost.save(a_state(), url)
    shown.append(str(refused.value))
    assert not any("pass" in text or "secret" in text or "pass%20word" in text for text in shown), shown
    again = pickle.loads(pickle.dumps(store_at(url)))
    assert again.reader("manifest-00000001.json").size_bytes > 0
    web.logins.clear()
    with Web(tmp_path, moved_to=web.url) as moved:
        milepost.open(moved.url.replace("http://", "http://me:pass@") + "/a")
    assert set(web.logins) == {""}, "the host that it redirects to does not get the password"


def test_values_that_need_pickle_come_from_the_very_place(web, tmp_path):
    """By its URL without the token, another file could be read, and its pickle run."""
    torch.save(a_state() | {"args": argparse.Namespace(lr=3)}, tmp_path / "a.pt")
    checkpoint = milepost.open(f"{web.url}/a.pt?token=secret", allow_pickle=True)
    assert checkpoint["args"] == argparse.Namespace(lr=3)
    assert all("?token=secret" in request for request in web.requests)
    spelled = next(value.value for value in checkpoint.manifest.values if value.key == "args")
    assert b"secret" not in base64.b64decode(spelled["pickle"])
    with pytest.raises(milepost.InvalidRequest, match="open it again"):
        unpickled("archive://0/a.pt", ())


def test_saves_are_refused_before_anything_is_staged(web, tmp_path):
    for url in (f"{web.url}/a", "https://bucket.s3.eu-west-1.amazonaws.com/a/b"):
        for call in (
            lambda: milepost.save(a_state(), url),  # noqa: B023
            lambda: milepost.async_save(a_state(), url),  # noqa: B023
            lambda: milepost.Checkpointer(url).save(a_state(), 1),  # noqa: B023
            lambda: milepost.convert(tmp_path, url),  # noqa: B023
            lambda: milepost.planning.CheckpointWriter(url),  # noqa: B023
        ):
            with pytest.raises(milepost.InvalidRequest, match=r"only read.*save to") as refused:
                call()
    assert "s3://bucket/a/b?region=eu-west-1" in str(refused.value)
    assert web.requests == []


def test_a_file_that_changes_is_not_mixed(web, tmp_path):
    milepost.export_safetensors(a_state() | {"step": torch.tensor(7)}, tmp_path / "hf")
    checkpoint = milepost.open(f"{web.url}/hf")
    checkpoint["b"].read()
    os.utime(tmp_path / "hf" / "model.safetensors", ns=(1, 1))
    with pytest.raises(milepost.CheckpointDamaged, match="replaced while it was read"):
        checkpoint["w"].read()


def test_a_dead_server_is_given_up_in_time(web, tmp_path, monkeypatch):
    monkeypatch.setattr(http_client.HttpClient.__init__, "__defaults__", ("", "", 0.3, 0.3))
    milepost.save(a_state(), tmp_path / "a")
    web.stop()
    with pytest.raises(milepost.StorageError, match=r"cannot read http.*Is the server up"):
        milepost.open(f"{web.url}/a")
    for wrong in ("https://", "http:///a", "https://host:port/a"):
        with pytest.raises(milepost.InvalidRequest, match=r"URL|host"):
            store_at(wrong)


def test_a_proxy_of_the_environment_is_asked(web, tmp_path, monkeypatch):
    milepost.save(a_state(), tmp_path / "a")
    monkeypatch.setenv("http_proxy", web.url.replace("http://", "http://me:pass@"))
    assert_loads("http://host.invalid/a")
    assert all(request.startswith("http://host.invalid/a/") for request in web.requests)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    web.requests.clear()
    assert_loads(f"{web.url}/a")
    assert all(request.startswith("/a/") for request in web.requests)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_https_needs_a_certificate_that_is_trusted(tmp_path, monkeypatch):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    wishes = ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", *wishes, "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    milepost.save(a_state(), tmp_path / "a")
    with Web(tmp_path, certificate=(certificate, key)) as web:
        with pytest.raises(milepost.StorageError, match=r"certificate.*SSL_CERT_FILE"):
            milepost.open(f"{web.url}/a")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert_loads(f"{web.url}/a")


def load_and_refuse(rank, url, folder):
    assert_loads(url)
    with pytest.raises(milepost.InvalidRequest, match="only read"):
        milepost.save(a_state(), url)
    milepost.save(a_state(), folder)  # the ranks have not lost each other
    return milepost.open(folder).generation


@pytest.mark.slow
def test_ranks_load_from_the_web_and_all_refuse_a_save(web, tmp_path):
    milepost.save(a_state(), tmp_path / "a")
    assert spawn(2, load_and_refuse, f"{web.url}/a", str(tmp_path / "b")) == [1, 1]


def test_the_reading_half_of_the_contract(web, tmp_path):
    local, store = LocalStore(tmp_path), HttpStore(web.url)
    local.create("manifest-00000001.json", b"0123456789")
    local.create("empty", b"")
    local.create(".metadata", b"x")
    local.create("model.safetensors", bytes(range(256)) * 4000)
    assert set(store.list("")) == {"manifest-00000001.json", ".metadata"} == set(store.list("", shallow=True))
    assert list(store.list("manifest-")) == ["manifest-00000001.json"]
    assert list(store.list("model")) == ["model.safetensors"]
    assert store.reader("empty").size_bytes == 0
    long = store.reader("model.safetensors", size_bytes=1_024_000)
    first, second = bytearray(300), bytearray(400_000)
    long.read(1000, [memoryview(first), memoryview(second)])
    assert bytes(first + second) == (bytes(range(256)) * 4000)[1000:401_300]
    with pytest.raises(milepost.StorageError, match="ends before"):
        long.read(1_023_999, [memoryview(bytearray(2))])
    with pytest.raises(milepost.CheckpointDamaged, match="1024000 bytes"):
        store.reader("model.safetensors", size_bytes=77).read(0, [memoryview(bytearray(7))])
    with pytest.raises(FileNotFoundError):
        store.reader("absent")
    with pytest.raises(FileNotFoundError):
        store.reader("absent", size_bytes=3).read(0, [memoryview(bytearray(3))])
    for name in ("", "../x", "a//b", "a/."):
        with pytest.raises(milepost.UnsafeCheckpoint):
            store.reader(name)
