"""Names for saves that run beside others."""

import weakref
from itertools import count
from typing import Any

import torch.distributed as dist

# As long as the group lives: a name is used once, and ranks count the calls that each makes on a group.
_counts: "weakref.WeakKeyDictionary[dist.ProcessGroup, count[int]]" = weakref.WeakKeyDictionary()


def next_channel(process_group: Any) -> str:
    """The name of the next save in the background on this group: the same on all ranks that make the same calls."""
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    group: Any = process_group or dist.group.WORLD
    return f"/async/{next(_counts.setdefault(group, count()))}"
