"""The lines of the log: words, units, and when they are written."""

import logging
import re

import pytest
import torch

import milepost
from milepost.core.history import PhaseTime
from milepost.events import Committed
from milepost.events.log_lines import log_committed, show_bytes, show_seconds, slowest


def committed(**given):
    about = {"time": 0.0, "operation": "a", "kind": "save", "url": "runs/a", "rank": 0, "world": 64, "pid": 1}
    return Committed(**about | {"generation": 1, "bytes": 13_100_000_000, "seconds": 6.2} | given)


TIMINGS = (PhaseTime("writing", 3.0, 5.9, 17), PhaseTime("planning", 0.1, 0.2, 3), PhaseTime("waiting", 5.0, 6.0, 1))


def test_line_of_a_save(caplog):
    caplog.set_level(logging.INFO, "milepost")
    log_committed(committed(step=1200, timings=TIMINGS))
    log_committed(committed(world=1, bytes=0, seconds=0.0042, timings=TIMINGS[1:2]))
    log_committed(committed(bytes=1_000_000_000_000_000, seconds=7200.0))
    assert caplog.messages == [
        "saved step 1200: 13.1 GB in 6.2 s (2.1 GB/s), slowest rank 17: writing 5.9 s",
        "saved runs/a: 0 B in 4.2 ms, planning 0.20 s",
        "saved runs/a: 1.0 PB in 2 h 0 min (139 GB/s)",
    ]
    assert slowest(TIMINGS[2:]) is None, "waiting for others is not slow work"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_499, "999 kB"), (999_950, "1.0 MB"), (99_960, "100 kB"),
     (13.1e9, "13.1 GB"), (2**63, "9.2 EB"), (1e22, "10000 EB")],
)  # fmt: skip
def test_bytes_for_people(size, text):
    assert show_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 ms"), (0.0042, "4.2 ms"), (0.042, "42 ms"), (0.0999, "0.10 s"), (0.5, "0.50 s"), (0.999, "1.0 s"),
     (6.2, "6.2 s"), (59.94, "59.9 s"), (59.96, "1 min 0 s"), (3599.6, "1 h 0 min"), (247, "4 min 7 s")],
)  # fmt: skip
def test_seconds_for_people(seconds, text):
    assert show_seconds(seconds) == text


def test_each_operation_writes_one_line(tmp_path, caplog):
    caplog.set_level(logging.INFO, "milepost")
    state = {"w": torch.zeros(25_000)}
    with milepost.Checkpointer(tmp_path / "run", keep_last=1) as keeper:
        keeper.save(state, 1)
        keeper.async_save(state, 2).result()
        keeper.restore(state)
    milepost.save(state, tmp_path / "b")
    milepost.open(tmp_path / "b").verify()
    milepost.convert(tmp_path / "b", tmp_path / "c", "milepost")
    with pytest.raises(milepost.InvalidState):
        milepost.save({"x": object()}, tmp_path / "b")
    took = r"\d+(\.\d+)? m?s \(.*B/s\)"
    expected = [
        rf"saved step 1: 100 kB in {took}, \w+ .*s",
        rf"saved step 2: 100 kB in {took}, \w+ .*s",
        r"removed step 1: 10\d kB",
        rf"loaded step 2: 100 kB in {took}",
        rf"saved {tmp_path}/b: 100 kB in {took}, \w+ .*s",
        rf"verified {tmp_path}/b: 10\d kB in {took}",
        rf"converted {tmp_path}/c: 100 kB in {took}, \w+ .*s",
    ]
    assert len(caplog.messages) == len(expected), caplog.messages
    for line, pattern in zip(caplog.messages, expected, strict=True):
        assert re.fullmatch(pattern, line), line


def test_text_of_others_begins_no_line_and_moves_no_cursor(tmp_path, caplog):
    caplog.set_level(logging.INFO, "milepost")
    place, state = tmp_path / "a\nsaved step 9: 1 B", {"w": torch.zeros(2)}
    with milepost.Checkpointer(place, healthy=lambda _: "bad\nsaved step 9: 1 B\x1b[2J") as keeper:
        keeper.save(state, 1)
        milepost.load(state, place / "step-0000000001")
        with pytest.raises(milepost.CheckpointUnhealthy):
            keeper.restore(state)
    milepost.convert(place / "step-0000000001", tmp_path / "b\x1b[2J.pt", "torch")
    assert sum("bad" in text for text in caplog.messages) == 4
    assert [text for text in caplog.messages if not text.isprintable()] == []
