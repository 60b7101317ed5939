"""Keeps parts of torch from holding the process group for ever.

The functions of `torch.distributed.nn.functional` have the default group as the default of an argument, as it was when
the module was imported. Imported after `init_process_group` (by torch's checkpoint package, which Milepost imports when
it first needs it), they hold that group, and the job's store with it, after `destroy_process_group`. A later
`init_process_group` at the same port then meets the old store, and hangs. Imported before, they hold None, which means
the default group at the time of the call. So that is what they get here.
"""

from types import FunctionType

import torch.distributed as dist


def unpin() -> None:
    """Let these functions look the default group up when they are called."""
    if not dist.is_available():
        return
    from torch.distributed.nn import functional  # noqa: PLC0415  # not part of every build

    for function in vars(functional).values():
        if isinstance(function, FunctionType) and function.__defaults__:
            defaults = (None if isinstance(one, dist.ProcessGroup) else one for one in function.__defaults__)
            function.__defaults__ = tuple(defaults)
