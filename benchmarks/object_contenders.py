"""What is compared in an object store: raw requests, Milepost, and DCP by way of s3fs and of s3torchconnector.

Each contender makes its own client in each call, and reaches the server by the same endpoint with the same keys.
"""

import importlib
import os
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import boto3
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contenders import State
from object_show import CONNECTOR, MILEPOST, PART_BYTES, RAW, S3FS

import milepost

RAW_THREADS = (2, 8)
"""Raw runs with each of these numbers of threads in each rank. The fastest counts."""

RANGE_BYTES = 8 << 20


def raw_name(threads: int) -> str:
    """The contender that is raw with this number of threads."""
    return f"{RAW}, {threads} threads"


@dataclass(frozen=True, slots=True)
class Site:
    """A place in an object store: where a contender writes or reads."""

    endpoint: str
    region: str
    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        """As most programs write it; the endpoint comes from elsewhere."""
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def full_url(self) -> str:
        """With the endpoint, as Milepost takes it."""
        query = {"endpoint": self.endpoint, "region": self.region, "path_style": "true"}
        return f"{self.url}?{urllib.parse.urlencode(query, safe=':/')}"

    def within(self, name: str) -> "Site":
        """The place of this name below this one."""
        return replace(self, prefix=f"{self.prefix}/{name}")

    def client(self) -> Any:
        """Boto3's client: for what is not measured."""
        return boto3.client("s3", endpoint_url=self.endpoint, region_name=self.region)


ObjectCall = Callable[[State, Site], Any]


@dataclass(frozen=True, slots=True)
class ObjectContender:
    """Saves and loads a state. `needs` are the modules beside torch that it cannot do without."""

    save: ObjectCall
    load: ObjectCall
    needs: tuple[str, ...] = ()

    def why_not(self) -> str | None:
        """Why it cannot take part; None if it can."""
        for module in self.needs:
            try:
                importlib.import_module(module)
            except ImportError as error:
                return f"not installed ({error})"
        return None


def object_contenders() -> dict[str, ObjectContender]:
    """All of them by name; raw once for each number of threads."""
    raws = {
        raw_name(n): ObjectContender(partial(raw_save, threads=n), partial(raw_load, threads=n)) for n in RAW_THREADS
    }
    return raws | {
        MILEPOST: ObjectContender(milepost_save, milepost_load),
        S3FS: ObjectContender(s3fs_save, s3fs_load, ("s3fs",)),
        CONNECTOR: ObjectContender(connector_save, connector_load, ("s3torchconnector.dcp",)),
    }


# Raw: the bytes of each rank as objects of 64 MiB


def raw_save(state: State, site: Site, threads: int) -> None:
    """One PUT for each object, if there is none of its name."""
    import obstore

    store = raw_store(site)

    def put(job: tuple[str, int, int]) -> None:
        name, start, end = job
        # An iterator of views is not copied; a plain buffer is.
        obstore.put(store, name, iter([state.memory[start:end]]), mode="create", use_multipart=False)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(put, _objects(state, site)))


def raw_load(state: State, site: Site, threads: int) -> None:
    """Ranges of 8 MiB, each copied into the memory of the state."""
    import obstore

    store = raw_store(site)

    def get(job: tuple[str, int, int, int]) -> None:
        name, start, length, at = job
        state.memory[at : at + length] = obstore.get_range(store, name, start=start, length=length)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(get, _ranges(state, site)))


def raw_store(site: Site) -> Any:
    """A client of obstore with its own defaults."""
    from obstore.store import S3Store

    return S3Store(
        site.bucket, endpoint=site.endpoint, region=site.region, virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": "10m"},
    )  # fmt: skip


def _objects(state: State, site: Site) -> Iterator[tuple[str, int, int]]:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for number, start in enumerate(range(0, len(state.memory), PART_BYTES)):
        yield f"{site.prefix}/{rank}-of-{world}-{number}", start, min(start + PART_BYTES, len(state.memory))


def _ranges(state: State, site: Site) -> Iterator[tuple[str, int, int, int]]:
    for name, start, end in _objects(state, site):
        for at in range(start, end, RANGE_BYTES):
            yield name, at - start, min(RANGE_BYTES, end - at), at


# Milepost


def milepost_save(state: State, site: Site) -> None:
    """Milepost's defaults."""
    milepost.save(state.value, site.full_url)


def milepost_load(state: State, site: Site) -> None:
    """Milepost's defaults: every byte is verified."""
    milepost.load(state.value, site.full_url)


# DCP


def s3fs_save(state: State, site: Site) -> None:
    """DCP's fsspec writer with its defaults, but one: it need not sync the disks of this machine."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    dcp.save(state.value, storage_writer=FsspecWriter(site.url, sync_files=False, **_s3fs_options(site)))


def s3fs_load(state: State, site: Site) -> None:
    """DCP's fsspec reader with its defaults."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    dcp.load(state.value, storage_reader=FsspecReader(site.url, **_s3fs_options(site)))


def _s3fs_options(site: Site) -> dict[str, Any]:
    # Without its caches: they would show what was deleted between two runs.
    caches = {"skip_instance_cache": True, "use_listings_cache": False}
    return {"endpoint_url": site.endpoint, "client_kwargs": {"region_name": site.region}, **caches}


def connector_save(state: State, site: Site) -> None:
    """The writer of s3torchconnector with its defaults."""
    from s3torchconnector.dcp import S3StorageWriter

    with patch.dict(os.environ, AWS_ENDPOINT_URL=site.endpoint):  # it has no option for this
        dcp.save(state.value, storage_writer=S3StorageWriter(site.region, site.url, _connector_config()))


def connector_load(state: State, site: Site) -> None:
    """The reader of s3torchconnector with its defaults, which are for DCP."""
    from s3torchconnector.dcp import S3StorageReader

    with patch.dict(os.environ, AWS_ENDPOINT_URL=site.endpoint):
        dcp.load(state.value, storage_reader=S3StorageReader(site.region, site.url, _connector_config()))


def _connector_config() -> Any:
    from s3torchconnector import S3ClientConfig

    return S3ClientConfig(force_path_style=True)
