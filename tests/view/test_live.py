"""The live page: it follows a job in another process, keeps the reader's place, and answers nobody else."""

import contextlib
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
import torch

import milepost
from milepost.view import ViewOptions
from milepost.view.follow import Followed
from milepost.view.serve import LivePage, PageServer
from tests.browser import soon

JOB = """
import sys, torch, milepost
keeper = milepost.Checkpointer(sys.argv[1], keep_last=3, statistics=True)
for line in sys.stdin:
    step = int(line)
    keeper.save({"model": {"w": torch.full((8, 8), float(step)), "b": torch.ones(2)}, "step": step}, step)
    print("saved", flush=True)
"""


class Job:
    """A job in another process that saves when it is told to."""

    def __init__(self, place):
        command = [sys.executable, "-c", JOB, str(place)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def save(self, step):
        self._process.stdin.write(f"{step}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "saved\n"

    def close(self):
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path / "run")
    yield made
    made.close()


class Command:
    """`milepost view --serve` in another process."""

    def __init__(self, place, *arguments):
        command = [sys.executable, "-m", "milepost", "view", str(place), "--serve", "--json", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        text = ""
        while not text.endswith("}\n"):
            line = self.process.stdout.readline()
            assert line, self.process.stderr.read()
            text += line
        self.url = json.loads(text)["url"]

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)

    def close(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def command(tmp_path):
    """Ask for it before the tab: a page that outlives its server asks in vain."""
    made = Command(tmp_path / "run")
    yield made
    made.close()


def open_live(tab, url):
    page = tab.open(url)
    tab.until("document.documentElement.dataset.ready === 'true'")
    return page


def has_step(tab, step):
    tab.until(f"milepost.data.steps.some(one => one.step === {step})")


@pytest.mark.slow
def test_new_steps_appear_and_the_place_is_kept(job, command, tab):
    page = open_live(tab, command.url)
    assert soon(page.is_visible, "#nothing")
    job.save(10)
    has_step(tab, 10)
    assert soon(page.inner_text, "#step-heading") == "Step 10"
    assert soon(page.inner_text, "#live-text") == "live"
    page.click("#tab-tensors")
    page.fill("#search", "b")
    page.locator("#tree .list-row", has_text="b").last.click()
    job.save(20)
    has_step(tab, 20)
    assert soon(page.input_value, "#step-select") == "1", "the newest is followed"
    assert soon(page.inner_text, "#tensor-details .key-line") == "model.b"
    assert soon(page.input_value, "#search") == "b"
    assert soon(page.inner_text, "#tree-count").startswith("1 of 3")
    page.select_option("#step-select", label="10")
    for step in (30, 40):
        job.save(step)
        has_step(tab, step)
    # Step 10 was removed by now, so the newest is shown.
    tab.until("!milepost.data.steps.some(one => one.step === 10)")
    assert soon(page.input_value, "#step-select") == "2"
    page.select_option("#step-select", label="30")
    page.click("#tab-timeline")
    page.locator("#steps-table .sort", has_text="size").click()
    page.click("#tab-layout")
    page.locator("#reads-table .list-row").nth(1).click()
    job.save(50)
    has_step(tab, 50)
    assert soon(page.inner_text, "#reads-detail h4") == "What rank 1 reads"
    assert soon(page.locator("#steps-table [aria-sort=descending]").inner_text) == "size"
    assert soon(page.evaluate, "milepost.data.steps[milepost.view.step].step") == 30
    page.click("#tab-changes")
    page.locator("#changes-table .list-row").first.wait_for()
    page.click("#tab-statistics")
    assert "30" in soon(page.evaluate, "milepost.data.label(milepost.view.step)")


@pytest.mark.slow
def test_a_place_may_vanish_and_come_back(job, command, tab, tmp_path):
    job.save(1)
    page = open_live(tab, command.url)
    has_step(tab, 1)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    page.locator("#trouble").wait_for()
    assert "not there any more" in soon(page.inner_text, "#trouble")
    assert soon(page.inner_text, "#live-text") == "cannot look"
    assert soon(page.inner_text, "#step-heading") == "Step 1"
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    page.locator("#trouble").wait_for(state="hidden")
    job.save(2)
    has_step(tab, 2)


@pytest.mark.slow
def test_many_tabs_follow_and_ctrl_c_ends_at_once(new_tab, job, command):
    tabs = [new_tab() for _ in range(4)]
    for one in tabs:
        open_live(one, command.url)
    job.save(1)
    for one in tabs:
        has_step(one, 1)
    command.interrupt()
    assert command.process.returncode == 0
    assert command.process.stderr.read().count("\n") == 1, "one remark: there was nothing at first"
    for one in tabs:
        one.page.locator("#live[data-state=gone]").wait_for()
        one.page.goto("about:blank")  # it asks no more
        with pytest.raises(AssertionError, match="ERR_CONNECTION_REFUSED"):
            one.check()


@pytest.mark.slow
def test_news_scroll_no_table(tab, tmp_path):
    with milepost.Checkpointer(tmp_path / "run", statistics=True) as keeper:
        run, live = Followed(tmp_path / "run", ViewOptions()), LivePage()

        def save(*steps):
            for step in steps:
                keeper.save({f"t{i:03}": torch.full((2,), float(i + step)) for i in range(150)}, step)
            run.look()
            live.set(run)

        save(*range(40))
        server = PageServer(live)
        server.start()
        page = open_live(tab, server.url)
        page.click("#tab-tensors")
        page.locator("#tree .list-row", has_text="t003").click()
        hosts = {"timeline": "steps-table", "tensors": "tree", "statistics": "statistics-table"}
        for step, (part, host) in enumerate({**hosts, "changes": "changes-table"}.items(), 40):
            page.click(f"#tab-{part}")
            body = page.locator(f"#{host} .list-body")
            body.locator(".list-row").first.wait_for()
            body.evaluate("body => { body.scrollTop = 600; }")
            save(step)
            has_step(tab, step)
            assert soon(body.evaluate, "body => body.scrollTop") == 600, part
            assert soon(page.input_value, "#step-select") == str(step), "the newest is followed"
        page.goto("about:blank")
        server.close()


# --- the server by itself


@pytest.fixture
def followed(tmp_path):
    with milepost.Checkpointer(tmp_path / "run") as keeper:
        keeper.save({"w": torch.ones(3)}, 1)
    made = Followed(tmp_path / "run", ViewOptions())
    made.look()
    return made


@pytest.fixture
def server(followed):
    live = LivePage()
    live.set(followed)
    made = PageServer(live)
    made.start()
    yield made
    made.close()


def ask(server, path="", method="GET", **headers):
    """(status, headers, body) of one request."""
    target = urlsplit(server.url)
    connection = http.client.HTTPConnection(target.hostname, target.port, timeout=60)
    try:
        connection.putrequest(method, path or target.path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_the_server_has_one_page_and_its_data(server):
    root = urlsplit(server.url).path
    assert server.url.startswith("http://127.0.0.1:")
    assert len(root) > 20
    status, headers, body = ask(server)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"milepost-page" in body
    policy = re.search(rb'Content-Security-Policy" content="([^"]*)"', body)[1].decode()
    assert headers["Content-Security-Policy"] == f"{policy}; frame-ancestors 'none'"
    assert "connect-src 'self'" in policy
    wanted = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "X-Frame-Options": "DENY"}
    assert wanted.items() <= headers.items()
    assert json.loads(ask(server, f"{root}state")[2]) == {"number": 2, "trouble": ""}
    assert json.loads(ask(server, f"{root}data?x")[2]).keys() == {"number", "page", "statistics", "changes"}


def test_other_paths_and_methods_get_nothing(server):
    root = urlsplit(server.url).path
    port = server.server_port
    odd = [f"{root}x", f"{root}../", f"{root}%2e%2e/", f"{root}data/1", f"{root}/", f"http://127.0.0.1:{port}{root}"]
    paths = ["/", "/favicon.ico", root[:-1], root[:-2] + "/", "//evil/", "/" + "A" * 60_000, *odd]
    for path in paths:
        status, headers, body = ask(server, path)
        assert status in (404, 414, 400), path[:80]
        assert body == b"no\n"
        assert headers["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "CONNECT", "GET<script>"):
        status, _, body = ask(server, method=method)
        assert status in (400, 501), method
        assert body in (b"no\n", b"")


def test_other_hosts_and_origins_get_nothing(server):
    port = server.server_port
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        f"127.0.0.1.evil:{port}",
        "",
        "a, b",
    ):
        assert ask(server, Host=host)[0] == 403, host
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"):
        assert ask(server, Origin=origin)[0] == 403, origin
    assert ask(server, Host=f"localhost:{port}")[0] == 200
    assert ask(server, Origin=f"http://127.0.0.1:{port}")[0] == 200


def raw(server, data, wait_s=60.0):
    """What the server says to these bytes."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=wait_s) as connection:
        said = b""
        with contextlib.suppress(OSError):  # it hung up, perhaps before it had all
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(65536):
                said += more
        return said


def test_broken_requests_end_in_few_words(server):
    root = urlsplit(server.url).path.encode()
    host = f"Host: 127.0.0.1:{server.server_port}\r\n".encode()
    requests = [
        b"",
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"A" * 100_000,
        b"GET " + root + b" HTTP/1.1\r\n\r\n",
        b"GET " + root + b" HTTP/1.1\r\n" + host + host + b"\r\n",
        b"GET " + root + b" HTTP/1.1\r\n" + host + b"X: y\r\n" * 300 + b"\r\n",
        b"GET " + root + b" HTTP/1.1\r\n" + host + b"X: " + b"y" * 70_000 + b"\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n" + host + b"\r\n",
        b"GET " + root + b" HTTP/1.1\r\nHost: 127.0.0.1\x00evil\r\n\r\n",
    ]
    for request in requests:
        said = raw(server, request)
        assert not said.startswith(b"HTTP/1.0 200"), request[:60]
        assert b"<" not in said.partition(b"\r\n\r\n")[2]
        assert len(said) < 2000
    assert b"200" in raw(server, b"GET " + root + b"state HTTP/1.1\r\n" + host + b"\r\n").split(b"\r\n")[0]


def ask_until_answered(server, limit_s=60.0):
    """The same, as a page does that was cut off: on a busy machine it may be slow for a moment itself."""
    end = time.monotonic() + limit_s
    while True:
        try:
            return ask(server)
        except (OSError, http.client.HTTPException):
            if time.monotonic() > end:
                raise


def test_silent_clients_do_not_keep_others_out(server, monkeypatch):
    monkeypatch.setattr("milepost.view.serve._REQUEST_S", 0.5)
    silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(60)]
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: ask_until_answered(server)[0], range(8)))
        assert found == [200] * 8
    finally:
        for one in silent:
            one.close()


def test_no_thread_is_left(followed, monkeypatch):
    """Also where clients that say nothing could keep it waiting, for longer than this test may take."""
    monkeypatch.setattr("milepost.view.serve._PageRequest.timeout", 3600.0)
    before = set(threading.enumerate())
    live = LivePage()
    live.set(followed)
    server = PageServer(live)
    server.start()
    waiting = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(5)]
    ask(server)
    server.close()
    assert set(threading.enumerate()) <= before
    for one in waiting:
        one.close()


def test_a_port_that_is_taken_is_a_wrong_use():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(milepost.InvalidRequest, match="cannot listen"):
        PageServer(LivePage(), taken.getsockname()[1])


def test_the_page_changes_only_with_the_run(tmp_path):
    with milepost.Checkpointer(tmp_path / "run", keep_last=3) as keeper:
        for step in (1, 2):
            keeper.save({"w": torch.ones(3)}, step)
        made = Followed(tmp_path / "run", ViewOptions())
        assert made.look()
        first = made.page
        assert not made.look()
        assert made.page is first
        for step in (3, 4):
            keeper.save({"w": torch.full((3,), float(step))}, step)
    assert made.look()
    assert [step.step for step in made.page.steps] == [2, 3, 4]
    assert [step.kept for step in made.page.steps] == [("last 3",)] * 3
    shutil.rmtree(tmp_path / "run")
    assert made.look()
    assert "not there any more" in made.trouble
    assert [step.step for step in made.page.steps] == [2, 3, 4]
