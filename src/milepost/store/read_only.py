"""Places that are only read: the half of a store that saves need is refused, with the reason and what to do."""

from typing import Any, NoReturn

from milepost.errors import InvalidRequest
from milepost.store.base import Buffer


class ReadOnlyStore:
    """The writing half of a store, refused. A subclass reads, and says in `_why_not` why nothing is written there."""

    def _why_not(self) -> str:
        return "this place is only read; save to another one"

    def refuse(self) -> NoReturn:
        """Raise InvalidRequest: nothing can be saved here."""
        raise InvalidRequest(self._why_not())

    def create(self, name: str, *data: Buffer) -> NoReturn:
        """Raises InvalidRequest: it is read-only."""
        del name, data
        self.refuse()

    def writer(self, name: str, size_bytes: int, *, direct: bool = True) -> NoReturn:
        """Raises InvalidRequest: it is read-only."""
        del name, size_bytes, direct
        self.refuse()

    def delete(self, *names: str, durable: bool = False) -> NoReturn:
        """Raises InvalidRequest: it is read-only."""
        del names, durable
        self.refuse()


def refuse_read_only(store: Any) -> None:
    """Raise InvalidRequest if nothing can be saved in this store, also where it lies inside another."""
    while store is not None and not isinstance(store, ReadOnlyStore):
        store = getattr(store, "inner", None)
    if store is not None:
        store.refuse()
