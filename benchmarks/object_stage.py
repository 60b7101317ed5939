"""One set of ranks before an object store: they measure saves and loads, straight and through a proxy that counts.

Runs in the ranks. Rank 0 keeps the buckets in order, and owns the proxy.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import obstore
import torch
import torch.distributed as dist
from contenders import Spec, State
from harness import Measured, Planned
from object_contenders import ObjectContender, Site, object_contenders, raw_store
from object_show import MILEPOST
from stage import Stage

import milepost
from faults.proxy import Proxy, Traffic

Counts = dict[str, dict[str, int]]
"""What the proxy has counted, by contender."""

KEPT = "kept"
FRESH = "fresh"
"""The bucket that each save finds new and empty. Only with its bucket does the server give the space back."""


@dataclass(frozen=True, slots=True)
class Server:
    """The server that all contenders use."""

    host: str
    port: int
    region: str

    @property
    def endpoint(self) -> str:
        """The URL that S3 clients take as endpoint."""
        return f"http://{self.host}:{self.port}"

    def site(self, bucket: str, prefix: str) -> Site:
        """A place in this server."""
        return Site(self.endpoint, self.region, bucket, prefix)


class ObjectStage:
    """The ranks, the server, and the contenders that can take part."""

    def __init__(self, rank: int, world: int, folder: Path, rounds: int, server: Server, latency_s: float) -> None:
        self.inner = Stage(rank, world, folder, rounds)
        self.meter, self.server = self.inner.meter, server
        self.contenders: dict[str, ObjectContender] = {}
        for name, contender in object_contenders().items():
            if reason := contender.why_not():
                self.meter.notes.append(f"{name}: {reason}")
            else:
                self.contenders[name] = contender
        self._stack = ExitStack()
        proxy = Proxy((server.host, server.port), latency_s=latency_s)
        self._proxy = self._stack.enter_context(proxy) if rank == 0 else None
        address = [self._proxy.address if self._proxy else None]
        if self.inner.mesh is not None:
            dist.broadcast_object_list(address, src=0)
        self._far = replace(server, host=address[0][0], port=address[0][1])

    def state(self, specs: list[Spec]) -> State:
        """A state for these ranks."""
        return self.inner.state(specs)

    def saves(self, name: str, state: State, *, far: bool = False) -> Measured:
        """Measure every contender's save into an empty bucket; `far`: through the proxy."""
        runs, counts = {}, {}
        for who, contender in self.contenders.items():
            site = self._server(far).site(FRESH, "saved")
            prepare = self._prepare(state.size_bytes, self._make_room, far)
            runs[who] = Planned(
                partial(contender.save, state, site), prepare, after_first=self._count(counts, who, far)
            )
        return self._case(name, state, runs, counts)

    def _make_room(self) -> None:
        self.fresh(FRESH)
        self.meter.settle()

    def keep(self, state: State, prefix: str, only: str = "") -> None:
        """Let every contender whose name begins with `only` save a state, for loads."""
        for who, contender in self.contenders.items():
            if who.startswith(only):
                self.meter.barrier()
                contender.save(state, self.server.site(KEPT, f"{prefix}/{_slug(who)}"))
        self.meter.barrier()

    def loads(self, name: str, state: State, prefix: str, *, far: bool = False) -> Measured:
        """Measure every contender's load of what `keep` left; `far`: through the proxy."""
        runs, counts = {}, {}
        for who, contender in self.contenders.items():
            site = self._server(far).site(KEPT, f"{prefix}/{_slug(who)}")
            prepare = self._prepare(state.size_bytes, state.scribble, far)
            count = self._count(counts, who, far, then=partial(state.check, who))
            runs[who] = Planned(partial(contender.load, state, site), prepare, after_first=count)
        return self._case(name, state, runs, counts)

    def _case(self, name: str, state: State, runs: dict[str, Planned], counts: Counts) -> Measured:
        measured = self.meter.case(name, state.size_bytes, runs)
        measured.counts = counts
        return measured

    def _server(self, far: bool) -> Server:
        return self._far if far else self.server

    def _prepare(self, size_bytes: int, first: Callable[[], object], far: bool) -> Callable[[], None]:
        def prepare() -> None:
            first()
            self.meter.barrier()
            self.meter.recycle(self.inner.folder, size_bytes)
            if far and self._proxy:
                self._proxy.traffic(reset=True)

        return prepare

    def _count(
        self, counts: Counts, who: str, far: bool, then: Callable[[], object] = lambda: None
    ) -> Callable[[], None]:
        """Keep what the proxy has counted, once all ranks have done their part; `then` go on."""

        def count() -> None:
            self.meter.barrier()
            if far and self._proxy:
                passed = _settled(self._proxy)
                counts[who] = {"requests": passed.total, "bytes_up": passed.bytes_up, "bytes_down": passed.bytes_down}
            then()

        return count

    def looks(self, name: str, call: Callable[[], object]) -> Measured:
        """Measure what Milepost does to look something up, through the proxy."""
        counts: Counts = {}
        prepare = self._prepare(0, lambda: None, far=True)
        runs = {MILEPOST: Planned(call, prepare, after_first=self._count(counts, MILEPOST, far=True))}
        measured = self.meter.case(name, 0, runs)
        measured.counts = counts
        return measured

    def many_steps(self, prefix: str, steps: int) -> Site:
        """Save one step, and put its objects again under the names of all others. Where they are, by the proxy."""
        self.fresh(KEPT)
        site = self.server.site(KEPT, prefix)
        with milepost.Checkpointer(site.full_url) as keeper:
            keeper.save({"weight": torch.arange(4.0), "step": steps}, steps)
        store = raw_store(site)
        first = f"{prefix}/step-{steps:010}/"
        found = {one["path"].removeprefix(first): None for page in obstore.list(store, prefix) for one in page}
        objects = {name: obstore.get(store, first + name).bytes() for name in found}
        jobs = [
            (f"{prefix}/step-{step:010}/{name}", data) for step in range(1, steps) for name, data in objects.items()
        ]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda job: obstore.put(store, *job), jobs))
        return self._far.site(KEPT, prefix)

    def fresh(self, bucket: str) -> None:
        """Make a bucket new and empty, once for all ranks."""
        if self.meter.rank == 0:
            client = self.server.site(bucket, "").client()
            drop(client, bucket)
            client.create_bucket(Bucket=bucket)
            client.put_object(Bucket=bucket, Key="first", Body=b"The server makes volumes now, not in the first run.")
        self.meter.barrier()

    def done(self) -> list[Measured]:
        """Remove what is left, stop the proxy, leave the process group, and return the results."""
        self.meter.barrier()
        self._stack.close()
        return self.inner.done()


def _settled(proxy: Proxy) -> Traffic:
    """What has passed, once the proxy has counted all of it: a client may have the last byte before that."""
    while True:
        passed = proxy.traffic()
        time.sleep(0.05)
        if proxy.traffic() == passed:
            return passed


def drop(client: object, bucket: str) -> None:
    """Remove a bucket and all that is in it, if it is there."""
    if bucket in {found["Name"] for found in client.list_buckets()["Buckets"]}:
        client.delete_bucket(Bucket=bucket)


def _slug(who: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in who)
