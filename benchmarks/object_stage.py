"""One set of ranks before an object store: they measure saves and loads, straight and through a proxy that counts.

Runs in the ranks. Rank 0 keeps the buckets in order, and owns the proxy.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from contenders import Spec, State
from harness import Measured, Planned
from object_contenders import ObjectContender, Site, object_contenders
from stage import Stage

from faults.proxy import Proxy

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
        self.proxy = self._stack.enter_context(_proxy(server, latency_s)) if rank == 0 else None
        self.proxied = replace_endpoint(server, self._tell(self.proxy.address if self.proxy else None))

    def _tell(self, address: tuple[str, int] | None) -> tuple[str, int]:
        """What rank 0 says."""
        box = [address]
        if self.inner.mesh is not None:
            dist.broadcast_object_list(box, src=0)
        assert box[0] is not None
        return box[0]

    def state(self, specs: list[Spec]) -> State:
        """A state for these ranks."""
        return self.inner.state(specs)

    def saves(self, name: str, state: State, *, far: bool = False) -> Measured:
        """Measure every contender's save into an empty bucket; `far`: through the proxy."""
        runs, counts = {}, {}
        for who, contender in self.contenders.items():
            site = self._server(far).site(FRESH, "saved")
            prepare = self._prepare(state, lambda: self.fresh(FRESH), far)
            runs[who] = Planned(_call(contender.save, state, site), prepare, after_first=self._count(counts, who, far))
        return self._case(name, state, runs, counts)

    def keep(self, state: State, prefix: str, only: tuple[str, ...] | None = None) -> None:
        """Let every contender save a state, for loads."""
        for who, contender in self.contenders.items():
            if only is None or who in only:
                self.meter.barrier()
                contender.save(state, self.server.site(KEPT, f"{prefix}/{_slug(who)}"))
        self.meter.barrier()

    def loads(self, name: str, state: State, prefix: str, *, far: bool = False) -> Measured:
        """Measure every contender's load of what `keep` left; `far`: through the proxy."""
        runs, counts = {}, {}
        for who, contender in self.contenders.items():
            site = self._server(far).site(KEPT, f"{prefix}/{_slug(who)}")
            count = self._count(counts, who, far)

            def after(who: str = who, count: Callable[[], None] = count) -> None:
                count()
                state.check(who)

            runs[who] = Planned(_call(contender.load, state, site), self._prepare(state, state.scribble, far), after_first=after)
        return self._case(name, state, runs, counts)

    def _case(self, name: str, state: State, runs: dict[str, Planned], counts: dict[str, dict[str, int]]) -> Measured:
        measured = self.meter.case(name, state.size_bytes, runs)
        measured.counts = counts
        return measured

    def _server(self, far: bool) -> Server:
        return self.proxied if far else self.server

    def _prepare(self, state: State, first: Callable[[], object], far: bool) -> Callable[[], None]:
        def prepare() -> None:
            first()
            self.meter.settle()
            self.meter.recycle(self.inner.folder, state.size_bytes)
            if far and self.proxy:
                self.proxy.traffic(reset=True)

        return prepare

    def _count(self, counts: dict[str, dict[str, int]], who: str, far: bool) -> Callable[[], None]:
        """Keep what the proxy has counted, once all ranks have done their part."""

        def count() -> None:
            self.meter.barrier()
            if far and self.proxy:
                passed = self.proxy.traffic()
                counts[who] = {"requests": passed.total, "bytes_up": passed.bytes_up, "bytes_down": passed.bytes_down}

        return count

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


def drop(client: object, bucket: str) -> None:
    """Remove a bucket and all that is in it, if it is there."""
    if bucket in {found["Name"] for found in client.list_buckets()["Buckets"]}:
        client.delete_bucket(Bucket=bucket)


def _proxy(server: Server, latency_s: float) -> Proxy:
    return Proxy((server.host, server.port), latency_s=latency_s)


def replace_endpoint(server: Server, address: tuple[str, int]) -> Server:
    """The same server by way of a proxy."""
    return replace(server, host=address[0], port=address[1])


def _call(call: Callable[[State, Site], object], state: State, site: Site) -> Callable[[], None]:
    def action() -> None:
        call(state, site)

    return action


def _slug(who: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in who)
