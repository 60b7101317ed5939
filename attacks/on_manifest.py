"""Attacks on the manifest: text that is no JSON, records that contradict themselves, numbers out of all proportion."""

import json
import os
from pathlib import Path
from typing import Any

from attacks.forge import (
    Attack,
    Corpus,
    claim_large_files,
    forge_manifest,
    make_good,
    manifest_path,
    nested,
    read_manifest,
    replace_text,
    set_fields,
    set_layout,
    tensor_row,
    write_manifest_text,
)

corpus = Corpus()

# ---------------------------------------------------------------- text

_TEXTS: dict[str, bytes] = {
    "empty": b"",
    "one_byte": b"{",
    "only_a_brace": b"{}",
    "null": b"null",
    "zeros": bytes(10_000),
    "binary": bytes(range(256)) * 10,
}


def _add_texts() -> None:
    for name, text in _TEXTS.items():

        def make(folder: Path, text: bytes = text) -> None:
            make_good(folder)
            manifest_path(folder).write_bytes(text)

        corpus.append(Attack(f"manifest_of_{name}", "Not a manifest at all.", "open", make))


_add_texts()


@corpus.attack("open")
def manifest_without_a_seal(folder: Path) -> None:
    """A manifest that was not sealed."""
    make_good(folder)
    manifest_path(folder).write_text(json.dumps(read_manifest(folder)))


@corpus.attack("open")
def manifest_with_another_seal(folder: Path) -> None:
    """A seal that belongs to another text."""
    make_good(folder)
    text = manifest_path(folder).read_bytes()
    manifest_path(folder).write_bytes(text.replace(b'"step"', b'"stop"'))


@corpus.attack("open")
def manifest_with_text_behind_the_seal(folder: Path) -> None:
    """Text behind the end, which a lenient reader would skip."""
    make_good(folder)
    with manifest_path(folder).open("ab") as file:
        file.write(b"\n{}")


@corpus.attack("open")
def manifest_that_is_a_list(folder: Path) -> None:
    """Valid JSON, validly sealed, of another shape."""
    make_good(folder)
    write_manifest_text(folder, b"[1, 2, 3]")


@corpus.attack("open")
def manifest_that_is_not_utf8(folder: Path) -> None:
    """Bytes in a string that are not text."""
    replace_text(folder, b'"model.bias", "dtype"', b'"model.\xff\xfe", "dtype"')


@corpus.attack("open")
def manifest_with_half_a_surrogate(folder: Path) -> None:
    """Text that JSON can escape and Unicode does not know."""
    replace_text(folder, b'"model.bias", "dtype"', b'"model.\\ud800", "dtype"')


@corpus.attack("open")
def manifest_with_a_byte_order_mark(folder: Path) -> None:
    """A mark before the first brace."""
    replace_text(folder, b'{"format"', b'\xef\xbb\xbf{"format"')


@corpus.attack("open")
def manifest_with_nan(folder: Path) -> None:
    """NaN is not JSON."""
    replace_text(folder, b'"value": 7', b'"value": NaN')


@corpus.attack("open")
def manifest_with_infinity(folder: Path) -> None:
    """Infinity is not JSON either."""
    replace_text(folder, b'"value": 7', b'"value": -Infinity')


@corpus.attack("open")
def manifest_with_a_float_past_infinity(folder: Path) -> None:
    """A number that would silently become infinity."""
    replace_text(folder, b'"value": 7', b'"value": 1e999')


@corpus.attack("open")
def manifest_with_an_int_of_a_million_digits(folder: Path) -> None:
    """Reading a long decimal number takes quadratic time."""
    replace_text(folder, b'"value": 7', b'"value": ' + b"7" * 1_000_000)


@corpus.attack("nothing")
def manifest_with_a_field_twice(folder: Path) -> None:
    """Two parsers could disagree on which field counts. The reader takes one, and the data is right."""
    replace_text(folder, b'{"format"', b'{"world": 1, "format"')


@corpus.attack("open")
def manifest_with_an_unknown_field(folder: Path) -> None:
    """A field of a later version, whose meaning this version cannot know."""
    set_fields(folder, plugins=["os.system"])


@corpus.attack("open")
def manifest_with_an_unknown_field_nested_100000_deep(folder: Path) -> None:
    """Parsing must not recurse without bound, not even in a field that is skipped."""
    replace_text(folder, b'{"format"', b'{"x": ' + nested(100_000).encode() + b', "format"')


@corpus.attack("open")
def manifest_without_a_field(folder: Path) -> None:
    """A field that every manifest has is missing."""
    forge_manifest(folder, lambda r: r.pop("block_bytes"))


