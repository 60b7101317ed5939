"""The structure of a checkpoint in columns: tensors, layouts and the tree, as the page reads them. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from milepost.core.dtypes import DTYPES
from milepost.core.layout import Boxes, Layout
from milepost.core.manifest import Manifest
from milepost.core.tree import Node
from milepost.view.plain import text
from milepost.view.record import PageTensors, PageTree, Structure

MAX_PAGE_BOXES = 200_000
"""How many boxes of explicit lists the page holds; layouts beyond it are left out."""


def structure_of(manifest: Manifest) -> Structure:
    """The structure of a manifest. A layout of a very long list of boxes is None."""
    tensors = manifest.tensors
    dtypes, shapes, kinds = _Numbers(), _Numbers(), _Numbers()
    order = {tensor.key: index for index, tensor in enumerate(tensors)}
    columns = PageTensors(
        keys=list(order),
        dtype=[dtypes.of(tensor.dtype) for tensor in tensors],
        shape=[shapes.of(tensor.shape) for tensor in tensors],
        layout=[tensor.layout for tensor in tensors],
        parts=[tensor.parts for tensor in tensors],
        turn=[tensor.turn for tensor in tensors],
        kind=[kinds.of(tensor.kind) for tensor in tensors],
        same_as=[order.get(tensor.same_as, -1) for tensor in tensors],
    )
    leaves = {"tensor": order}
    leaves["value"] = {value.key: index for index, value in enumerate(manifest.values)}
    leaves["per_rank"] = {private.key: index for index, private in enumerate(manifest.per_rank)}
    return Structure(
        dtypes=list(dtypes),
        item_bytes=[DTYPES[name].size_bytes for name in dtypes],
        shapes=list(shapes),
        layouts=list(_layouts(manifest.layouts)),
        tensors=columns,
        tree=_tree(manifest.tree, leaves, kinds),
        kinds=list(kinds),
        value_keys=list(leaves["value"]),
        private=[(private.key, private.ranks) for private in manifest.per_rank],
    )


class _Numbers(dict[Any, int]):
    """A number for each of different things, from 0 in the order in which they come."""

    def of(self, thing: Any) -> int:
        return self.setdefault(thing, len(self))


def _layouts(layouts: Sequence[Layout]) -> Iterable[Any]:
    left = MAX_PAGE_BOXES
    for layout in layouts:
        if isinstance(layout, Boxes):
            left -= len(layout.held)
            if left < 0:
                yield None
                continue
        yield msgspec.to_builtins(layout)


def _tree(nodes: Sequence[Node], leaves: dict[str, dict[str, int]], kinds: _Numbers) -> PageTree:
    """The nodes in columns, with the name of each: a number below a list."""
    counts: list[int] = []
    names, numbers = [], []
    for node in nodes:
        del counts[node.depth :]
        if counts:
            counts[-1] += 1
        name = str(counts[-1] - 1) if node.name is None and counts else text(node.name, 1000)
        names.append(name if node.depth else "")
        numbers.append(leaves[node.kind][node.key] if node.kind in leaves else -1)
        counts.append(0)
    kind = [kinds.of(node.kind) for node in nodes]
    return PageTree(depth=[node.depth for node in nodes], name=names, kind=kind, leaf=numbers)
