"""A job that is killed, all ranks of it, when its files are written and the checkpoint is not yet committed."""

import os
import signal
import threading
import time

from milepost.commit.attempt import Attempt


def die_in_the_next_commit(rank, folder):
    """From now on: the coordinator kills itself in its next commit, and the others follow."""
    mark = folder / "dead"

    def commit(self, *args, **kwargs):
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def follow():
        while not mark.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 0:
        Attempt.commit = commit
    else:
        threading.Thread(target=follow, daemon=True).start()
