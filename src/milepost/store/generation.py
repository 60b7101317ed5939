"""One generation of a checkpoint as a store of its own, for those who want another one than the newest."""

from collections.abc import Iterator
from typing import NoReturn

from milepost.core.manifest import intended_generation, manifest_name
from milepost.errors import InvalidRequest
from milepost.store.base import Buffer, Reader, Traits, check_name, top_names
from milepost.store.location import Location, store_at


class AtGeneration:
    """The place `path` as it was at one generation: pass it wherever a path to read from is taken. It is read-only.

    A save removes older generations once it has committed, so there is usually one. Where the newest is damaged and the
    error says that an older one is whole, this is the way to it. It also chooses Milepost's checkpoint where another
    library has saved to the same place (AmbiguousCheckpoint).

    >>> _ = milepost.save({"step": 1}, "memory://generations")
    >>> milepost.open(milepost.store.AtGeneration("memory://generations", 1))["step"]
    1
    """

    def __init__(self, path: Location, generation: int) -> None:
        if type(generation) is not int or generation < 1:
            raise InvalidRequest(f"a generation is a whole number from 1 on, not {generation!r}")
        self.inner, self.generation = store_at(path), generation

    @property
    def url(self) -> str:
        """Where this is, for messages."""
        return self.inner.url

    @property
    def traits(self) -> Traits:
        """Those of the store at the path."""
        return self.inner.traits

    def reader(self, name: str, *, size_bytes: int | None = None) -> Reader:
        """Open an object of this generation. Raises FileNotFoundError for any other."""
        if not self._has(name):
            raise FileNotFoundError(f"{self.url}/{name}")
        return self.inner.reader(name, size_bytes=size_bytes)

    def list(self, prefix: str, *, shallow: bool = False) -> Iterator[str]:
        """The names of this generation that start with `prefix`."""
        found = filter(self._has, self.inner.list(prefix))
        return top_names(found, prefix) if shallow else found

    def create(self, name: str, *data: Buffer) -> NoReturn:
        """Raises InvalidRequest: it is read-only."""
        del name, data
        self._refuse()

    def writer(self, name: str, size_bytes: int, *, direct: bool = True) -> NoReturn:
        """Raises InvalidRequest: it is read-only."""
        del name, size_bytes, direct
        self._refuse()

    def delete(self, *names: str, durable: bool = False) -> NoReturn:
        """Raises InvalidRequest: it is read-only."""
        del names, durable
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise InvalidRequest(f"generation {self.generation} of {self.url} is only read; save to the path itself")

    def _has(self, name: str) -> bool:
        parts = check_name(name)
        if parts[0] == "data" and len(parts) > 1:
            return intended_generation(parts[1]) == self.generation
        return name == manifest_name(self.generation)
