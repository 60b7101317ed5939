"""Taking part in a load only in order to fail it."""

from typing import NoReturn

from milepost.comm import Comm, Phase, together
from milepost.loading.pipeline import open_together
from milepost.store import Store


def refuse_load(store: Store, comm: Comm, error: Exception, action: str = "loading") -> NoReturn:
    """Take part in the load that the other ranks begin, and fail it with this error, on all of them. Raises it.

    `action`: "loading", or "explaining" for the other ranks' `explain`.
    """

    def fail() -> bytes:
        raise error

    if comm.size > 1:
        open_together(store, comm, action)
        together(comm, Phase(action, store.url, "matching"), fail)
    raise error
