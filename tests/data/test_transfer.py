"""How bytes move: the options, and the workers that do all jobs once or stop together at the first error."""

import signal
import threading
import time
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost import InvalidRequest, Transfer
from milepost.core.limits import BLOCK_BYTES, KIB, MIB
from milepost.data.transfer import MAX_THREADS, new_pages, run_all
from milepost.store.stopping import is_stopped, side_by_side
from tests.strategies import examples

blocks = st.integers(1, 4096).map(lambda n: n * BLOCK_BYTES)
transfers = st.builds(Transfer, st.integers(1, MAX_THREADS), blocks, st.booleans())


# ---- options


@pytest.mark.parametrize("threads", [0, -1, MAX_THREADS + 1])
def test_a_number_of_threads_out_of_range_is_refused(threads):
    with pytest.raises(InvalidRequest, match=f"1 to {MAX_THREADS} threads, not {threads}"):
        Transfer(threads=threads)


@pytest.mark.parametrize("size", [0, -BLOCK_BYTES, 1, BLOCK_BYTES - 1, BLOCK_BYTES + 1, 4 * MIB + 4 * KIB])
def test_a_block_that_is_not_a_number_of_checksummed_blocks_is_refused(size):
    with pytest.raises(InvalidRequest, match=f"multiple of {BLOCK_BYTES}, not {size}"):
        Transfer(block_bytes=size)


@examples(300)
@given(transfers, st.integers(BLOCK_BYTES, 4096 * MIB))
def test_within_a_budget_it_uses_no_more_and_gives_up_no_more_than_it_must(transfer, budget):
    fitted = transfer.within(budget)
    assert fitted.threads * fitted.block_bytes <= budget
    assert 1 <= fitted.threads <= transfer.threads
    assert BLOCK_BYTES <= fitted.block_bytes <= transfer.block_bytes
    assert fitted.direct == transfer.direct
    if transfer.threads * transfer.block_bytes <= budget:
        assert fitted == transfer
    else:
        assert (fitted.threads + 1) * fitted.block_bytes > budget or fitted.threads == transfer.threads
    assert fitted.within(budget) == fitted


@pytest.mark.parametrize("budget", [BLOCK_BYTES - 1, 1, 0, -1])
def test_a_budget_below_one_block_is_refused_and_says_what_is_needed(budget):
    with pytest.raises(InvalidRequest, match=f"host_memory_bytes is {budget}, .* at least 64 KiB"):
        Transfer().within(budget)


@examples(300)
@given(transfers, st.integers(0, 2**40), st.integers(0, 10**6), blocks)
def test_the_threads_for_a_job_keep_to_the_memory_and_none_is_without_work(transfer, total, pieces, block):
    threads = transfer.threads_for(total, pieces, block)
    assert 1 <= threads <= transfer.threads
    assert threads == 1 or threads * block <= transfer.threads * transfer.block_bytes
    assert threads == 1 or (threads - 1) * block < total


def test_data_that_is_looked_at_gets_more_blocks_within_the_memory():
    assert Transfer().while_looked_at().memory_bytes == 2 * Transfer().memory_bytes
    assert Transfer().within(24 * MIB).while_looked_at().memory_bytes == 24 * MIB
    assert Transfer().within(6 * MIB).while_looked_at().memory_bytes <= 6 * MIB
    assert Transfer(threads=3).while_looked_at() == Transfer(threads=3), "what a caller says counts"


def test_many_small_tensors_are_left_to_one_thread_and_large_ones_to_all():
    transfer = Transfer(threads=8, block_bytes=MIB)
    assert transfer.threads_for(20_000 * 4096, 20_000, MIB) == 1
    assert transfer.threads_for(20 * 64 * MIB, 20, MIB) == 8
    assert transfer.threads_for(3 * MIB, 1, MIB) == 3
    assert transfer.threads_for(64 * MIB, 1, 4 * MIB) == 2, "larger blocks than asked for: fewer of them"


# ---- workers


class OneAtATime:
    """An iterator that fails when two threads advance it at once."""

    def __init__(self, count, fail_at=None, error=None):
        self._left, self._fail_at, self._error = iter(range(count)), fail_at, error
        self._busy = threading.Lock()

    def __iter__(self):
        return self

    def __next__(self):
        assert self._busy.acquire(blocking=False), "two threads advance the jobs at once"
        try:
            time.sleep(0.0002)
            number = next(self._left)
            if number == self._fail_at:
                raise self._error
            return number
        finally:
            self._busy.release()


def ours():
    return [thread for thread in threading.enumerate() if thread.name == "milepost"]


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("jobs", [0, 1, 2, 200])
def test_every_job_is_done_once_by_workers_made_in_their_own_threads(threads, jobs):
    done, makers = [], []

    def make_worker():
        home = threading.current_thread()
        makers.append(home)

        def work(job):
            assert threading.current_thread() is home
            done.append(job)

        return work

    run_all(OneAtATime(jobs), make_worker, threads)
    assert sorted(done) == list(range(jobs))
    assert len(makers) == len(set(makers)) == threads
    assert threading.current_thread() in makers, "the caller works too"
    assert ours() == []


class Odd(BaseException):
    """No Exception, as KeyboardInterrupt and SystemExit."""


