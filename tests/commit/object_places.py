"""Places that are like object stores, and stores that count requests or run several jobs in turns."""

import random
import threading

from milepost.core.limits import KIB
from milepost.store import MemoryStore, Traits
from milepost.testing import CountingStore

OBJECTS = Traits(part_bytes=64 * KIB, range_bytes=16 * KIB, requests=4, is_current=True)
"""What an object store is like, with small parts."""


def objects():
    """An empty object store."""
    return MemoryStore(traits=OBJECTS)


class RequestStore(CountingStore):
    """Notes the requests that an object store would get: one for each page of a listing, and for each batch deleted."""

    def __init__(self, inner):
        super().__init__(inner)
        self.requests = []

    def note(self, *requests):
        self.requests += requests

    def create(self, name, *data):
        self.note(f"create {name}")
        self.inner.create(name, *data)

    def writer(self, name, size_bytes, **how):
        self.note(f"create {name}")
        return self.inner.writer(name, size_bytes, **how)

    def reader(self, name, *, size_bytes=None):
        self.note(f"get {name}")
        return self.inner.reader(name, size_bytes=size_bytes)

    def list(self, prefix, *, shallow=False):
        found = list(self.inner.list(prefix, shallow=shallow))
        self.note(*[f"list {prefix}" + " shallow" * shallow] * (max(len(found) - 1, 0) // 1000 + 1))
        return iter(found)

    def delete(self, *names, durable=False):
        self.note(*["delete"] * -(-len(names) // 1000))
        self.inner.delete(*names, durable=durable)

    def taken(self, prefix=""):
        """The requests since the last call that start so, without those that write data."""
        requests, self.requests = self.requests, []
        writes = [one for one in requests if one.startswith("create ") and "data/" in one]
        return [one for one in requests if one.startswith(prefix) and one not in writes]


class FoldersStay(RequestStore):
    """A server that goes on listing folders which are empty, as SeaweedFS does."""

    def list(self, prefix, *, shallow=False):
        self.folders = getattr(self, "folders", set()) | {name.rpartition("/")[0] + "/" for name in self.inner.objects}
        found = {name[: name.find("/", len(prefix)) + 1] for name in self.folders if name.startswith(prefix)} - {""}
        return iter({*super().list(prefix, shallow=shallow), *(found if shallow else ())})


class Turns:
    """Runs jobs, one call to the store at a time, in an order that chance decides; `watch` looks between the calls."""

    def __init__(self, seed, watch):
        self.chance, self.watch = random.Random(seed), watch
        self._ready, self._lock = {}, threading.Condition()
        self._turn = None

    def store(self, inner):
        """The store for one job: each call waits for its turn."""
        return _InTurn(self, inner)

    def wait(self):
        """Wait for the turn of the job that calls this."""
        me = threading.get_ident()
        with self._lock:
            self._ready[me] = True
            self._turn = None if self._turn == me else self._turn
            self._lock.notify_all()
            assert self._lock.wait_for(lambda: self._turn == me, timeout=60)

    def run(self, *jobs):
        """Run all jobs to their ends, and give what each returned or raised."""
        results, threads = [None] * len(jobs), []

        def work(at, job):
            self.wait()
            try:
                results[at] = job()
            except BaseException as error:
                results[at] = error
            with self._lock:
                del self._ready[threading.get_ident()]
                self._turn = None
                self._lock.notify_all()

        for at, job in enumerate(jobs):
            threads.append(threading.Thread(target=work, args=(at, job), daemon=True))
            threads[-1].start()
        with self._lock:
            assert self._lock.wait_for(lambda: len(self._ready) == len(jobs), timeout=60)
            order = [thread.ident for thread in threads]
            while self._ready:
                self.watch()
                self._turn = self.chance.choice([one for one in order if one in self._ready])
                self._lock.notify_all()
                assert self._lock.wait_for(lambda: self._turn is None, timeout=60)
        self.watch()
        return results


class _InTurn(CountingStore):
    def __init__(self, turns, inner):
        super().__init__(inner)
        self.turns = turns

    def before(self, number, call):
        if not call.startswith("create data/"):  # of names that nobody else uses, by threads of the job
            self.turns.wait()
