"""Checkpoints in Amazon S3, Google Cloud Storage, Azure Blob Storage, and services that speak their languages.

An object is written by one request that succeeds only if its name is free. So it is whole or absent, and a name has one
content for ever. Nothing is renamed, appended or uploaded in several parts.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from milepost.errors import AlreadyExists, InvalidRequest, NoReply, StorageError
from milepost.store.base import Buffer, Traits, check_name
from milepost.store.cloud.options import CloudOptions
from milepost.store.cloud.reading import RANGE_BYTES, CloudReader, open_object
from milepost.store.cloud.replies import Refusal, Why
from milepost.store.cloud.requests import Asker
from milepost.store.cloud.url import parse_url
from milepost.store.stopping import side_by_side

PART_BYTES = 64 << 20
LARGEST_BYTES = 5000 << 20
"""The largest object that every service takes in one request."""
PAGE = 1000
"""How many names to take of a listing at a time."""
TAKE_BACK_S = 10.0
BATCH = {"s3": 1000, "az": 256, "gs": 100}
"""How many objects one call deletes."""


class CloudStore:
    """Bytes by name in an object store. No secret is in its `url`, its repr, or an error.

    `url`: `s3://bucket/path`, or with `gs://` or `az://`; its query may set what is not secret, as in
    `s3://bucket/path?region=eu-west-1`. Nothing is asked before the first use. It can be pickled, with its options.

    >>> milepost.store.CloudStore("s3://bucket/runs/a?region=eu-west-1").url
    's3://bucket/runs/a'
    """

    def __init__(self, url: str, options: CloudOptions | None = None) -> None:
        if not isinstance(url, str):
            raise InvalidRequest(f"the URL of an object store is a string, not {type(url).__name__}")
        if options is not None and not isinstance(options, CloudOptions):
            raise InvalidRequest(f"options are CloudOptions, not {type(options).__name__}")
        self._place, settings = parse_url(url)
        self.options = replace(options or CloudOptions(), **settings)  # type: ignore[arg-type]
        self._asker = Asker(self._place, self.options)

    def __repr__(self) -> str:
        return f"CloudStore({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return CloudStore, (self.url, self.options)

    @property
    def url(self) -> str:
        """Where this is, for messages: without the settings of the query."""
        return self._place.url

    @property
    def traits(self) -> Traits:
        """Objects of 64 MiB, ranges of 8 MiB, listings that are current."""
        return Traits(PART_BYTES, RANGE_BYTES, self.options.requests, is_current=True)

    def parent(self) -> "tuple[CloudStore, str] | None":
        """The place around this one, and the name of this one in it; None at the top of a bucket."""
        above, _, name = self._place.root.rpartition("/")
        around = f"{self._place.scheme}://{self._place.host}/{above}"
        return (CloudStore(around, self.options), name) if name else None

    def create(self, name: str, *data: Buffer) -> None:
        """Write an object by one request. Raises AlreadyExists if the name is taken, maybe by an attempt of this call.

        Raises NoReply if nobody knows whether the object was written, or still will be: no attempt was answered.
        """
        check_name(name)
        views = [view.cast("B") for view in (memoryview(one) for one in data) if view.nbytes]
        size_bytes = sum(map(len, views))
        if size_bytes > LARGEST_BYTES:
            raise StorageError(f"{self.url}/{name}: {size_bytes} bytes are more than one request can write")
        is_first, is_data = self._asker.service.take_check(), "/data/" in f"/{name}"
        try:
            if is_first and not is_data:
                self._check_apart()
            self._asker.ask("put", name, self._put(name, views), size_bytes=size_bytes)
            if is_first and is_data:
                self._check_by(name)
        except BaseException:
            if is_first:
                self._asker.service.check_again()  # it was not refused, or nobody knows
            raise
        finally:
            take_back(views)

    def check(self) -> None:
        """Write, read, list and delete an object of its own. Raises StorageError, or what else is wrong, and says why.

        Raises StorageError also for a service that overwrites an object which it should leave: there, two jobs could
        commit one checkpoint. The first `create` of a process looks for that too, where the service is not known.
        """
        name = f"check-{secrets.token_hex(8)}"
        try:
            self.create(name, b"milepost")
            self._check_by(name)
            self.reader(name)
            next(self.list(name, shallow=True), None)
        except BaseException:
            with contextlib.suppress(StorageError, InvalidRequest):  # the first error says what is wrong
                self.delete(name)
            raise
        self.delete(name)

    def _check_apart(self) -> None:
        """Like `_check_by`, with an object of its own: a manifest must not be put twice where that would empty it."""
        name = f"check-{secrets.token_hex(8)}"
        try:
            self._asker.ask("put", name, self._put(name, []))
            self._check_by(name)
        except NoReply as error:  # what the caller wants to write was not sent
            raise StorageError(str(error), errno=error.errno) from None
        with contextlib.suppress(StorageError):  # a save needs no right to delete
            self.delete(name)

    def _check_by(self, name: str) -> None:
        """Raises StorageError if an object that was just made can be made again."""
        for _ in range(2):  # the first time it may be that somebody has deleted it
            if isinstance(self._asker.ask_or({Why.TAKEN}, "put", name, self._put(name, [])), Refusal):
                return
        raise StorageError(
            f"{self.url}: the service overwrites objects though it is asked not to (If-None-Match). Two jobs that save "
            "to one place would destroy each other's checkpoints. Use a newer version of the service, or another one"
        )

    def writer(self, name: str, size_bytes: int, *, direct: bool = True) -> "CloudWriter":
        """Start a new object of this size, which is kept in memory until `commit` writes it by one request."""
        del direct
        check_name(name)
        if size_bytes > LARGEST_BYTES:
            raise StorageError(f"{self.url}/{name}: {size_bytes} bytes are more than one request can write")
        try:
            self.reader(name)
        except FileNotFoundError:
            return CloudWriter(self, name, size_bytes)
        raise AlreadyExists(f"{self.url}/{name} exists already")

    def reader(self, name: str, *, size_bytes: int | None = None) -> CloudReader:
        """Open an object: with `size_bytes` by no request, else by one that brings its beginning.

        Raises FileNotFoundError if there is none; with `size_bytes` the first read does, and it raises
        CheckpointDamaged if the size is another.
        """
        check_name(name)
        if size_bytes is None:
            return open_object(self._asker, name)
        return CloudReader(self._asker, name, size_bytes)

    def modified(self, name: str) -> datetime:
        """When an object was written, by the clock of the service. Raises FileNotFoundError if there is none."""
        key = self._place.key(name)
        found: datetime = self._asker.ask("get", name, lambda client: client.head(key)["last_modified"])
        return found

    def list(self, prefix: str, *, shallow: bool = False) -> Iterator[str]:
        """The names that start with `prefix`; `shallow`: up to the next `/`, by one request for 1,000 of them."""
        folder, _, start = prefix.rpartition("/")
        if not start and not shallow:
            yield from self._below(folder)
            return
        # The service would find `data-2/...` below `data` too, and all that lies under it; ours stops at a `/`.
        for name in self._top(folder):
            if not name.startswith(prefix):
                continue
            if shallow or not name.endswith("/"):
                yield name
            else:
                yield from self._below(name.removesuffix("/"))

    def delete(self, *names: str, durable: bool = False) -> None:
        """Remove these objects, if they are there, many by one request."""
        del durable  # what the service has said is done stays done
        for name in names:
            check_name(name)
        errors: list[Exception] = []
        size = BATCH[self._place.provider]
        for at in range(0, len(names), size):
            errors += self._delete_batch(names[at : at + size])
        if errors:
            raise errors[0]

    def _put(self, name: str, views: Sequence[memoryview]) -> Callable[[Any], object]:
        key = self._place.key(name)
        # An iterator: its views are sent from where they are. A plain buffer would be copied.
        return lambda client: client.put(key, iter(views), mode="create", use_multipart=False)

    def _top(self, folder: str) -> Sequence[str]:
        """The names in a folder, and the folders in it, which end in `/`."""
        where = self._place.key(folder).removesuffix("/") or None
        found = self._asker.ask("list", folder, lambda client: client.list_with_delimiter(where))
        start = len(self._place.key(""))
        names = [str(one["path"])[start:] for one in found["objects"]]
        return names + [str(one).removesuffix("/")[start:] + "/" for one in found["common_prefixes"]]

    def _below(self, folder: str) -> Iterator[str]:
        """All names below a folder. A page that fails is asked for again, and not those before it."""
        where = self._place.key(folder).removesuffix("/") or None
        start = len(self._place.key(""))
        last: str | None = None
        pages: Iterator[Any] | None = None

        def next_page(client: Any) -> Any:
            nonlocal pages
            if pages is None:
                pages = iter(client.list(where, offset=last, chunk_size=PAGE))
            try:
                return next(pages, None)
            except Exception:
                pages = None  # it cannot go on
                raise

        while page := self._asker.ask("list", folder, next_page):
            last = page[-1]["path"]
            yield from (str(one["path"])[start:] for one in page)

    def _delete_batch(self, names: Sequence[str]) -> Sequence[Exception]:
        """Delete these by one request; one by one if that does not work. What could not be deleted: why."""
        keys = [self._place.key(name) for name in names]
        odd = {Why.ABSENT, Why.DENIED, Why.REFUSED}
        found = self._asker.ask_or(odd, "delete", names[0], lambda client: client.delete(keys))
        if not isinstance(found, Refusal):
            return ()
        found = side_by_side(self._delete_one, names, self.options.requests)
        return [error for error in found if error is not None]

    def _delete_one(self, name: str) -> Exception | None:
        key = self._place.key(name)
        try:
            self._asker.ask_or({Why.ABSENT}, "delete", name, lambda client: client.delete(key), use="delete one")
        except StorageError as error:
            return error
        return None


def take_back(views: Sequence[memoryview]) -> None:
    """Return once the client holds on to none of these views, so that their memory may change, and be given back.

    A request that was refused or timed out before all of its body was sent ends on another thread, a moment later.
    """
    deadline = time.monotonic() + TAKE_BACK_S
    for view in views:
        while True:
            try:
                view.release()
                break
            except BufferError:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.001)


class CloudWriter:
    """Collects an object in memory; `commit` writes it by one request."""

    aligned = False

    def __init__(self, store: CloudStore, name: str, size_bytes: int) -> None:
        self._store, self._name, self._data = store, name, bytearray(size_bytes)

    def write(self, offset: int, views: Sequence[Buffer]) -> None:
        """Write all of `views`, one after the other, at `offset`."""
        for view in views:
            data = memoryview(view).cast("B")
            if offset + len(data) > len(self._data):
                raise StorageError(f"{self._store.url}/{self._name} was begun with {len(self._data)} bytes")
            self._data[offset : offset + len(data)] = data
            offset += len(data)

    def commit(self) -> None:
        """Write the object. Raises AlreadyExists if the name is taken, maybe by an attempt of this call."""
        self._store.create(self._name, self._data)

    def abort(self) -> None:
        """Forget the object."""
        self._data = bytearray()