@corpus.attack("open")
def manifest_of_another_format(folder: Path) -> None:
    """A file of another program."""
    set_fields(folder, format="safetensors")


@corpus.attack("open")
def manifest_of_a_newer_version(folder: Path) -> None:
    """The meaning of a newer version cannot be guessed."""
    set_fields(folder, version=2)


@corpus.attack("open")
def manifest_of_version_minus_one(folder: Path) -> None:
    """Versions count from one."""
    set_fields(folder, version=-1)


@corpus.attack("open")
def manifest_whose_version_is_text(folder: Path) -> None:
    """The types of fields are checked, too."""
    set_fields(folder, version="1")


@corpus.attack("open")
def manifest_of_a_quarter_gibibyte_of_holes(folder: Path) -> None:
    """A file with holes takes no space on disk and all of it in memory."""
    make_good(folder)
    os.truncate(manifest_path(folder), 2**28)


@corpus.attack("open")
def manifest_of_a_tebibyte_of_holes(folder: Path) -> None:
    """The same past the limit."""
    make_good(folder)
    os.truncate(manifest_path(folder), 2**40)


@corpus.attack("open")
def generation_of_another_file_name(folder: Path) -> None:
    """An old manifest under a newer name would bring back an old state."""
    make_good(folder)
    manifest_path(folder).rename(folder / "manifest-00000009.json")


# ---------------------------------------------------------------- numbers

_FIELDS: dict[str, dict[str, Any]] = {
    "no_ranks": {"world": 0},
    "negative_ranks": {"world": -1},
    "more_ranks_than_there_can_be": {"world": 2**40},
    "fewer_ranks_than_files": {"world": 1},
    "blocks_of_0": {"block_bytes": 0},
    "blocks_of_minus_1": {"block_bytes": -1},
    "blocks_of_5000": {"block_bytes": 5000},
    "blocks_of_2_to_the_40": {"block_bytes": 2**40},
    "blocks_of_10_to_the_4000": {"block_bytes": 10**4000},
    "blocks_smaller_than_a_page": {"block_bytes": 512},
    "no_files": {"files": []},
    "no_tree": {"tree": []},
    "no_layouts": {"layouts": []},
    "no_tensors": {"tensors": []},
    "a_leaf_as_root": {"tree": [[0, None, "value", "step"]]},
}


def _add_fields() -> None:
    for name, fields in _FIELDS.items():

        def make(folder: Path, fields: dict[str, Any] = fields) -> None:
            set_fields(folder, **fields)

        corpus.append(Attack(f"manifest_with_{name}", "A record that contradicts itself.", "open", make))


_add_fields()


@corpus.attack("verify")
def blocks_of_another_valid_size(folder: Path) -> None:
    """Blocks of a size that is allowed, and not the one of the tables."""
    set_fields(folder, block_bytes=4096)


_SHAPES: dict[str, list[int]] = {
    "2_to_the_45": [2**45],
    "2_to_the_62": [2**62],
    "2_to_the_100": [2**50, 2**50],
    "10_to_the_4000": [10**4000, 10**4000],
    "minus_one": [-1],
    "minus_times_minus": [-64, -32],
    "65_dimensions": [1] * 65,
    "a_million_dimensions": [1] * 1_000_000,
    "nothing_times_too_much": [0, 2**62],
}


def _add_shapes() -> None:
    for name, shape in _SHAPES.items():

        def make(folder: Path, shape: list[int] = shape) -> None:
            whole = {"kind": "whole", "ranks": "0"}
            forge_manifest(folder, lambda r: set_layout(r, whole, shape))

        corpus.append(Attack(f"tensor_of_{name}", "A shape that no tensor has, or that no file holds.", "open", make))


_add_shapes()


@corpus.attack("verify")
def tensor_of_2_to_the_45_in_files_that_claim_it(folder: Path) -> None:
    """The manifest says that the files are large enough; they are not."""

    def change(record: dict[str, Any]) -> None:
        set_layout(record, {"kind": "whole", "ranks": "0"}, [2**45])
        claim_large_files(record)

    forge_manifest(folder, change)


@corpus.attack("verify")
def bytes_of_2_to_the_45_in_files_that_claim_it(folder: Path) -> None:
    """Long bytes have no target whose size could be compared: memory must not be taken on the manifest's word."""

    def change(record: dict[str, Any]) -> None:
        set_layout(record, {"kind": "whole", "ranks": "0"}, [2**45], "uint8")
        tensor_row(record)["kind"] = "bytes"
        claim_large_files(record)

    forge_manifest(folder, change)


