"""The pause of the collector ends with the function that asked for it, also where a signal handler ends that."""

import gc
import threading

import pytest

from milepost.data.collection_pause import CollectionPaused, end_lost_pauses


@pytest.fixture(autouse=True)
def enabled():
    gc.enable()
    yield
    gc.enable()


def test_the_collector_is_off_inside_and_on_again_outside():
    @CollectionPaused()
    def nested(depth):
        assert not gc.isenabled()
        return nested(depth - 1) if depth else "done"

    with CollectionPaused():
        assert nested(3) == "done"
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    nested(1)
    assert not gc.isenabled(), "a collector that the program turned off stays off"


def test_threads_pause_at_once_and_the_last_one_ends_it():
    meet, seen = threading.Barrier(3), []

    def work():
        with CollectionPaused():
            meet.wait(10)
            seen.append(gc.isenabled())
            meet.wait(10)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    meet.wait(10)
    assert not gc.isenabled()
    meet.wait(10)
    for thread in threads:
        thread.join()
    assert seen == [False, False]
    assert gc.isenabled()


def test_a_pause_that_never_ended_is_ended_later():
    """As by Ctrl-C in the first instruction of `__exit__`, or in the last one of `__enter__`."""

    def interrupted():
        CollectionPaused().__enter__()
        end_lost_pauses()
        assert not gc.isenabled(), "its function still runs"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not gc.isenabled()
    end_lost_pauses()
    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with CollectionPaused():
        assert not gc.isenabled()
    assert gc.isenabled(), "the next pause ends it too"