ERRORS = [ValueError("wrong"), KeyboardInterrupt(), SystemExit(3), Odd("odd"), StopIteration("a")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(("threads", "by_caller"), [(1, True), (4, True), (4, False)])
def test_an_error_of_a_worker_stops_the_others_and_is_raised_to_the_caller(threads, by_caller, error):
    caller, failed = threading.get_ident(), threading.Event()

    def make_worker():
        is_caller = threading.get_ident() == caller

        def work(job):
            if is_caller == by_caller:
                failed.set()
                raise error
            assert failed.wait(10), "the one that fails gets a job as well"

        return work

    with pytest.raises(type(error)) as caught:
        run_all(count(), make_worker, threads)  # without end: it returns because it was stopped
    assert caught.value is error
    assert ours() == []


@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("by_caller", [True, False])
def test_an_error_while_a_worker_is_made_is_raised_too(by_caller, error):
    caller, failed = threading.get_ident(), threading.Event()

    def make_worker():
        if (threading.get_ident() == caller) == by_caller:
            failed.set()
            raise error
        assert failed.wait(10)
        return hash

    with pytest.raises(type(error)) as caught:
        run_all(count(), make_worker, 3)
    assert caught.value is error
    assert ours() == []


@pytest.mark.parametrize("error", [OSError(5, "bad disk"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("threads", [1, 4])
def test_error_of_a_job_is_raised_after_earlier_jobs(threads, error):
    done = []
    with pytest.raises(type(error)) as caught:
        run_all(OneAtATime(100, 30, error), lambda: done.append, threads)
    assert caught.value is error
    assert set(range(30)) <= set(done) if threads == 1 else len(done) <= 100
    assert ours() == []


def test_of_two_errors_the_first_is_raised():
    both, first = threading.Barrier(2), threading.Event()

    def make_worker():
        def work(job):
            both.wait(10)
            if job == 0:
                first.set()
                raise ValueError("first")
            assert first.wait(10)
            time.sleep(0.05)
            raise ValueError("second")

        return work

    with pytest.raises(ValueError, match="first"):
        run_all(iter(range(2)), make_worker, 2)


def test_busy_worker_ends_before_the_caller_goes_on():
    started, ended = threading.Event(), threading.Event()

    def make_worker():
        def work(job):
            if job == 0:
                started.set()
                time.sleep(0.2)
                ended.set()
            else:
                assert started.wait(10)
                raise RuntimeError("other")

        return work

    with pytest.raises(RuntimeError, match="other"):
        run_all(iter(range(2)), make_worker, 2)
    assert ended.is_set(), "its memory may not be given back while it is still used"


def test_an_impatient_caller_still_waits_for_a_worker_that_is_busy():
    started, ended = threading.Event(), threading.Event()

    def make_worker():
        def work(job):
            if job == 0:
                started.set()
                time.sleep(0.4)
                ended.set()
            else:
                assert started.wait(10)
                threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
                raise KeyboardInterrupt

        return work

    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals come to the main thread")
    with pytest.raises(KeyboardInterrupt):
        run_all(iter(range(2)), make_worker, 2)
    assert ended.is_set(), "what it writes to is closed next, and its number may be that of another file then"


def test_memory_that_cannot_be_had_does_not_read_like_a_full_disk():
    with pytest.raises(MemoryError, match="host_memory_bytes"):
        new_pages(1 << 60)


# ---- requests that nobody waits for


def test_requests_go_on_for_the_last_jobs_and_end_with_the_first_error():
    """All jobs are taken, and some are still worked on: that is no reason to give up their requests."""
    seen, taken = [], threading.Barrier(3)

    def patient(job):
        taken.wait(10)
        time.sleep(0.05)  # the queue is empty by now, and others have looked
        seen.append(is_stopped())

    run_all(iter(range(3)), lambda: patient, 3)
    assert seen == [False] * 3
    ended = []

    def failing(job):
        taken.wait(10)
        if job == 0:
            raise ValueError("one fails")
        deadline = time.monotonic() + 10
        while not is_stopped() and time.monotonic() < deadline:
            time.sleep(0.01)
        ended.append(is_stopped())

    with pytest.raises(ValueError, match="one fails"):
        run_all(iter(range(3)), lambda: failing, 3, apart=True)
    assert ended == [True, True]
    assert not is_stopped()


def test_side_by_side_keeps_order_and_tells_the_others_of_an_error():
    assert side_by_side(lambda n: n * n, range(20), 4) == [n * n for n in range(20)]
    assert side_by_side(lambda n: n, [], 4) == []
    ended, started = [], threading.Barrier(3)

    def work(number):
        started.wait(60)
        if number == 0:
            raise ValueError("one fails")
        deadline = time.monotonic() + 10
        while not is_stopped() and time.monotonic() < deadline:
            time.sleep(0.01)
        ended.append(is_stopped())

    with pytest.raises(ValueError, match="one fails"):
        side_by_side(work, range(3), 3)
    assert ended == [True, True]


@pytest.mark.parametrize("apart", [False, True])
def test_work_goes_on_as_before_when_no_job_is_left(apart):
    stopped = []

    def worker(_job):
        time.sleep(0.2)  # the other threads find no job meanwhile
        stopped.append(is_stopped())

    run_all(iter([1]), lambda: worker, 4, apart=apart)
    assert stopped == [False]
