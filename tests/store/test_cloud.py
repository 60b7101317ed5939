"""Object stores beyond the contract: names, processes, what is asked, and what a bad service is told by."""

import array
import base64
import contextlib
import os
import pickle
import subprocess
import sys
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

import milepost
from faults.proxy import Rule
from milepost.store import CloudOptions, CloudStore, Within, store_at

ODD = [
    "a b",
    "100%",
    "%20",
    "a+b",
    "#x",
    "what?",
    "é\u4e2d",
    "x=y&z",
    "~tilde",
    "[a]{b}",
    "'q'",
    "a:b;c,d@e",
    "...",
    "-",
]


@pytest.fixture(params=["seaweed", "azurite", "small_gcs"])
def url(request):
    with request.getfixturevalue(request.param).place() as url:
        yield url


@pytest.fixture
def s3(seaweed):
    with seaweed.place() as url:
        yield url


def below(url, path):
    """The URL of a place inside another."""
    address, _, query = url.partition("?")
    return f"{address}/{path}?{query}"


def content(store, name):
    reader = store.reader(name)
    found = bytearray(reader.size_bytes)
    reader.read(0, [memoryview(found)])
    return bytes(found)


def test_odd_names_and_roots_are_stored_as_they_are(url):
    outer = store_at(url)
    for name in ODD:
        outer.create(f"{name}/{name}", name.encode())
    assert sorted(outer.list("")) == sorted(f"{name}/{name}" for name in ODD)
    assert sorted(outer.list("", shallow=True)) == sorted(f"{name}/" for name in ODD)
    for name in ODD:
        inner = Within(outer, name) if "?" in name else store_at(below(url, name + "/"))
        assert list(inner.list("")) == list(inner.list("", shallow=True)) == [name]
        assert content(inner, name) == name.encode()
        inner.delete(name)
    assert list(outer.list("")) == []


def test_a_bucket_itself_is_a_place(s3):
    root = f"s3://{s3.split('/')[2]}?{s3.partition('?')[2]}"
    inside = s3.partition("?")[0].rpartition("/")[2]
    store_at(s3).create("a/b", b"1")
    store = store_at(root)
    assert f"{inside}/a/b" in store.list("")
    assert f"{inside}/" in store.list("", shallow=True)
    assert content(store, f"{inside}/a/b") == b"1"
    store.create(f"{inside}-top", b"2")
    assert content(store, f"{inside}-top") == b"2"
    store.delete(f"{inside}-top")


