"""Attacks on layouts: ranks that do not exist, meshes, strides and boxes that explode, overlap or leave holes."""

from pathlib import Path
from typing import Any

from attacks.forge import (
    Attack,
    Corpus,
    claim_large_files,
    forge_manifest,
    set_layout,
)

corpus = Corpus()

_RANKS: dict[str, str] = {
    "a_hundred_billion": "0-99999999999",
    "a_hundred_billion_times": ",".join(["0-1048575"] * 1000),
    "none": "",
    "minus_one": "-1",
    "two_dashes": "0--1",
    "backwards": "5-1",
    "words": "all",
    "a_power": "1e3",
    "digits_of_another_script": "\N{ARABIC-INDIC DIGIT THREE}-\N{ARABIC-INDIC DIGIT NINE}",
    "raised_digits": "²",
    "ten_thousand_digits": "1" * 10_000,
    "more_than_the_world": "0-2",
    "blanks": " 0-1",
    "a_comma_too_many": "0-1,",
}


def _add_ranks() -> None:
    for name, ranks in _RANKS.items():

        def whole(folder: Path, ranks: str = ranks) -> None:
            forge_manifest(folder, lambda r: r["layouts"][1].update(ranks=ranks))

        def mesh(folder: Path, ranks: str = ranks) -> None:
            forge_manifest(folder, lambda r: r["layouts"][0]["mesh"].update(ranks=ranks))

        why = "Ranks are text, and a few letters can stand for very many."
        corpus.append(Attack(f"ranks_of_{name}", why, "open", whole))
        corpus.append(Attack(f"mesh_of_{name}", why, "open", mesh))


_add_ranks()


@corpus.attack("nothing")
def ranks_of_one_rank_twice(folder: Path) -> None:
    """A rank that holds a tensor twice writes it in the same way."""
    forge_manifest(folder, lambda r: r["layouts"][1].update(ranks="0,0,1"))


@corpus.attack("open")
def private_ranks_past_the_world(folder: Path) -> None:
    """A private key with a million ranks, more than there are."""
    forge_manifest(folder, lambda r: r["per_rank"][0].update(ranks="0-1048575"))


@corpus.attack("open")
def layouts_of_a_million_ranks_a_thousand_times(folder: Path) -> None:
    """Each layout is within the limit. A thousand different ones take 40 GB if all ranks are listed."""

    def change(record: dict[str, Any]) -> None:
        record["world"] = 2**20
        record["layouts"] += [{"kind": "whole", "ranks": f"{i}-1048575"} for i in range(1000)]

    forge_manifest(folder, change)


@corpus.attack("open")
def boxes_held_by_a_million_ranks_a_thousand_times(folder: Path) -> None:
    """The same inside one layout."""

    def change(record: dict[str, Any]) -> None:
        held = [{"box": [[i], [1]], "ranks": f"{i}-1048575"} for i in range(1000)]
        set_layout(record, {"kind": "boxes", "held": held}, [1000])
        record["world"] = 2**20
        claim_large_files(record)

    forge_manifest(folder, change)


def _grid(shape: list[int], cuts: list[Any], ranks: str = "0-1") -> dict[str, Any]:
    return {"kind": "grid", "mesh": {"shape": shape, "ranks": ranks}, "cuts": cuts}


def _forge_grid(folder: Path, grid: dict[str, Any], shape: list[int], world: int = 2) -> None:
    def change(record: dict[str, Any]) -> None:
        set_layout(record, grid, shape, "uint8")
        record["world"] = world
        claim_large_files(record)

    forge_manifest(folder, change)


_GRIDS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "2_to_the_40_boxes": (_grid([2, 1], [[0, 65536], [1, 65536]]), [2**20, 2**20]),
    "a_stride_past_the_limit": (_grid([2], [[0, 2**40]]), [2**20]),
    "a_stride_of_0": (_grid([2], [[0, 0]]), [64]),
    "a_negative_stride": (_grid([2], [[0, -1]]), [64]),
    "a_dimension_that_is_not_there": (_grid([2], [[7, 1]]), [64]),
    "a_negative_dimension": (_grid([2], [[-1, 1]]), [64]),
    "dimension_2_to_the_62": (_grid([2], [[2**62, 1]]), [64]),
    "a_mesh_that_overflows": (_grid([2**32, 2**32], [[0, 1], None]), [64]),
    "a_mesh_of_10_to_the_4000": (_grid([10**4000] * 64, [None] * 64), [64]),
    "a_mesh_of_no_axes": (_grid([], []), [64]),
    "a_mesh_with_an_axis_of_0": (_grid([0, 2], [None, None]), [64]),
    "a_mesh_with_a_negative_axis": (_grid([-1, -2], [None, None]), [64]),
    "a_mesh_of_1000_axes": (_grid([1] * 999 + [2], [None] * 1000), [64]),
    "a_rank_twice": (_grid([2], [[0, 1]], "0,0"), [64]),
    "too_few_cuts": (_grid([2, 1], [[0, 1]]), [64]),
    "too_many_cuts": (_grid([2], [[0, 1], None]), [64]),
}