@corpus.attack("verify")
def array_of_2_to_the_45_in_files_that_claim_it(folder: Path) -> None:
    """Nor for an array, where the checkpoint decides what a stateful object gets."""

    def change(record: dict[str, Any]) -> None:
        set_layout(record, {"kind": "whole", "ranks": "0"}, [2**45], "uint8")
        tensor_row(record)["kind"] = "numpy"
        claim_large_files(record)

    forge_manifest(folder, change)


_ROWS: dict[str, dict[str, Any]] = {
    "an_unknown_dtype": {"dtype": "load"},
    "an_unknown_kind": {"kind": "pickle"},
    "a_layout_that_is_not_there": {"layout": 99},
    "a_layout_before_the_first": {"layout": -1},
    "no_parts": {"parts": 0},
    "more_parts_than_there_are_ranks": {"parts": 2**40},
    "a_negative_turn": {"turn": -1},
    "a_kind_that_is_not_its_dtype": {"kind": "bytes"},
    "a_numpy_kind_of_a_dtype_without_one": {"kind": "numpy", "dtype": "bfloat16", "shape": [128, 32]},
    "an_unknown_field": {"file": "../../outside/secret"},
    "the_key_of_another": {"key": "model.bias"},
    "a_key_that_the_tree_does_not_know": {"key": "model.other"},
}


def _add_rows() -> None:
    for name, fields in _ROWS.items():

        def make(folder: Path, fields: dict[str, Any] = fields) -> None:
            forge_manifest(folder, lambda r: tensor_row(r).update(fields))

        corpus.append(Attack(f"tensor_with_{name}", "A tensor that contradicts the rest.", "open", make))


_add_rows()


@corpus.attack("verify")
def tensor_with_another_dtype_of_one_size(folder: Path) -> None:
    """The same bytes, taken for numbers of another kind."""
    forge_manifest(folder, lambda r: tensor_row(r).update(dtype="int32"))


@corpus.attack("verify")
def tensor_with_another_shape_of_one_size(folder: Path) -> None:
    """The same bytes, taken for another shape."""
    forge_manifest(folder, lambda r: tensor_row(r).update(shape=[32, 64]))


@corpus.attack("verify")
def tensor_in_the_file_of_another_rank(folder: Path) -> None:
    """A tensor is looked for where it is not."""
    forge_manifest(folder, lambda r: r["layouts"][1].update(ranks="1"))


@corpus.attack("nothing")
def tensor_with_a_turn_of_10_to_the_4000(folder: Path) -> None:
    """Turns go round and round; a huge one is only a long way round."""
    forge_manifest(folder, lambda r: tensor_row(r).update(turn=10**4000))


@corpus.attack("open")
def tensor_in_a_million_parts(folder: Path) -> None:
    """A plan of a million reads for one small tensor."""

    def change(record: dict[str, Any]) -> None:
        set_layout(record, {"kind": "whole", "ranks": "0"}, [2**20], "uint8")
        tensor_row(record)["parts"] = 2**20
        claim_large_files(record)

    forge_manifest(folder, change)


# ---------------------------------------------------------------- ranks and layouts

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
    """A rank that holds a tensor twice writes it no differently."""
    forge_manifest(folder, lambda r: r["layouts"][1].update(ranks="0,0,1"))


@corpus.attack("open")
def private_ranks_past_the_world(folder: Path) -> None:
    """A key that a million ranks are said to keep."""
    forge_manifest(folder, lambda r: r["per_rank"][0].update(ranks="0-1048575"))


@corpus.attack("open")
def layouts_of_a_million_ranks_a_thousand_times(folder: Path) -> None:
    """Each is within the limit; a thousand different ones take 40 GB if all are spelled out."""

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


# ---------------------------------------------------------------- files and trees

_FILES: dict[str, dict[str, Any]] = {
    "a_header_of_a_gigabyte": {"header_bytes": 10**9, "size_bytes": 2**40},
    "a_header_longer_than_the_file": {"header_bytes": 10**6},
    "a_header_of_nothing": {"header_bytes": 0},
    "a_negative_header": {"header_bytes": -4096},
    "a_negative_size": {"size_bytes": -1},
    "a_rank_of_another": {"rank": 1},
    "a_rank_past_the_world": {"rank": 2**40},
    "a_rank_of_10_to_the_4000": {"rank": 10**4000},
}


def _add_files() -> None:
    for name, fields in _FILES.items():

        def make(folder: Path, fields: dict[str, Any] = fields) -> None:
            forge_manifest(folder, lambda r: r["files"][0].update(fields))

        corpus.append(Attack(f"file_with_{name}", "A file that cannot be.", "open", make))


