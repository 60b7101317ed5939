"""A store on any file system that fsspec knows, and what of a store's promises it can keep.

* A path or `file://` URL is Milepost's own store of local files, with all its promises.
* Elsewhere an object is written under a name that nobody else uses, whole: it is gathered on the local disk and put
  there in one call. A manifest is created by the file system's own exclusive put, where it has one (object stores);
  else it is written under a temporary name and moved.
* Whether an object survives a power loss once `put_file` has returned, and whether two jobs that save to one place at
  the same time cannot both create the same manifest, is what the file system makes of it.
"""

import contextlib
import inspect
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from milepost.core.limits import MIB
from milepost.errors import AlreadyExists, CheckpointError, InvalidRequest, StorageError
from milepost.store.base import FILES, Buffer, OneWayReader, Store, Traits, check_name
from milepost.store.cloud.client import has_obstore
from milepost.store.cloud.store import CloudStore
from milepost.store.cloud.url import PROVIDERS
from milepost.store.local import LocalStore
from milepost.store.read_only import ReadOnlyStore
from milepost.store.spelling import without_secrets

_PACKAGES = {
    "smbclient": "smbprotocol",
    "libarchive": "libarchive-c",
    "dropboxdrivefs": "dropboxdrivefs requests dropbox",
}
"""What pip calls the modules that have another name there."""


def fsspec_module(why: str = "storage by fsspec needs the package fsspec") -> Any:
    """The module fsspec. Raises InvalidRequest, saying what to install."""
    try:
        import fsspec  # noqa: PLC0415  # not a requirement of Milepost
    except ImportError:
        raise InvalidRequest(f"{why}: pip install fsspec") from None
    return fsspec


def store_by_fsspec(path: str | os.PathLike[str], **options: Any) -> Store:
    """The store at a path or URL of fsspec. `options` are those of the file system.

    Object stores are Milepost's own, with all its promises, unless fsspec has settings for them.
    """
    text = os.fspath(path)
    scheme = text.partition("://")[0]
    if scheme in PROVIDERS and not options and not fsspec_module().config.conf.get(scheme) and has_obstore():
        return CloudStore(text)
    store = FsspecStore(text, options)
    root = store.local_root
    return store if root is None else LocalStore(root)


def view_by_fsspec(url: str) -> Store:
    """The place at a URL of fsspec, for reading; nothing is connected yet. Raises InvalidRequest for an unknown one."""
    shown = without_secrets(url)
    scheme = url.partition("://")[0].partition("::")[0]
    fsspec = fsspec_module(f"{shown} is read through fsspec, which is not installed (or is it misspelled?)")
    try:
        kind = fsspec.get_filesystem_class(scheme)
    except ImportError as error:  # fsspec knows it, and says which package is missing
        raise InvalidRequest(f"{shown!r} cannot be read yet: {_what_to_install(error)}") from error
    except ValueError:
        raise InvalidRequest(
            f"{shown!r}: there is no kind of place called {scheme!r}. A place is a path, or a URL of s3, gs, az, file, "
            "memory, https, http, or what fsspec knows: hf, sftp, github, ..."
        ) from None
    protocols = (kind.protocol,) if isinstance(kind.protocol, str) else tuple(kind.protocol)
    return store_by_fsspec(url) if "file" in protocols else FsspecView(url)


def _what_to_install(error: ImportError) -> str:
    """The package that fsspec lacks, as pip calls it; what fsspec says, where it names no module."""
    missing = getattr(error.__cause__, "name", None) or ""
    package = _PACKAGES.get(missing.partition(".")[0], missing.partition(".")[0].replace("_", "-"))
    return f"fsspec needs another package for it: pip install {package}" if package else str(error)


class FsspecView(ReadOnlyStore):
    """The folder at a URL that fsspec knows (`hf://`, `sftp://`, `github://`, ...), for reading. Can be pickled.

    >>> import fsspec
    >>> _ = fsspec.filesystem("memory").pipe("/hub/model/notes.txt", b"text")
    >>> list(milepost.store.FsspecView("memory://hub/model").list(""))
    ['notes.txt']
    """

    def __init__(self, url: str) -> None:
        self._given, self._url = url.rstrip("/"), without_secrets(url.rstrip("/"))

    def __reduce__(self) -> tuple[Any, ...]:
        return FsspecView, (self._given,)

    def __repr__(self) -> str:
        return f"FsspecView({self._url!r})"

    @cached_property
    def _files(self) -> "FsspecStore":
        try:
            return FsspecStore(self._given)
        except CheckpointError:
            raise
        except Exception as error:  # each client of fsspec has errors of its own
            raise StorageError(f"cannot connect to {self._url}: {type(error).__name__}: {error}") from error

    @property
    def url(self) -> str:
        """Where this is, for messages: without password and query."""
        return self._url

    @property
    def traits(self) -> Traits:
        """Long ranges."""
        return Traits(range_bytes=8 * MIB)

    def parent(self) -> "tuple[FsspecView, str] | None":
        """The folder around this place, and the name of this place in it; None at the top."""
        above, _, name = self._given.rpartition("/")
        return None if above.endswith((":/", ":")) or not name else (FsspecView(above), name)

    def reader(self, name: str, *, size_bytes: int | None = None) -> "FsspecReading":
        """Open an object. Raises FileNotFoundError if there is none."""
        return self._files.reader(name, size_bytes=size_bytes)

    def list(self, prefix: str, *, shallow: bool = False) -> Iterator[str]:
        """The names that start with `prefix`; `shallow`: up to the next `/`."""
        return self._files.list(prefix, shallow=shallow)

    def _why_not(self) -> str:
        return (
            f"{self._url} is only read: what fsspec reaches cannot promise that a save is whole. Save to a path or an "
            "object store, and copy it there; or pass an FsspecWriter of "
            "milepost.dcp._fsspec_filesystem as storage_writer, if what the file system promises is enough"
        )


