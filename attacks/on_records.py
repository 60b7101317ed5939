"""Attacks on the records of the manifest: absurd numbers, files that lie, lists of nodes that are not trees."""

import json
from pathlib import Path
from typing import Any

from attacks.forge import (
    Attack,
    Corpus,
    claim_large_files,
    forge_manifest,
    make_good,
    read_manifest,
    set_fields,
    set_layout,
    tensor_row,
    write_manifest_text,
)

corpus = Corpus()

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
    """A block size that is allowed, but is not the one of the tables."""
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
    """The manifest claims that the files are large enough, and they are not."""

    def change(record: dict[str, Any]) -> None:
        set_layout(record, {"kind": "whole", "ranks": "0"}, [2**45])
        claim_large_files(record)

    forge_manifest(folder, change)


@corpus.attack("verify")
def bytes_of_2_to_the_45_in_files_that_claim_it(folder: Path) -> None:
    """Long bytes have no target to compare sizes with. A reader must not allocate what the manifest claims."""

    def change(record: dict[str, Any]) -> None:
        set_layout(record, {"kind": "whole", "ranks": "0"}, [2**45], "uint8")
        tensor_row(record)["kind"] = "bytes"
        claim_large_files(record)

    forge_manifest(folder, change)


@corpus.attack("verify")
def array_of_2_to_the_45_in_files_that_claim_it(folder: Path) -> None:
    """The same for an array, where the checkpoint decides what a stateful object gets."""

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
    """The manifest names a rank whose file does not hold the tensor."""
    forge_manifest(folder, lambda r: r["layouts"][1].update(ranks="1"))


@corpus.attack("nothing")
def tensor_with_a_turn_of_10_to_the_4000(folder: Path) -> None:
    """Turns are taken modulo the number of ranks, so a huge one is harmless."""
    forge_manifest(folder, lambda r: tensor_row(r).update(turn=10**4000))


@corpus.attack("open")
def tensor_in_a_million_parts(folder: Path) -> None:
    """A plan of a million reads for one small tensor."""

    def change(record: dict[str, Any]) -> None:
        set_layout(record, {"kind": "whole", "ranks": "0"}, [2**20], "uint8")
        tensor_row(record)["parts"] = 2**20
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
    """Another header length than the one in the file."""
    forge_manifest(folder, lambda r: r["files"][0].update(header_bytes=4000))


@corpus.attack("verify")
def file_with_a_size_of_10_to_the_4000(folder: Path) -> None:
    """A number beyond any machine's integers."""
    forge_manifest(folder, lambda r: r["files"][0].update(size_bytes=10**4000))


@corpus.attack("verify")
def file_that_is_not_listed(folder: Path) -> None:
    """The bytes of a tensor are in a file that the manifest does not list."""

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
    """The depth of a node is a number, so a deep tree takes little text."""
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
    """Small text that becomes large objects. Types are checked while parsing, so the objects are never made."""
    make_good(folder)
    text = json.dumps({**read_manifest(folder), "tensors": "@@@"})
    write_manifest_text(folder, text.replace('"@@@"', "[" + "[]," * 3_000_000 + "[]]").encode())
