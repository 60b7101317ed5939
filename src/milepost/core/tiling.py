"""Whether boxes tile a tensor: none overlap, and none are missing. Pure."""

import itertools

from milepost.core.box import Box, Shape
from milepost.core.limits import MAX_TANGLED


def find_gap(boxes: list[Box], shape: Shape) -> str | None:
    """Why these boxes do not tile a tensor of this shape exactly, or None if they do. Near-linear for ordinary cuts."""
    whole = Box.whole(shape)
    for box in boxes:
        if not whole.contains(box):
            return f"box {box.text} leaves the tensor of shape {shape}"
    solid = [box for box in boxes if box.elements]
    clash = _overlap(solid)
    if clash:
        return clash
    covered = sum(b.elements for b in solid)
    if covered != whole.elements:
        return f"{whole.elements - covered} of {whole.elements} elements are held by no rank"
    return None


def _overlap(boxes: list[Box]) -> str | None:
    """Which two boxes overlap, or None.

    Splits the boxes where a plane separates them, again and again, so that only boxes that no plane separates are
    compared with each other.
    """
    pending = [boxes]
    while pending:
        group = pending.pop()
        if len(group) < 2:
            continue
        parts = next((p for dim in range(len(group[0].shape)) if len(p := _separated(group, dim)) > 1), None)
        if parts is not None:
            pending.extend(parts)
            continue
        neighbours = list(itertools.pairwise(sorted(group, key=lambda b: (b.offset, b.shape))))
        few = itertools.combinations(group, 2) if len(group) <= MAX_TANGLED else ()
        for one, other in itertools.chain(neighbours, few):
            if one.intersect(other) is not None:
                return f"boxes {one.text} and {other.text} overlap"
        if len(group) > MAX_TANGLED:
            return f"{len(group)} boxes are cut too irregularly to be checked"
    return None


def _separated(boxes: list[Box], dim: int) -> list[list[Box]]:
    """The boxes in groups that planes across `dim` separate."""
    groups: list[list[Box]] = []
    reach = 0
    for box in sorted(boxes, key=lambda b: (b.offset[dim], b.shape[dim])):
        if not groups or box.offset[dim] >= reach:
            groups.append([])
        groups[-1].append(box)
        reach = max(reach, box.offset[dim] + box.shape[dim])
    return groups