def _add_grids() -> None:
    for name, (grid, shape) in _GRIDS.items():

        def make(folder: Path, grid: dict[str, Any] = grid, shape: list[int] = shape) -> None:
            _forge_grid(folder, grid, shape)

        corpus.append(Attack(f"grid_with_{name}", "A grid that cannot be, or that cuts too fine.", "open", make))


_add_grids()


@corpus.attack("verify")
def grid_with_64_axes(folder: Path) -> None:
    """As many axes as are allowed; numpy and torch have limits of their own."""
    _forge_grid(folder, _grid([1] * 63 + [2], [None] * 63 + [[0, 1]]), [2, *[1] * 62])


@corpus.attack("open")
def grid_of_4_million_boxes(folder: Path) -> None:
    """A few bytes of manifest that stand for millions of boxes of one byte."""
    _forge_grid(folder, _grid([64], [[0, 65536]], "0-63"), [2**22], world=64)


@corpus.attack("open")
def grid_of_strides_of_strides(folder: Path) -> None:
    """Each stride multiplies the work of the one before it, not only the boxes."""
    _forge_grid(folder, _grid([2, 1], [[0, 65536], [0, 65536]]), [2**20])


_BOXES: dict[str, list[Any]] = {
    "that_overlap": [[[0, 0], [64, 32]], [[10, 10], [1, 1]]],
    "with_a_hole": [[[0, 0], [64, 31]]],
    "that_leave_the_tensor": [[[0, 0], [65, 32]]],
    "of_other_dimensions": [[[0], [2048]]],
    "with_negative_offsets": [[[-1, 0], [64, 32]]],
    "with_negative_sizes": [[[0, 0], [64, 33]], [[0, 0], [-64, 1]]],
    "of_10_to_the_4000": [[[10**4000, 0], [10**4000, 32]]],
    "with_more_offsets_than_sizes": [[[0, 0, 0], [64, 32]]],
    "of_nothing": [],
}


def _add_boxes() -> None:
    for name, boxes in _BOXES.items():

        def make(folder: Path, boxes: list[Any] = boxes) -> None:
            layout = {"kind": "boxes", "held": [{"box": box, "ranks": "0"} for box in boxes]}
            forge_manifest(folder, lambda r: set_layout(r, layout, [64, 32]))

        corpus.append(Attack(f"boxes_{name}", "Boxes that do not tile the tensor.", "open", make))


_add_boxes()


@corpus.attack("verify")
def boxes_side_by_side_10000_times(folder: Path) -> None:
    """Comparing each box with each other takes quadratic time; all of these lie in one row."""

    def change(record: dict[str, Any]) -> None:
        held = [{"box": [[0, i], [1, 1]], "ranks": "0"} for i in range(10_000)]
        set_layout(record, {"kind": "boxes", "held": held}, [1, 10_000], "uint8")
        claim_large_files(record)

    forge_manifest(folder, change)


@corpus.attack("verify")
def boxes_of_2000_for_2000_tensors(folder: Path) -> None:
    """One long layout that many tensors share is checked for each of them."""

    def change(record: dict[str, Any]) -> None:
        held = [{"box": [[i], [1]], "ranks": "0"} for i in range(2000)]
        record["layouts"].append({"kind": "boxes", "held": held})
        at = len(record["layouts"]) - 1
        for i in range(2000):
            key = f"evil{i}"
            record["tensors"].append({"key": key, "dtype": "uint8", "shape": [2000], "layout": at})
            record["tree"].append([1, key, "tensor", key])
        claim_large_files(record)

    forge_manifest(folder, change)