_add_files()


@corpus.attack("verify")
def file_with_a_header_that_ends_elsewhere(folder: Path) -> None:
    """A header of another length than the file's own."""
    forge_manifest(folder, lambda r: r["files"][0].update(header_bytes=4000))


@corpus.attack("verify")
def file_with_a_size_of_10_to_the_4000(folder: Path) -> None:
    """A number that no machine counts to."""
    forge_manifest(folder, lambda r: r["files"][0].update(size_bytes=10**4000))


@corpus.attack("verify")
def file_that_is_not_listed(folder: Path) -> None:
    """A tensor's bytes lie in a file that the manifest does not list."""

    def change(record: dict[str, Any]) -> None:
        del record["files"][1]
        claim_large_files(record)

    forge_manifest(folder, change)


_NODES: dict[str, list[Any]] = {
    "deeper_than_its_parent": [5, "evil", "dict", ""],
    "of_a_second_root": [0, None, "dict", ""],
    "of_negative_depth": [-1, "evil", "dict", ""],
    "of_depth_10_to_the_4000": [10**4000, "evil", "dict", ""],
    "of_an_unknown_kind": [1, "evil", "os.system", ""],
    "of_an_unknown_kind_of_dict": [1, "evil", "dict:os.system", ""],
    "below_a_leaf": [2, "evil", "value", "step"],
    "with_the_key_of_another": [1, "evil", "value", "step"],
    "with_a_key_that_no_table_holds": [1, "evil", "tensor", "evil"],
    "of_another_kind_than_its_table": [1, "evil", "per_rank", "step"],
    "that_is_a_container_with_a_key": [1, "evil", "dict", "evil"],
}


def _add_nodes() -> None:
    for name, node in _NODES.items():

        def make(folder: Path, node: list[Any] = node) -> None:
            forge_manifest(folder, lambda r: r["tree"].append(node))

        corpus.append(Attack(f"node_{name}", "A list of nodes that is no tree.", "open", make))


_add_nodes()


@corpus.attack("nothing")
def node_of_five_fields(folder: Path) -> None:
    """A fifth field means nothing."""
    forge_manifest(folder, lambda r: r["tree"].append([1, "evil", "dict", "", {"pickle": ""}]))


@corpus.attack("open")
def tree_100000_deep(folder: Path) -> None:
    """The tree's own depth is a number, and a number is soon written."""
    deep = [[depth, "d", "dict", ""] for depth in range(1, 100_000)]
    forge_manifest(folder, lambda r: r["tree"].extend(deep))


@corpus.attack("open")
def tree_102_deep(folder: Path) -> None:
    """One level more than can be saved."""
    deep = [[depth, "d", "dict", ""] for depth in range(1, 103)]
    forge_manifest(folder, lambda r: r["tree"].extend(deep))


@corpus.attack("nothing")
def tree_of_30000_nodes_under_a_long_name(folder: Path) -> None:
    """If each node carried its path, a long name above many nodes would be copied for each of them."""
    name = "n" * 100_000

    def change(record: dict[str, Any]) -> None:
        record["tree"].append([1, name, "dict", ""])
        record["tree"] += [[2, i, "list", ""] for i in range(30_000)]

    forge_manifest(folder, change)


@corpus.attack("nothing")
def tree_of_10000_leaves_with_one_long_prefix(folder: Path) -> None:
    """Keys that differ only at the end are slow to sort and to compare."""
    prefix = "p" * 1000

    def change(record: dict[str, Any]) -> None:
        record["tree"].append([1, "evil", "list", ""])
        record["tree"] += [[2, None, "value", f"{prefix}{i}"] for i in range(10_000)]
        record["values"] += [{"key": f"{prefix}{i}", "value": i} for i in range(10_000)]

    forge_manifest(folder, change)


@corpus.attack("nothing")
def namedtuple_of_10000_fields(folder: Path) -> None:
    """A namedtuple's class is compiled from text as long as its fields."""

    def change(record: dict[str, Any]) -> None:
        record["tree"].append([1, "evil", "namedtuple:Wide", ""])
        record["tree"] += [[2, f"f{i}", "list", ""] for i in range(10_000)]

    forge_manifest(folder, change)


@corpus.attack("open")
def everything_a_list_of_empty_lists(folder: Path) -> None:
    """Small text that becomes large objects; types are checked while parsing, so they never come to be."""
    make_good(folder)
    text = json.dumps({**read_manifest(folder), "tensors": "@@@"})
    write_manifest_text(folder, text.replace('"@@@"', "[" + "[]," * 3_000_000 + "[]]").encode())
