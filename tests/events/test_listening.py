"""Listeners: coming and going, failing, saving, in threads and in forks."""

import itertools
import logging
import os
import threading
from collections import Counter

import pytest
import torch

import milepost
from milepost import events
from tests.events.hearing import Heard, listening


def test_subscriptions_end_and_may_be_closed_twice(tmp_path):
    heard = Heard()
    subscription = events.listen(heard)
    milepost.save({"x": 1}, tmp_path)
    count = len(heard)
    assert count
    subscription.close()
    subscription.close()
    milepost.save({"x": 1}, tmp_path)
    assert len(heard) == count
    with pytest.raises(milepost.InvalidRequest, match="cannot be called"):
        events.listen("print")


def test_listeners_that_come_and_go_during_an_event(tmp_path):
    def first(event):
        heard.append("first")
        second.close()
        with events.listen(heard.append):
            pass
        first_.close()

    heard = []
    first_, second = events.listen(first), events.listen(lambda event: heard.append("second"))
    milepost.save({"x": 1}, tmp_path)
    assert heard == ["first"], "who is closed hears no more, not even of what others are hearing of"
    assert not events.listeners.LISTENERS.heard


def test_no_record_is_made_when_nobody_listens(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("made a record")

    monkeypatch.setattr(events.operation.Operation, "tell", refuse)
    milepost.save({"x": 1}, tmp_path)
    milepost.load({"x": 0}, tmp_path)
    milepost.open(tmp_path).verify()
    with pytest.raises(AssertionError, match="made a record"), listening():
        milepost.save({"x": 1}, tmp_path)


def test_failing_listener_is_logged_once_and_called_again(tmp_path, caplog):
    calls = []

    def failing(event):
        calls.append(event)
        raise ZeroDivisionError("mine")

    with events.listen(failing), listening() as heard:
        milepost.save({"x": 1}, tmp_path)
        milepost.save({"x": 2}, tmp_path)
    assert calls == heard, "it goes on being called, and others are not disturbed"
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "failing" in record.message
    assert record.exc_info[0] is ZeroDivisionError
    assert milepost.open(tmp_path)["x"] == 2


@pytest.mark.parametrize("way", ["save", "async"])
def test_interrupted_listener_ends_what_others_heard_of(tmp_path, way):
    """Interrupted at each event in turn."""
    last = milepost.save({"x": 0}, tmp_path).generation
    for at in itertools.count():
        events_left = iter(range(at))

        def interrupted(event, left=events_left):
            if next(left, None) is None:
                subscription.close()
                raise KeyboardInterrupt

        with listening() as heard, events.listen(interrupted) as subscription:
            try:
                milepost.save({"x": 1}, tmp_path) if way == "save" else milepost.async_save({"x": 1}, tmp_path).result()
            except KeyboardInterrupt:
                pass
            else:
                break
            finally:
                milepost.close_async()
        [told] = heard.operations()
        begun = Counter(event.phase for event in told if isinstance(event, events.PhaseStarted))
        ended = Counter(event.phase for event in told if isinstance(event, events.PhaseEnded))
        ended.pop("blocking", None)  # how long the call took: it never begins
        assert begun == ended, at
        assert isinstance(told[-1], events.Ended)
    assert at > 15
    assert milepost.open(tmp_path)["x"] == 1
    assert milepost.open(tmp_path).generation > last


@pytest.mark.parametrize("way", ["save", "async"])
def test_listener_that_saves_is_not_told_of_its_own_saves(tmp_path, way):
    def copying(event):
        if isinstance(event, events.Committed):
            if way == "save":
                milepost.save({"copy": event.generation}, tmp_path / "copy")
            else:
                milepost.async_save({"copy": event.generation}, tmp_path / "copy").result()

    with events.listen(copying), listening() as heard:
        milepost.save({"x": 1}, tmp_path / "a")
    assert milepost.open(tmp_path / "copy")["copy"] == 1
    assert [os.path.basename(event.url) for event in heard.of(events.Committed)] == ["copy", "a"]
    assert all(one[0].parent == "" for one in heard.operations()), "a listener is no part of what it hears of"
    milepost.close_async()


def test_threads_listen_and_save_at_the_same_time(tmp_path):
    wrong, rounds = [], 30

    def come_and_go():
        for _ in range(rounds):
            with listening():
                pass

    def save(number):
        try:
            for _ in range(5):
                milepost.save({"x": number}, tmp_path / str(number))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    threads += [threading.Thread(target=save, args=(number,)) for number in range(3)]
    with listening() as heard:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert len(heard.of(events.Committed)) == 15
    assert len(heard.operations()) == 15, "threads do not mix up their operations"
    assert not events.listeners.LISTENERS.subscriptions


def test_fork_keeps_listeners_and_can_listen_though_another_thread_did(tmp_path):
    heard, listeners = Heard(), events.listeners.LISTENERS
    with events.listen(heard):
        listeners._lock.acquire()  # as another thread would, at the moment of the fork
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with listening() as own:
                    milepost.save({"x": torch.ones(2)}, tmp_path)
                status = 0 if own and heard == own else 2
            finally:
                os._exit(status)
        listeners._lock.release()
        _, ended = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended) == 0
    assert not heard, "the parent hears nothing of it"
