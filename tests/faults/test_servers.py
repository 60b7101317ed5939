"""The object stores that tests start: put-if-absent holds, what was written is read, and nothing of them is left."""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import pytest

from faults.processes import environment
from faults.proxy import Proxy, Rule
from faults.servers import SmallGcs
from faults.servers.object_server import BUCKET

obstore = pytest.importorskip("obstore")
NAMES = ["a/b", "a/c d%20+#?&<ü", "a/deep/er", "top"]


@pytest.fixture(params=["seaweed", pytest.param("azurite", marks=pytest.mark.slow), "small_gcs"])
def server(request):
    return request.getfixturevalue(request.param)


def client(url):
    """obstore's client for the place of a URL."""
    parts = urllib.parse.urlsplit(url)
    endpoint = dict(urllib.parse.parse_qsl(parts.query))["endpoint"]
    common = {
        "prefix": parts.path.strip("/"),
        "client_options": {"allow_http": True, "timeout": "20s"},
        "retry_config": {"max_retries": 0},
    }
    if parts.scheme == "gs":
        return obstore.store.GCSStore(BUCKET, base_url=endpoint, **common)
    if parts.scheme == "az":
        return obstore.store.AzureStore(BUCKET, endpoint=endpoint, **common)
    return obstore.store.S3Store(BUCKET, endpoint=endpoint, virtual_hosted_style_request=False, **common)


def names(store, prefix=None):
    return sorted(found["path"] for page in obstore.list(store, prefix) for found in page)


def winners(store, name, writers):
    """Which of so many concurrent conditional puts of a name succeeded."""
    won, together = [], threading.Barrier(writers)

    def write(number):
        together.wait()
        try:
            obstore.put(store, name, b"%d" % number, mode="create")
            won.append(number)
        except obstore.exceptions.AlreadyExistsError:
            pass

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


def test_servers_keep_what_is_written(server):
    with server.place() as url, server.place() as other:
        store = client(url)
        for name in NAMES:
            obstore.put(store, name, name.encode() * 100, mode="create")
        assert names(store) == sorted(NAMES)
        assert names(client(other)) == []
        found = obstore.list_with_delimiter(store, "a")
        assert found["common_prefixes"] == ["a/deep"]
        assert bytes(obstore.get_range(store, NAMES[1], start=3, length=50)) == (NAMES[1].encode() * 100)[3:53]
        obstore.delete(store, NAMES[:2])
        assert names(store) == NAMES[2:]
    with server.place():
        assert names(store) == [], "a place is empty when it was left"


@pytest.mark.slow
def test_of_eight_conditional_puts_one_wins(server):
    with server.place() as url:
        store = client(url)
        won = winners(store, "name", 8)
        assert len(won) == 1
        assert bytes(obstore.get(store, "name").bytes()) == b"%d" % won[0]


def test_upload_that_is_cut_leaves_nothing(server):
    with Proxy(server.address) as proxy, server.place(proxy.endpoint) as url:
        proxy.set_rules(Rule("cut_request", "PUT"))
        store = client(url)
        with pytest.raises(obstore.exceptions.BaseError):
            obstore.put(store, "name", b"content" * 1000, mode="create")
        assert names(store) == []
        obstore.put(store, "name", b"content" * 1000, mode="create")


def test_listings_of_many_names_come_in_pages(small_gcs):
    with small_gcs.place() as url:
        store = client(url)
        wanted = sorted(f"many/{number}" for number in range(205))
        for name in wanted:
            obstore.put(store, name, b"")
        assert names(store) == wanted


def test_requests_without_the_credentials_are_refused(server):
    with server.place() as url:
        store = client(url)
        obstore.put(store, "here", b"")
        for name in server.environment:
            if name.endswith(("KEY", "TOKEN")):
                os.environ[name] = "d3Jvbmcga2V5"
        with pytest.raises(obstore.exceptions.BaseError) as caught:
            obstore.get(client(url), "here")
    assert not isinstance(caught.value, FileNotFoundError)


OWNER = """
import sys, time
from faults.servers import SmallGcs
server = SmallGcs().__enter__()
print(server._process.pid, flush=True)
time.sleep(60)
"""


def test_server_ends_with_a_killed_owner():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], env=environment(), stdout=subprocess.PIPE)
    server = Path("/proc", str(int(owner.stdout.readline())))
    assert server.exists()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 10
    while server.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not server.exists()


def test_folder_of_a_server_is_removed(tmp_path):
    with SmallGcs(tmp_path):
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())
