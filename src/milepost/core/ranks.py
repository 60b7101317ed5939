"""Sequences of ranks as short text: `0-3,8` means 0, 1, 2, 3, 8. Pure."""

from collections.abc import Iterable
from functools import lru_cache

from milepost.core.limits import MAX_RANKS
from milepost.core.strict_int import number_of


def pack_ranks(ranks: Iterable[int]) -> str:
    """The sequence as text; runs that count upwards are joined. Order is kept."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@lru_cache(maxsize=64)
def unpack_ranks(text: str) -> tuple[int, ...]:
    """The sequence that `text` stands for. Raises ValueError for anything that is not such a text."""
    ranks: list[int] = []
    for run in text.split(",") if text else ():
        first, dash, last = run.partition("-")
        start, stop = number_of(first), number_of(last if dash else first)
        if start is None or stop is None:
            raise ValueError(f"{text[:80]!r} is not a list of ranks")
        if stop < start or stop >= MAX_RANKS or len(ranks) + stop - start >= MAX_RANKS:
            raise ValueError(f"{text[:80]!r} is not a list of at most {MAX_RANKS} ranks")
        ranks.extend(range(start, stop + 1))
    return tuple(ranks)


@lru_cache(maxsize=64)
def positions(text: str) -> dict[int, int]:
    """Where each rank of the sequence stands in it."""
    return {rank: i for i, rank in enumerate(unpack_ranks(text))}


def show_ranks(ranks: Iterable[int]) -> str:
    """Ranks for a message: `rank 3`, or `ranks 0-3, 8`; long lists are cut."""
    ordered = sorted(set(ranks))
    text = pack_ranks(ordered).replace(",", ", ")
    if len(text) > 60:
        text = f"{text[:56].rsplit(',', 1)[0]}, … ({len(ordered)} in all)"
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}"
