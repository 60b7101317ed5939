"""What to do about errors of the operating system."""

import errno

_ADVICE = {
    errno.ENOSPC: "Free some space, or save elsewhere",
    errno.EDQUOT: "Free some space of this user or group, raise the quota, or save elsewhere",
    errno.EFBIG: "The file system or the limit of this process (ulimit -f) allows no file of this size. Raise it, save "
    "elsewhere, or save from more ranks, which makes smaller files",
    errno.ENAMETOOLONG: "Choose a shorter path",
    errno.EROFS: "The file system is mounted read-only. Mount it for writing, or save elsewhere",
    errno.EACCES: "This user may not do that here. Change the rights of the folder, or save elsewhere",
    errno.EPERM: "This user may not do that here. Change the rights of the folder, or save elsewhere",
    errno.EMFILE: "This process has too many open files. Raise ulimit -n",
    errno.ENFILE: "This machine has too many open files",
}
"""What to do about errors that the caller can do something about."""


def explain(error: OSError) -> str:
    """What happened, and what to do where the caller can do something."""
    what = error.strerror or str(error)
    return f"{what}. {_ADVICE[error.errno]}" if error.errno in _ADVICE else what