@pytest.mark.slow
def test_long_listings_and_deletions_go_by_pages_and_batches(seaweed, s3_proxy):
    names = [f"data/{i:05}" for i in range(1005)]
    with seaweed.place(s3_proxy.endpoint) as url:
        store = store_at(url)
        threads = [threading.Thread(target=lambda k=k: [store.create(n) for n in names[k::8]]) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        s3_proxy.traffic(reset=True)
        assert sorted(store.list("")) == names
        assert s3_proxy.traffic(reset=True).requests == {"LIST": 2}
        assert list(store.list("", shallow=True)) == ["data/"]
        assert s3_proxy.traffic(reset=True).requests == {"LIST": 1}
        s3_proxy.set_rules(Rule("answer", "LIST", skip=1, status=500, code="InternalError"))
        assert sorted(store.list("data/")) == names
        assert s3_proxy.traffic(reset=True).requests == {"LIST": 3}, "only the page that failed is asked for again"
        store.delete(*names)
        assert s3_proxy.traffic(reset=True).total == 2
        assert list(store.list("")) == []


def test_opening_and_reading_ask_as_little_as_possible(seaweed, s3_proxy):
    with seaweed.place(s3_proxy.endpoint) as url:
        store = store_at(url)
        store.create("small", b"x" * 1000)
        store.create("large", bytes(40 << 20))
        s3_proxy.traffic(reset=True)
        assert content(store, "small") == b"x" * 1000
        assert s3_proxy.traffic(reset=True).total == 1, "the request that opens it brings it"
        known = store.reader("large", size_bytes=40 << 20)
        assert s3_proxy.traffic(reset=True).total == 0
        known.read(5, [memoryview(bytearray(8 << 20))])
        assert s3_proxy.traffic(reset=True).total == 1
        known.read(0, [memoryview(bytearray(30 << 20)), memoryview(bytearray(10 << 20))])
        assert s3_proxy.traffic(reset=True).total == 5, "a long read is cut"


def test_a_long_read_fills_its_views_in_order(s3):
    store = store_at(s3)
    data = os.urandom(33 << 20)
    empty = memoryview(array.array("d"))  # of another type, and without bytes
    store.create("large", memoryview(data)[: 1 << 20], empty, memoryview(data)[1 << 20 :].cast("I"))
    found = bytearray(len(data) - 10)
    views = [memoryview(found)[a:b] for a, b in [(0, 3), (3, 3), (3, 9 << 20), (9 << 20, len(found))]]
    store.reader("large").read(10, views)
    assert found == data[10:]


def test_memory_is_free_to_change_once_create_has_returned(s3):
    """No client keeps hold of the caller's memory: a buffer that is still exported could not be resized."""
    store = store_at(s3)
    for name in "aaaaabc":
        memory = bytearray(5 << 20)
        with contextlib.suppress(milepost.AlreadyExists):
            store.create(name, memory, memoryview(memory)[:100])
        memory.clear()
    assert store.reader("a").size_bytes == (5 << 20) + 100


def test_a_store_can_be_pickled_and_shows_no_secret(s3):
    keys = {"access_key_id": "known", "secret_access_key": "hidden-1", "session_token": "hidden-2"}
    options = CloudOptions(**keys, proxy="http://user:hidden-3@proxy")
    store = CloudStore(s3, options)
    assert "hidden" not in repr(store) + repr(store.options) + str(store.options) + store.url
    again = pickle.loads(pickle.dumps(store))
    assert again.url == store.url
    assert again.options == store.options
    assert again.options.endpoint is not None, "what the query set is kept"


def test_a_forked_process_is_told_why_it_cannot_ask(s3):
    store_at(s3).create("a", b"")
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of Python warn of forks where there are threads
        pid = os.fork()
    if not pid:
        try:
            store_at(s3).create("b", b"")
        except milepost.StorageError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert b"was forked" in os.read(read, 1000)
    os.close(read)
    os.close(write)


def test_a_process_that_forks_before_the_first_request_can_ask(s3):
    code = f"""
import os, sys, milepost
store = milepost.store.store_at({s3!r})
pid = os.fork()
store.create("child" if not pid else "parent", b"")
if pid:
    sys.exit(os.waitpid(pid, 0)[1])
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
    assert sorted(store_at(s3).list("")) == ["child", "parent"]


def test_nothing_but_a_place_needs_the_client():
    code = "import sys, milepost, milepost.store\n"
    code += "milepost.store.store_at('s3://bucket/a')\n"
    code += "assert not {'torch', 'obstore', 'boto3', 'fsspec'} & set(sys.modules), sys.modules.keys()\n"
    code += "sys.modules['obstore'] = sys.modules['obstore.store'] = None\n"
    code += "list(milepost.store.store_at('s3://bucket/a').list(''))\n"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert 'InvalidRequest: object stores need obstore: pip install "milepost[cloud]"' in run.stderr


class Overwriting(BaseHTTPRequestHandler):
    """A service that takes every object, whatever the request says about those that are there."""

    protocol_version = "HTTP/1.1"
    paths: ClassVar = set()

    def answer(self):
        self.paths.add(self.path)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_PUT = do_DELETE = do_POST = answer

    def log_message(self, *_args):
        pass


def test_a_service_that_ignores_conditions_is_refused():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Overwriting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        options = CloudOptions(endpoint=f"http://127.0.0.1:{server.server_port}", anonymous=True)
        store = CloudStore("s3://bucket/a", options)
        for name in ("manifest", "data/a", "step/data/a", "manifest"):
            with pytest.raises(milepost.StorageError, match="overwrites objects though it is asked not to"):
                store.create(name, b"1")
        assert "/bucket/a/manifest" not in Overwriting.paths, "which would be emptied by the look"
    finally:
        server.shutdown()
        server.server_close()


def test_a_service_is_looked_at_again_after_a_look_that_failed(seaweed, s3_proxy):
    with seaweed.place(s3_proxy.endpoint) as url:
        store = CloudStore(url, CloudOptions(requests=9))  # of its own: nobody has looked yet
        s3_proxy.set_rules(Rule("answer", "PUT", skip=1, status=403, code="AccessDenied"))
        with pytest.raises(milepost.StorageError, match="s3:PutObject"):
            store.create("data/a", b"1")
        for name, puts in (("b", 3), ("c", 1)):  # the first with an object of its own
            s3_proxy.traffic(reset=True)
            store.create(name, b"1")
            assert s3_proxy.traffic().requests["PUT"] == puts


def test_check_says_the_first_thing_that_is_wrong(seaweed, s3_proxy):
    with seaweed.place(s3_proxy.endpoint) as url:
        s3_proxy.set_rules(Rule("answer", times=None, status=403, code="AccessDenied"))
        with pytest.raises(milepost.StorageError, match=r"cannot write .*s3:PutObject"):
            store_at(url).check()


def test_check_leaves_nothing_and_passes(url):
    store = store_at(url)
    store.check()
    assert list(store.list("")) == []


def works(url, **options):
    store = CloudStore(url, CloudOptions(patience_s=0.1, **options))
    name = f"name-{len(list(store.list('')))}"
    store.create(name, b"1")
    assert content(store, name) == b"1"


def test_credentials_of_azure_are_taken_in_every_form(azurite, monkeypatch):
    name, key = (azurite.environment[f"AZURE_STORAGE_ACCOUNT_{end}"] for end in ("NAME", "KEY"))
    with azurite.place() as url:
        address = url.partition("?")[0]
        endpoint = store_at(url).options.endpoint
        for variable in azurite.environment:
            monkeypatch.delenv(variable)
        works(url, account_key=key)
        works(url, credentials=lambda: {"account_key": key})
        works(address, connection_string=f"AccountName={name};AccountKey={key};BlobEndpoint={endpoint}")
        monkeypatch.setenv(
            "AZURE_STORAGE_CONNECTION_STRING", f"BlobEndpoint={endpoint};AccountName={name};AccountKey={key}"
        )
        works(address)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", key)
        other = base64.b64encode(b"another key").decode()
        with pytest.raises(milepost.StorageError, match="The credentials are wrong") as raised:
            works(url, account_key=other)
        assert other not in str(raised.value)


def test_credentials_of_google_are_taken_in_every_form(small_gcs, monkeypatch):
    token = small_gcs.environment["GOOGLE_BEARER_TOKEN"]
    with small_gcs.place() as url:
        works(url)
        monkeypatch.delenv("GOOGLE_BEARER_TOKEN")
        works(url, token=token)
        works(url, credentials=lambda: {"token": token})
        with pytest.raises(milepost.StorageError, match="expired or are not accepted") as raised:
            works(url, token="wrong-hidden")
        assert "hidden" not in str(raised.value)
