"""What the faults of object stores need: a server, a proxy before it, two libraries, and a look at what is left."""

import contextlib
import itertools
import logging
import secrets
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException

import milepost
from faults.proxy import Proxy, Rule
from faults.servers import SeaweedFS
from faults.servers.object_server import BUCKET, set_environment
from faults.servers.seaweed import KEYS, REGION, KeyPair

OLD, NEW, NEWER = 1, 2, 3
ITEMS = 1 << 15
PART_BYTES = 1 << 17
"""Of Milepost's objects, so that a small state has several."""
TIMEOUT_S = 1.0
PATIENCE_S = 30.0
ERRORS = (Exception, CheckpointException)  # DCP's own is not an Exception


class NoEffect(Exception):
    """A rule took a request that has nothing to break, such as an empty body. This is no trial."""


def why_not() -> str | None:
    """Why these faults cannot be made here; None if they can."""
    return SeaweedFS.why_not() if find_spec("obstore") else "obstore is not installed"


def why_not_dcp() -> str | None:
    """Why DCP cannot be compared here; None if it can."""
    return None if find_spec("s3fs") else "DCP was not run: s3fs is not installed"


def state(number: int) -> dict[str, torch.Tensor]:
    """A state of 512 KiB in which every element is this number."""
    return {name: torch.full((ITEMS,), number) for name in ("first", "second")}


@dataclass(frozen=True, slots=True)
class Place:
    """A prefix of the bucket, by way of an endpoint."""

    prefix: str
    endpoint: str
    timeout_s: float = TIMEOUT_S
    patience_s: float = PATIENCE_S
    keys: KeyPair = KEYS

    @property
    def url(self) -> str:
        """For Milepost."""
        return SeaweedFS().url(
            self.prefix, self.endpoint, timeout_s=f"{self.timeout_s:g}", patience_s=f"{self.patience_s:g}"
        )

    @property
    def fsspec(self) -> dict[str, Any]:
        """For s3fs, which is made anew each time: it would remember listings."""
        return {
            "key": self.keys.access,
            "secret": self.keys.secret,
            "client_kwargs": {"endpoint_url": self.endpoint, "region_name": REGION},
            "config_kwargs": {"read_timeout": self.timeout_s, "connect_timeout": self.timeout_s},
            "skip_instance_cache": True,
            "use_listings_cache": False,
        }


class MilepostLibrary:
    """Milepost on its own store."""

    name = "milepost"

    def save(self, what: dict[str, Any], place: Place, **options: Any) -> None:
        """Save."""
        milepost.save(what, place.url, **options)

    def load(self, into: dict[str, Any], place: Place) -> None:
        """Load."""
        milepost.load(into, place.url)


class DcpLibrary:
    """DCP with its own writer and reader for fsspec, and s3fs."""

    name = "dcp"

    def save(self, what: dict[str, Any], place: Place) -> None:
        """Save."""
        writer = FsspecWriter(f"s3://{BUCKET}/{place.prefix}", **place.fsspec)
        dcp.save(what, storage_writer=writer, no_dist=True)

    def load(self, into: dict[str, Any], place: Place) -> None:
        """Load."""
        reader = FsspecReader(f"s3://{BUCKET}/{place.prefix}", **place.fsspec)
        dcp.load(into, storage_reader=reader, no_dist=True)


Library = MilepostLibrary | DcpLibrary
MILEPOST, DCP = MilepostLibrary(), DcpLibrary()


def found(library: Library, place: Place) -> str:
    """What a load gives: "old", "new", "newer", "mixed", "silent" (other data), or "nothing" after an error."""
    target = state(-1)
    try:
        library.load(target, place)
    except ERRORS:
        return "nothing"
    numbers = torch.cat(list(target.values())).unique().tolist()
    if not set(numbers) <= {OLD, NEW, NEWER}:
        return "silent"
    return {OLD: "old", NEW: "new", NEWER: "newer"}[numbers[0]] if len(numbers) == 1 else "mixed"


