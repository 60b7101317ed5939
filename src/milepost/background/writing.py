"""Writing one staged save: by a thread of this process, or by the writing process of this rank."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from milepost.background.process.supervisor import WriterSupervisor
from milepost.background.staging import Staging
from milepost.background.ticket import Permit
from milepost.comm import Call, Comm, Deferred, note_parting, together
from milepost.events.operation import current, phasing
from milepost.saving.describe import Described
from milepost.saving.options import SaveOptions
from milepost.saving.pipeline import Receipt, save_state
from milepost.store import Store

Then = Callable[[Comm], None]
"""Called on every rank, in the background, after the commit."""


@dataclass(frozen=True, slots=True)
class StagedSave:
    """A save with the copy of the state, or the error to raise on all ranks.

    `packed_store`: the store as the writing process gets it. `permit`: whether it may commit.
    """

    permit: Permit
    store: Store
    packed_store: bytes
    options: SaveOptions
    staging: Deferred[Staging]
    then: Then | None


def write_by_thread(save: StagedSave, comm: Comm) -> Receipt:
    """Write from this process, with all ranks of `comm`. Raises the same error on every rank."""

    def describing() -> Described:
        staging = save.staging.get()

        def let_go() -> None:
            if staging.done.is_set():
                return  # the caller has gone on, and may change the state
            staging.check_unchanged()
            staging.release()
            save.permit.wait()  # the caller goes on now, and allows the commit; or has left

        with phasing("staging"):
            staging.copy(save.permit.check)
        if staging.is_copied():
            let_go()
        return staging.described(let_go)

    return save_state(None, save.store, comm, save.options, describing)


def write_by_process(save: StagedSave, processes: WriterSupervisor) -> Receipt:
    """Copy the state, and let the writing process of this rank write it. Raises the same error on every rank."""
    staging = save.staging.result
    if staging is not None and staging.fits():
        try:
            with phasing("staging"):
                staging.copy(save.permit.check)
            if staging.fits():  # still: there may have been too little memory
                staging.at_return.set()
                save.permit.wait()  # what is handed over is committed even if this process dies
        except Exception as error:  # noqa: BLE001  # raised on every rank
            save = replace(save, staging=Deferred(None, error))
    processes.choose(save.store.url)
    staging = save.staging.result
    if staging is None or not staging.fits():  # the copy may have failed just now
        # The process cannot see memory that was not copied. So this thread writes, and meets the other processes.
        comm = processes.started().comm
        try:
            return write_by_thread(save, comm)
        except BaseException as error:
            note_parting(comm, error)
            raise
    if processes.writers is None:
        staging.release()  # starting them takes seconds
    with phasing("starting"):
        writers = processes.started()
        processes.share(writers)
    operation = current()
    assert operation is not None
    if not staging.done.is_set():
        operation.note_blocking()  # the call returns when this is handed over
    seed = operation.seed()
    number = writers.hand_over(save.store.url, save.packed_store, staging.slots(), save.options, seed)
    staging.release()  # not before: a trainer that dies from here on leaves a checkpoint
    return writers.outcome(number, save.options, operation.relay)


def after_commit(comm: Comm, url: str, then: Then | None) -> None:
    """Call `then` on every rank. An error on one rank is raised on all."""
    if then is None:
        return
    together(comm, Call("saving to", url), "finishing", partial(then, comm))