class FsspecStore:
    """Bytes by name under one URL of fsspec. Can be pickled: another process connects by itself."""

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self._given, self._options = url.rstrip("/"), dict(options or {})
        self._url = without_secrets(self._given)
        self._connected: tuple[int, Any, str] | None = None
        self._connection()

    def __reduce__(self) -> tuple[Any, ...]:
        return FsspecStore, (self._given, self._options)

    def _connection(self) -> tuple[Any, str]:
        """The file system and the path of the root in it, of this process: clients do not survive a fork."""
        if self._connected is None or self._connected[0] != os.getpid():
            try:
                fs, root = fsspec_module().core.url_to_fs(self._given, **self._options)
            except (ValueError, ImportError) as error:
                raise InvalidRequest(f"fsspec has no file system for {self._url!r}: {error}") from error
            self._connected = os.getpid(), fs, root.rstrip("/")
        return self._connected[1], self._connected[2]

    @property
    def url(self) -> str:
        """Where this is, for messages."""
        return self._url

    @property
    def local_root(self) -> str | None:
        """The folder behind it, if this is the local file system."""
        fs, root = self._connection()
        protocols = (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
        return root or "/" if "file" in protocols else None

    def path_of(self, name: str) -> str:
        """The path of an object in the file system."""
        check_name(name)
        return f"{self._connection()[1]}/{name}"

    @property
    def traits(self) -> Traits:
        """Those of a file system."""
        return FILES

    def create(self, name: str, *data: Buffer) -> None:
        """Write an object, whole or not at all. Raises AlreadyExists if the name is taken."""
        fs, path, content = self._connection()[0], self.path_of(name), b"".join(data)
        with self._asking(f"create {name}"):
            self._make_folder(path)
            try:
                if _puts_exclusively(fs):
                    fs.pipe_file(path, content, mode="create")
                else:
                    self._create_by_move(path, content)
            except FileExistsError:
                raise AlreadyExists(f"{self._url}/{name} exists already") from None

    def _create_by_move(self, path: str, data: bytes) -> None:
        fs = self._connection()[0]
        if fs.exists(path):
            raise FileExistsError(path)
        temporary = f"{path}.{secrets.token_hex(8)}.tmp"
        try:
            fs.pipe_file(temporary, data)
            if fs.exists(path):
                raise FileExistsError(path)
            fs.mv(temporary, path)
        except BaseException:
            with contextlib.suppress(Exception):
                fs.rm_file(temporary)
            raise

    def writer(self, name: str, size_bytes: int, *, direct: bool = True) -> "FsspecObject":
        """Start a new object of this size. Raises AlreadyExists for a taken name, StorageError if there is no room."""
        del direct
        fs, path = self._connection()[0], self.path_of(name)
        with self._asking(f"write {name}"):
            if fs.exists(path):
                raise AlreadyExists(f"{self._url}/{name} exists already")
            return FsspecObject(self, name, size_bytes)

    def put(self, local: str, name: str, size_bytes: int) -> None:
        """Put a local file there under this name, and look that all of it arrived."""
        fs, path = self._connection()[0], self.path_of(name)
        with self._asking(f"write {name}"):
            self._make_folder(path)
            fs.put_file(local, path)
            fs.invalidate_cache()
            arrived = fs.size(path)
        if arrived != size_bytes:
            raise StorageError(f"{self._url}/{name} has {arrived} bytes of {size_bytes} after it was written")

    def _make_folder(self, path: str) -> None:
        folder = path.rpartition("/")[0]
        if folder:
            self._connection()[0].makedirs(folder, exist_ok=True)

    def reader(self, name: str, *, size_bytes: int | None = None) -> "FsspecReading":
        """Open an object. Raises FileNotFoundError if there is none."""
        del size_bytes
        fs, path = self._connection()[0], self.path_of(name)
        with self._asking(f"read {name}"):
            about = fs.info(path)
        if about.get("type") == "directory":
            raise FileNotFoundError(f"{self._url}/{name}")
        return FsspecReading(self, name, int(about["size"]))

    def fetch(self, name: str, start: int, stop: int) -> bytes:
        """Bytes start..stop of an object."""
        with self._asking(f"read {name}"):
            found: bytes = self._connection()[0].cat_file(self.path_of(name), start=start, end=stop)
        if len(found) != stop - start:
            raise StorageError(f"{self._url}/{name} ends before byte {stop}")
        return found

    def list(self, prefix: str, *, shallow: bool = False) -> Iterator[str]:
        """The names that start with `prefix`; `shallow`: up to the next `/`."""
        if shallow:
            return self._list_shallow(prefix)
        fs, root = self._connection()
        folder = prefix.rpartition("/")[0]
        with self._asking("list its objects"):
            fs.invalidate_cache()
            found = fs.find(f"{root}/{folder}".rstrip("/") or "/")
        names = (path[len(root) :].lstrip("/") for path in found)
        return iter([name for name in names if name.startswith(prefix)])

    def _list_shallow(self, prefix: str) -> Iterator[str]:
        fs, root = self._connection()
        folder = prefix.rpartition("/")[0]
        try:
            with self._asking("list its objects"):
                fs.invalidate_cache()
                found = fs.ls(f"{root}/{folder}".rstrip("/") or "/", detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in found:
            # Not all file systems spell the root as they were given it. The last part of a name is enough.
            path = entry["name"].rstrip("/")
            name = f"{folder}/{path.rpartition('/')[2]}".lstrip("/")
            if path != f"{root}/{folder}".rstrip("/") and name.startswith(prefix):
                yield f"{name}/" if entry.get("type") == "directory" else name

    def delete(self, *names: str, durable: bool = False) -> None:
        """Remove these objects, if they are there."""
        del durable
        errors = []
        for name in names:
            try:
                self._delete(name)
            except StorageError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _delete(self, name: str) -> None:
        fs, path = self._connection()[0], self.path_of(name)
        with contextlib.suppress(FileNotFoundError), self._asking(f"remove {name}"):
            fs.rm_file(path)

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Turn what clients raise into StorageError, except what callers of a store know."""
        try:
            yield
        except (CheckpointError, FileNotFoundError):
            raise
        except Exception as error:  # each client of fsspec has errors of its own
            raise StorageError(
                f"cannot {what} at {self._url}: {type(error).__name__}: {error}", errno=getattr(error, "errno", None)
            ) from error


def _puts_exclusively(fs: Any) -> bool:
    """Whether the file system has a way of its own to put whole objects, if the name is free."""
    put = getattr(type(fs), "_pipe_file", None) or type(fs).pipe_file
    base = fsspec_module().AbstractFileSystem.pipe_file
    return put is not base and "mode" in inspect.signature(put).parameters


class FsspecObject:
    """A new object, gathered in a local file: clients write from the first byte to the last, and blocks do not."""

    aligned = False

    def __init__(self, store: FsspecStore, name: str, size_bytes: int) -> None:
        self._store, self._name, self._size = store, name, size_bytes
        self._file = tempfile.NamedTemporaryFile(prefix="milepost-")  # noqa: SIM115  # closed by commit or abort
        self._put = False
        os.ftruncate(self._file.fileno(), size_bytes)

    def write(self, offset: int, views: Sequence[Buffer]) -> None:
        """Write all of `views`, one after the other, at `offset`."""
        for view in views:
            data = memoryview(view).cast("B")
            while len(data):
                done = os.pwrite(self._file.fileno(), data, offset)
                data, offset = data[done:], offset + done

    def commit(self) -> None:
        """Put the object under its name."""
        self._put = True
        self._store.put(self._file.name, self._name, self._size)
        self._file.close()

    def abort(self) -> None:
        """Give up: nothing of the object remains. Never raises."""
        with contextlib.suppress(OSError):
            self._file.close()
        if self._put:
            with contextlib.suppress(OSError, CheckpointError):
                self._store.delete(self._name)


class FsspecReading(OneWayReader):
    """Reads one object, from several threads at once."""

    def __init__(self, store: FsspecStore, name: str, size_bytes: int) -> None:
        self._store, self._name, self._size = store, name, size_bytes

    @property
    def size_bytes(self) -> int:
        """The size of the object."""
        return self._size

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill all of `views`, one after the other, from `offset`."""
        total = sum(map(len, views))
        if offset + total > self._size:
            raise StorageError(f"{self._store.url}/{self._name} ends before byte {offset + total}")
        data = memoryview(self._store.fetch(self._name, offset, offset + total)) if total else memoryview(b"")
        for view in views:
            view[:] = data[: len(view)]
            data = data[len(view) :]

    def close(self) -> None:
        """Nothing to close."""
