"""The thread in which a save runs."""

import logging
import threading
import traceback
from collections.abc import Callable

from milepost.background.pending import PendingSave
from milepost.saving.pipeline import Receipt

_log = logging.getLogger("milepost")


def run_in_thread(pending: PendingSave, save: Callable[[], Receipt]) -> None:
    """Run a save in a thread of its own; `pending` ends with its receipt or its error.

    Without a thread (there is a limit, or the interpreter is about to end) it runs here: other ranks wait for this one.
    """
    todo = [save]  # taken out, so that nothing keeps the state when an error keeps this function's frame

    def run() -> None:
        receipt, failed = None, None
        try:
            receipt = todo.pop()()
        except BaseException as error:  # noqa: BLE001  # it is raised where the caller asks
            failed = error
            _forget_frames(error)
        finally:
            pending.end(receipt, failed)

    # Not a daemon: the interpreter waits for it before it ends.
    thread = threading.Thread(target=run, name="milepost-save")
    try:
        thread.start()
    except RuntimeError as error:
        _log.warning("%s: the save to %s runs in the foreground", error, pending.url)
        run()


def _forget_frames(error: BaseException | None) -> None:
    """Clear the frames of an error: they hold much of the state, and the error is kept."""
    errors, seen = [error], set[int]()
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in seen:  # an error can be among its own causes
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            errors += [one.__cause__, one.__context__]
