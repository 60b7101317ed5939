"""How the ranks of a load read: each for itself, once for all replicas, or once for all. Pure."""

from typing import Literal

from milepost.core.limits import MIB
from milepost.loading.rank_match import RankMatch

WORTH_BYTES = 64 * MIB
"""Below this size, agreeing on who reads takes longer than reading."""
_MOST_EXTRA = 0.05
"""The share of bytes beside those that are needed from which on ranks swap."""

Way = Literal["apart", "replicas", "swap"]
"""`replicas`: one of the ranks that want the same reads it, and sends it to the others. `swap`: each rank reads a part
of the files, and sends every rank what it wants of it."""


def swap_pays(read_bytes: int, extra_bytes: int, wish: bool | None = None) -> bool:
    """Whether so much would be read beside what is needed that ranks of several machines should swap."""
    return extra_bytes >= max(1 if wish else WORTH_BYTES, _MOST_EXTRA * read_bytes)


def choose_way(found: list[RankMatch], wish: bool | None) -> Way:
    """How to read, by what all ranks want, and by what the caller wishes (None: what is faster).

    Where a rank reads for itself, it reads whole blocks, and gaps between rows: mostly bytes for others where tensors
    are cut along another dimension than they were, or for many more ranks. Sharing costs one trip through the network,
    reading again one trip to the storage. Sharing wins where the ranks run on several machines, whose page caches are
    separate, and, for replicas, on linked devices. It loses on one machine with the tensors in main memory: there the
    page cache does the same at no cost. Swaps through the memory of devices were not measured: they need a wish.
    """
    if wish is False:
        return "apart"
    shared, extra = sum(one.shared_bytes for one in found), sum(one.extra_bytes for one in found)
    sharing = [one for one in found if one.shared_bytes or one.extra_bytes]
    apart = len({one.host for one in sharing}) > 1
    may_swap = wish or (apart and not any(one.on_device for one in sharing))
    if may_swap and swap_pays(sum(one.read_bytes for one in found), extra, wish):
        return "swap"
    if shared >= (1 if wish else WORTH_BYTES) and (wish or apart or all(one.on_device for one in sharing)):
        return "replicas"
    return "apart"
