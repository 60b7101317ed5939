"""One generation of a checkpoint as a store of its own, for those who want another one than the newest."""

from collections.abc import Iterator

from milepost.core.manifest import manifest_name
from milepost.core.save_id import intended_generation
from milepost.errors import InvalidRequest
from milepost.store.base import Reader, Traits, check_name
from milepost.store.location import Location, store_at
from milepost.store.read_only import ReadOnlyStore


class AtGeneration(ReadOnlyStore):
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
        found = self.inner.list(prefix, shallow=shallow)
        return (name for name in found if name == "data/" or self._has(name.removesuffix("/")))

    def _why_not(self) -> str:
        return f"generation {self.generation} of {self.url} is only read; save to the path itself"

    def _has(self, name: str) -> bool:
        parts = check_name(name)
        if parts[0] == "data" and len(parts) > 1:
            return intended_generation(parts[1]) == self.generation
        return name == manifest_name(self.generation)
