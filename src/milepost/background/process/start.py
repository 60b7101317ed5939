"""Starting a process that works for the trainer, and is not ended by the signals that end the trainer."""

import os
import signal
import socket
import subprocess
import sys

# A signal that ends a job (a launcher's SIGTERM, Ctrl-C, a batch system's warning to all of its processes) is meant for
# the trainer. The process ends with the trainer, after its work. Set before all else: importing torch takes seconds.
_IGNORED = [int(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)]
_PROGRAM = f"""
import importlib, signal, sys
for one in {_IGNORED}:
    signal.signal(one, signal.SIG_IGN)
getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(int(sys.argv[3]), int(sys.argv[4]))
"""


def start_process(module: str, function: str, channel: socket.socket, **environment: str) -> "subprocess.Popen[bytes]":
    """Call `function` of `module` with the descriptor of `channel` and our process id, in a process of its own.

    Not multiprocessing's: that runs the main module of the trainer again, and is refused to daemons.
    """
    folder = _folder()
    paths = os.pathsep.join(path or folder for path in sys.path)
    return subprocess.Popen(  # noqa: S603  # ourselves
        # -P: modules come from where the trainer has them, not from the folder that it happens to be in.
        [sys.executable, "-P", "-c", _PROGRAM, module, function, str(channel.fileno()), str(os.getpid())],
        pass_fds=[channel.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        cwd=folder,
        start_new_session=True,  # a signal to the trainer's group or terminal must not end it
    )


def _folder() -> str:
    """The working folder. The root if that was removed: a process needs one."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"