class ObjectLab:
    """A server with a proxy in front of it, for as long as the `with` block lasts."""

    def __init__(self, folder: Path, server: SeaweedFS | None = None) -> None:
        """`server`: one that runs already; by default a new one, with its data in `folder`."""
        self._folder, self._running = folder, server

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_quietly())
            self.server = self._running or stack.enter_context(SeaweedFS(self._folder))
            self.proxy = stack.enter_context(Proxy(self.server.address, seed=1))
            stack.enter_context(set_environment(self.server.environment))
            stack.enter_context(patch("milepost.store.cloud.store.PART_BYTES", PART_BYTES))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def places(self, **settings: Any) -> tuple[Place, Place]:
        """A new place by way of the proxy, and the same place past it."""
        prefix = f"place-{secrets.token_hex(6)}"
        broken = Place(prefix, self.proxy.endpoint, **settings)
        return broken, Place(prefix, self.server.endpoint, timeout_s=30.0)

    def save_through(self, library: Library, first: bool, rules: tuple[Rule, ...], **settings: Any) -> str | None:
        """How a save ends that meets these rules, the first one at a place or an overwrite. None: it met none."""
        broken, direct = self.places(**settings)
        if not first:
            library.save(state(OLD), direct)
        ended = self.meet(lambda: library.save(state(NEW), broken), rules)
        if ended is None:
            return None
        return self.ending(library, direct, "saved" if ended else "raised", first)

    def load_through(self, library: Library, rules: tuple[Rule, ...], **settings: Any) -> str | None:
        """How a load ends that meets these rules. None: it met none."""
        broken, direct = self.places(**settings)
        library.save(state(NEW), direct)
        seen = []
        if self.meet(lambda: seen.append(found(library, broken)), rules) is None:
            return None
        self.server.remove(direct.prefix)
        return {"new": "loaded, whole", "nothing": "load raised"}.get(seen[0], f"load is {seen[0]}")

    def meet(self, call: Callable[[], object], rules: tuple[Rule, ...]) -> bool | None:
        """Whether a call succeeds under these rules; None if it met none of them. Raises NoEffect."""
        self.proxy.traffic(reset=True)
        self.proxy.set_rules(*rules)
        try:
            call()
            ended = True
        except ERRORS:
            ended = False
        finally:
            self.proxy.heal()
        traffic = self.proxy.traffic()
        if traffic.matched and not traffic.faults:
            raise NoEffect
        return ended if traffic.matched else None

    def ending(self, library: Library, direct: Place, ended: str, first: bool) -> str:
        """How a save ended: what it said, what loads then, and what the next save leaves."""
        now = found(library, direct)
        if now == "nothing" and first and ended == "raised":
            now = "none"
        if ended == "saved" and now in ("old", "nothing"):
            now = {"old": "lost: old", "nothing": "lost: nothing"}[now]
        left = self.left_by_the_next(library, direct) if library.name == "milepost" else ""
        self.server.remove(direct.prefix)
        return f"{ended}, {now}{left}"

    def left_by_the_next(self, library: Library, direct: Place) -> str:
        """What is wrong after another save: "" if it works, and only its own objects are there."""
        try:
            library.save(state(NEWER), direct)
        except ERRORS as error:
            return f", and the next save raised {type(error).__name__}"
        if found(library, direct) != "newer":
            return ", and the next save is lost"
        return ", with data that is not swept" if self.has_strays(direct) else ""

    def has_strays(self, direct: Place) -> bool:
        """Whether there is more than one manifest with the data of one save."""
        names = self.objects(direct)
        data = {name.split("/")[1] for name in names if name.startswith("data/")}
        return len(data) > 1 or sum(not name.startswith("data/") for name in names) > 1

    def objects(self, direct: Place) -> list[str]:
        """The names of all objects at a place."""
        import obstore
        from obstore.store import S3Store

        store = S3Store(
            BUCKET, endpoint=direct.endpoint, prefix=direct.prefix, region=REGION, access_key_id=KEYS.access,
            secret_access_key=KEYS.secret, virtual_hosted_style_request=False, client_options={"allow_http": True},
        )  # fmt: skip
        return [one["path"] for page in obstore.list(store) for one in page]


def each_request(trial: Callable[[int], str | None], step: int, first: int = 0) -> Iterator[str]:
    """How trials end in which request `first`, `first + step` ... is broken, until there are no more requests."""
    for skip in itertools.count(first, step):
        try:
            ending = trial(skip)
        except NoEffect:
            continue
        if ending is None:
            return
        yield ending


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's warnings that there is no process group, and without logs of what cannot be read or swept."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
