"""The demo: real processes, real kills. Small runs of it, what must hold when it goes wrong, and another example."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faults.servers import SeaweedFS
from faults.servers.owned import free_ports

EXAMPLES = Path(__file__).parents[1] / "examples"
DEMO = EXAMPLES / "demo.py"
LIMIT_S = 150.0
SIGNATURE_OF_PNG = b"\x89PNG\r\n\x1a\n"


def start(output: Path, store: str = "folder") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(DEMO), "--output", str(output), "--steps", "10", "--store", store],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that whatever it leaves behind can be found by its group
    )


def all_gone(group: int, within_s: float = 20.0) -> bool:
    """Whether every process of the group ends in time. If not, they are ended here."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
    return False


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("store", ["folder", "s3"])
def test_the_demo_survives_two_kills_and_shows_it(tmp_path, store):
    if store == "s3" and SeaweedFS.why_not():
        pytest.skip(SeaweedFS.why_not())
    output = tmp_path / "demo"
    process = start(output, store)
    try:
        text, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        assert all_gone(process.pid)
    assert process.returncode == 0, text
    rows = [re.split(r"  +", line) for line in text.splitlines()]
    assert ["uninterrupted", "4", "1-10", "-", "reaching the end", "-"] in rows
    assert ["first start", "4", "1-4", "-", "SIGKILL in save 4", "0, bit-equal"] in rows
    assert ["second start", "2", "4-7", "step-0003", "SIGKILL in save 7"] in [row[:-1] for row in rows]
    assert ["third start", "3", "7-10", "step-0006", "reaching the end"] in [row[:-1] for row in rows]
    assert "step-0003: saved by 4 ranks = in the checkpoint = loaded by 2 ranks, bit for bit" in text
    assert "step-0006: saved by 2 ranks = in the checkpoint = loaded by 3 ranks, bit for bit" in text
    parts = re.findall(r"00002\.safetensors-\d{5}  ", text)  # those that the killed save had uploaded
    assert (len(parts) >= 2) == (store == "s3")
    picture = (output / "loss.png").read_bytes()
    assert picture.startswith(SIGNATURE_OF_PNG)
    assert len(picture) > 10_000


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_no_rank_outlives_a_demo_that_is_killed(tmp_path):
    process = start(tmp_path / "demo")
    log = tmp_path / "demo" / "logs" / "uninterrupted-rank-0.log"
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (log.exists() and "step 1 " in log.read_text()):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.communicate()
        gone = all_gone(process.pid)
    assert gone


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_the_demo_leaves_a_folder_alone_that_it_did_not_make(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    process = start(tmp_path)
    text, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "holds files that the demo did not make" in text
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def start_example(server: SeaweedFS, place: str, ranks: int, *options: str) -> list[subprocess.Popen[str]]:
    """The ranks of `object_store.py`, with the variables that a launcher sets."""
    common = {
        **os.environ,
        **server.environment,
        "AWS_ENDPOINT_URL": server.endpoint,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "WORLD_SIZE": str(ranks),
    }
    command = [sys.executable, str(EXAMPLES / "object_store.py"), place, "--save-every", "2", *options]
    return [
        subprocess.Popen(command, env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_the_example_resumes_from_an_object_store(seaweed, tmp_path):
    place = f"s3://my-bucket/{tmp_path.name}"
    killed = start_example(seaweed, place, 2, "--steps", "1000", "--pause-s", "0.05")
    try:
        lines = iter(killed[0].stdout.readline, "")
        assert "starts after step 0 on 2 ranks" in next(lines)
        assert any(line.startswith("step 6 ") for line in lines)  # one save at a time: step 4 is committed
    finally:
        for process in killed:
            process.kill()
            process.communicate()
    [resumed] = start_example(seaweed, place, 1, "--steps", "20")
    text, _ = resumed.communicate(timeout=LIMIT_S)
    assert resumed.returncode == 0, text
    start = int(re.match(r"starts after step (\d+) on 1 ranks", text)[1])
    assert 4 <= start < 20
    assert text.endswith("kept [18, 20]\n")
