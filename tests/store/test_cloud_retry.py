"""When requests to an object store are asked again: the policy alone, with a clock of its own."""

import threading

import pytest

import milepost
from milepost.store import CloudOptions, CloudStore
from milepost.store.cloud import requests, retry
from milepost.store.cloud.replies import CURABLE, Refusal, Why
from milepost.store.cloud.retry import Pace, Trial, pause_s

BUSY = Refusal(Why.BUSY, "500", may_act=True)
THROTTLED = Refusal(Why.THROTTLED, "429")


class FakeClock:
    def __init__(self):
        self.time = 1000.0

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds

    def chance(self):
        return 1.0


@pytest.fixture
def pace():
    pace = Pace(16, 100.0, FakeClock())
    pace.answered()
    return pace


def attempts(pace, refusal, *, each_s=0.0, meanwhile=lambda: None):
    """How often a request is asked that always fails so, and how long that takes."""
    trial, count = Trial(pace), 0
    while True:
        count += 1
        pace.clock.sleep(each_s)
        meanwhile()
        pause = trial.failed(refusal)
        if pause is None:
            return count, pace.clock.now() - trial.began
        pace.clock.sleep(pause)


def test_pauses_double_up_to_a_bound_and_half_is_chance():
    assert [pause_s(n, 1.0, throttled=False) for n in (1, 2, 3)] == [0.1, 0.2, 0.4]
    assert pause_s(1, 0.0, throttled=False) == 0.05
    assert pause_s(1, 1.0, throttled=True) > pause_s(1, 1.0, throttled=False)
    assert pause_s(10_000, 1.0, throttled=False) == retry.LONGEST_PAUSE_S


@pytest.mark.parametrize("why", [why for why in Why if why not in CURABLE])
def test_what_asking_again_does_not_change_stops_at_once(pace, why):
    count, seconds = attempts(pace, Refusal(why, ""))
    few = {Why.EXPIRED: 2, Why.NO_CREDENTIALS: retry.CREDENTIAL_TRIES}
    assert count == few.get(why, 1)
    assert seconds < 1


@pytest.mark.parametrize("why", sorted(CURABLE, key=lambda why: why.name))
def test_a_request_is_asked_until_patience_ends(pace, why):
    count, seconds = attempts(pace, Refusal(why, ""))
    assert 60 < seconds <= 100
    assert count >= 8


def test_each_answer_of_the_store_renews_the_patience(pace):
    _, seconds = attempts(pace, BUSY, meanwhile=pace.answered)
    assert 300 < seconds <= 100 * retry.LONGEST_TIMES, "and there is an end all the same"


def test_slow_attempts_get_a_few_tries_beyond_the_patience(pace):
    assert attempts(pace, BUSY, each_s=90.0)[0] == retry.FEWEST_TRIES


def test_a_service_that_never_answered_is_not_looked_for_long():
    nowhere = Refusal(Why.UNREACHABLE, "refused")
    never = Pace(16, 100.0, FakeClock())
    assert attempts(never, nowhere)[1] <= retry.FIRST_CONTACT_S
    never.answered()
    assert attempts(never, nowhere)[1] > 60


def test_a_throttled_store_asks_less_at_once_and_recovers(pace):
    for expected in (8, 4, 2, 1, 1):
        pace.throttled()
        pace.throttled()  # the same storm
        assert pace.bound == expected
        pace.clock.sleep(retry.HALVING_S)
    for _ in range(200):
        pace.answered()
    assert pace.bound == 16


def test_no_more_requests_are_under_way_than_the_bound(pace):
    for _ in range(2):
        pace.throttled()
        pace.clock.sleep(retry.HALVING_S)
    under_way, most, lock = [], [], threading.Lock()

    def ask():
        with pace.turn():
            with lock:
                under_way.append(1)
                most.append(len(under_way))
            threading.Event().wait(0.01)
            with lock:
                under_way.pop()

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 4


def test_a_timeout_counts_as_too_much_at_once(pace):
    trial = Trial(pace)
    trial.failed(Refusal(Why.UNANSWERED, "cut"))
    assert (pace.bound, trial.timeouts) == (16, 0)
    trial.failed(Refusal(Why.LATE, "no reply in time"))
    assert (pace.bound, trial.timeouts) == (8, 1)


def test_a_trial_remembers_that_an_attempt_may_have_taken_effect(pace):
    trial = Trial(pace)
    trial.failed(THROTTLED)
    assert not trial.may_act
    trial.failed(BUSY)
    trial.failed(THROTTLED)
    assert trial.may_act


def test_long_failures_are_told_now_and_then(pace):
    told, trial = [], Trial(pace)
    for second in range(100):
        if pace.should_tell(trial.began):
            told.append(second)
        assert not pace.should_tell(pace.clock.now())
        pace.clock.sleep(1.0)
    assert told == [10, 40, 70]


TIMEOUT = "Generic S3 error\n\nDebug source:\nHttpError {\n    kind: Timeout,"


@pytest.mark.parametrize("fault", ["a setting", "credentials of another request"])
def test_what_was_sent_stays_unknown_whatever_fails_later(fault, monkeypatch, tmp_path):
    """The first attempt got no reply. Then something goes wrong that would be definite for one that was never sent."""
    key = {"access_key_id": "a", "secret_access_key": "b"}
    options = CloudOptions(endpoint="http://127.0.0.1:1", patience_s=0.1, credentials=lambda: key)
    asker = CloudStore("s3://bucket/x", options)._asker

    def request(client):
        if fault == "a setting":
            monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "gone.pem"))
        else:
            asker.service.clients.source.error = RuntimeError()
        raise OSError(TIMEOUT)

    with pytest.raises(milepost.NoReply, match="Nobody knows"):
        asker.ask("put", "name", request, size_bytes=1 << 20)


def test_words_of_a_callable_are_not_shown_while_it_is_renewed():
    """Another request has just forgotten the callable: what it raised is known only by the text."""
    asker = CloudStore("s3://bucket/x", CloudOptions(endpoint="http://127.0.0.1:1"))._asker
    refusal = asker._understand(OSError("it lacked credentials for path External AWS credential provider: my words"))
    assert refusal.why is Why.NO_CREDENTIALS
    assert "my words" not in refusal.words


@pytest.mark.parametrize("fault", ["a panic", "a timeout, and the call has ended"])
def test_a_write_that_ends_early_is_unknown(fault, monkeypatch):
    asker = CloudStore("s3://bucket/x", CloudOptions(endpoint="http://127.0.0.1:1"))._asker
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    def request(client):
        if fault == "a panic":
            raise panic("called unwrap on None")
        monkeypatch.setattr(requests, "is_stopped", lambda: True)
        raise OSError(TIMEOUT)

    with pytest.raises(milepost.NoReply):
        asker.ask("put", "name", request)
