"""The manifest: what is sealed comes back; what was changed, or was never right, does not."""

import gc
import json
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from milepost.core.box import Box
from milepost.core.division import share_out
from milepost.core.layout import Boxes, Cut, Grid, Held, Mesh, Whole
from milepost.core.limits import MAX_DIMS, MAX_RANKS, MIB
from milepost.core.manifest import (
    Manifest,
    PerRankValue,
    ReplacedIndex,
    ShardFile,
    Tensor,
    Value,
    check,
    generation_of,
    manifest_name,
    new_manifest,
    seal,
    shard_name,
    unseal,
)
from milepost.core.save_id import intended_generation, make_save_id
from milepost.core.table import TensorRow
from milepost.core.tree import Node
from tests.strategies import examples, layouts, shapes

GRID = Grid(Mesh.of((2, 2), (0, 2, 1, 3)), (None, Cut(0, 2)))
BOXES = Boxes((Held(Box((0,), (3,)), "0"), Held(Box((3,), (1,)), "3,1")))


def small(**changed: Any) -> Manifest:
    """A manifest with a little of everything; `changed` replaces fields."""
    tensors = (
        Tensor("w", "float32", (8, 2), 0),
        Tensor("x", "bfloat16", (4,), 1, parts=2),
        Tensor("y", "int8", (4,), 2, turn=1, kind="numpy"),
    )
    keys = [("w", "tensor"), ("x", "tensor"), ("y", "tensor"), ("step", "value"), ("rng", "per_rank")]
    content = {
        "metadata": {"dict": [["note", "ä"]]},
        "layouts": (GRID, BOXES, Whole("0-3")),
        "tensors": tensors,
        "tree": (Node(0, None, "dict"), *(Node(1, key, kind, key) for key, kind in keys)),
        "values": (Value("step", 100),),
        "per_rank": (PerRankValue("rng", "0-3"),),
        "files": tuple(ShardFile(rank, 8192, 4096, "0" * 16) for rank in range(4)),
    }
    manifest = new_manifest(3, make_save_id(3, "0123456789abcdef"), "2026-01-01T00:00:00+00:00", "test", 4, **content)
    return msgspec.structs.replace(manifest, **changed)


def sealed(body: bytes) -> bytes:
    """Any bytes, with the checksum that makes a reader look at them."""
    return body + f',\n"checksum": "{xxhash.xxh3_64(body).hexdigest()}"\n}}\n'.encode()


def as_file(record: dict[str, Any]) -> bytes:
    return sealed(json.dumps(record).encode().removesuffix(b"}"))


def as_record(manifest: Manifest) -> dict[str, Any]:
    return json.loads(msgspec.json.encode(manifest))


# ---- what is sealed comes back


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Manifests of random tensors, layouts and values."""
    world = draw(st.integers(1, 6))
    drawn = [draw(shapes(3, 6)) for _ in range(draw(st.integers(0, 4)))]
    by_key = {f"t{i}": draw(layouts(shape, range(world))) for i, shape in enumerate(drawn)}
    dtypes = st.sampled_from(["bool", "int8", "bfloat16", "float32", "complex128"])
    rows = [TensorRow(f"t{i}", draw(dtypes), shape, "tensor", None) for i, shape in enumerate(drawn)]
    tensors, found = share_out(rows, by_key, world)
    json_data = st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**53), 2**53)
        | st.text(max_size=5)
        | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    )
    values = tuple(Value(f"v{i}", draw(json_data)) for i in range(draw(st.integers(0, 3))))
    leaves = [(t.key, "tensor") for t in tensors] + [(v.key, "value") for v in values]
    generation = draw(st.integers(1, 99_999_999))
    return new_manifest(
        generation,
        make_save_id(generation, "0123456789abcdef"),
        "now",
        draw(st.text(max_size=5)),
        world,
        metadata=draw(json_data),
        layouts=found,
        tensors=tensors,
        tree=(Node(0, None, "dict"), *(Node(1, [key, draw(json_data)], kind, key) for key, kind in leaves)),
        values=values,
        per_rank=(),
        files=tuple(ShardFile(rank, 65536, 4096, "0" * 16) for rank in range(world)),
    )


@examples(80)
@given(manifests())
def test_a_sealed_manifest_comes_back_as_it_was(manifest):
    data = seal(manifest)
    assert unseal(data) == manifest
    assert seal(unseal(data)) == data


def test_a_sealed_manifest_is_plain_json_with_one_line_for_each_thing():
    manifest = small()
    text = seal(manifest).decode()
    record = json.loads(text)
    assert len(record.pop("checksum")) == 16
    nodes = [node[: 4 + (node[4] is not None)] for node in as_record(manifest)["tree"]]
    expected = {**as_record(manifest), "tree": nodes}
    empty = [expected.pop(name) for name in OPTIONAL]
    assert not any(empty), "and what is empty is left out"
    assert record == expected, "nodes without versions take no room for them"
    for tensor in manifest.tensors:
        assert sum(f'"key":"{tensor.key}"' in line for line in text.splitlines()) == 1


def test_a_thousand_tensors_on_a_thousand_ranks_take_less_than_a_megabyte():
    world = 1024
    grid = Grid(Mesh.of((world,), range(world)), (Cut(0),))
    rows = [TensorRow(f"model.layers.{i}.weight", "bfloat16", (8192, 8192), "tensor", grid) for i in range(1000)]
    tensors, found = share_out(rows, {r.key: grid for r in rows}, world)
    size = 1000 * 8192 * 8192 * 2 // world
    manifest = small(
        world=world,
        layouts=found,
        tensors=tensors,
        tree=(Node(0, None, "dict"), *(Node(1, r.key, "tensor", r.key) for r in rows)),
        values=(),
        per_rank=(),
        files=tuple(ShardFile(rank, 110_592 + size, 110_592, "0123456789abcdef") for rank in range(world)),
    )
    data = seal(manifest)
    assert len(data) < MIB
    assert unseal(data) == manifest


def test_the_size_grows_with_tensors_plus_ranks_and_not_with_their_product():
    def size(tensors: int, world: int) -> int:
        grid = Grid(Mesh.of((world,), range(world)), (Cut(0),))
        rows = [TensorRow(f"{i:05d}", "int8", (world,), "tensor", grid) for i in range(tensors)]
        shared, found = share_out(rows, {r.key: grid for r in rows}, world)
        tree = (Node(0, None, "dict"), *(Node(1, r.key, "tensor", r.key) for r in rows))
        files = tuple(ShardFile(rank, 8192, 4096, "0" * 16) for rank in range(world))
        return len(
            seal(small(world=world, layouts=found, tensors=shared, tree=tree, values=(), per_rank=(), files=files))
        )

    one, more_tensors, more_ranks, both = size(100, 16), size(400, 16), size(100, 64), size(400, 64)
    assert both - one < 1.1 * ((more_tensors - one) + (more_ranks - one))


# ---- what was changed


def test_every_change_of_a_single_byte_is_refused():
    data = bytearray(seal(small()))
    for at in range(len(data)):
        for mask in (0x01, 0x20, 0x80, 0xFF):
            data[at] ^= mask
            with pytest.raises(ValueError):
                unseal(bytes(data))
            data[at] ^= mask


def test_every_manifest_that_is_cut_short_or_continued_is_refused():
    data = seal(small())
    for length in range(len(data)):
        with pytest.raises(ValueError):
            unseal(data[:length])
    for more in (b" ", b"\n", b"}", data):
        with pytest.raises(ValueError):
            unseal(data + more)


# ---- what was never right


def test_a_newer_version_is_told_from_damage():
    record = {**as_record(small()), "version": 2, "layouts": "of a kind that we do not know"}
    with pytest.raises(LookupError, match="version 2"):
        unseal(as_file(record))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "orbax"),
        ("version", "1"),
        ("world", 0),
        ("world", MAX_RANKS + 1),
        ("world", 3),  # a layout names rank 3
        ("generation", 4),  # not the one of the save id
        ("save_id", "../../etc"),
        ("save_id", "00000003-xyz"),
        ("save_id", "3-0123456789abcdef"),
        ("block_bytes", 0),
        ("block_bytes", 5000),
        ("block_bytes", 2**40),
        ("files", []),  # the tensors are larger than that
        ("tree", []),
        ("layouts", []),
        ("tensors", []),
        ("values", []),
        ("per_rank", []),
        ("surprise", 1),
    ],
)
def test_a_field_that_contradicts_the_others_is_refused(field, value):
    assert unseal(as_file(as_record(small()))) == small()
    with pytest.raises(ValueError):
        unseal(as_file({**as_record(small()), field: value}))


def test_a_manifest_names_the_index_that_it_replaced_if_any():
    index = ReplacedIndex(".metadata", 100, "0" * 32)
    assert b"replaced" not in seal(small())
    assert unseal(seal(small())).replaced == ()
    assert unseal(seal(msgspec.structs.replace(small(), replaced=(index,)))).replaced == (index,)


OPTIONAL = ("replaced", "timings", "statistics", "health", "older")


@pytest.mark.parametrize("field", [name for name in Manifest.__struct_fields__ if name not in OPTIONAL])
def test_a_manifest_that_lacks_a_field_is_refused(field):
    record = as_record(small())
    del record[field]
    with pytest.raises(ValueError):
        unseal(as_file(record))


HOSTILE = {
    "the same as nothing": ("tensors", 0, {"same_as": "nothing"}),
    "the same as itself": ("tensors", 0, {"same_as": "w"}),
    "the same as another shape": ("tensors", 0, {"same_as": "x"}),
    "a layout that does not exist": ("tensors", 0, {"layout": 3}),
    "a negative layout": ("tensors", 0, {"layout": -1}),
    "a layout that cannot cut the shape": ("tensors", 0, {"shape": []}),
    "boxes that do not fill the shape": ("tensors", 1, {"shape": [5]}),
    "boxes that leave the shape": ("tensors", 1, {"shape": [3]}),
    "no parts": ("tensors", 0, {"parts": 0}),
    "a million parts": ("tensors", 0, {"parts": MAX_RANKS + 1}),
    "more parts than copies in a grid": ("tensors", 0, {"parts": 3}),
    "more parts than holders of any box": ("tensors", 1, {"parts": 3}),
    "more parts than ranks that have it whole": ("tensors", 2, {"parts": 5}),
    "a negative turn": ("tensors", 0, {"turn": -1}),
    "an unknown dtype": ("tensors", 0, {"dtype": "float31"}),
    "bytes of numbers": ("tensors", 0, {"kind": "bytes"}),
    "an array of what numpy has no type for": ("tensors", 1, {"kind": "numpy"}),
    "an unknown kind": ("tensors", 0, {"kind": "pickle"}),
    "a tensor larger than the files": ("tensors", 0, {"shape": [8, 4000]}),
    "a tensor of absurd size": ("tensors", 0, {"shape": [2**40, 2**40]}),
    "a negative size": ("tensors", 0, {"shape": [-8, -2]}),
    "too many dimensions": ("tensors", 0, {"shape": [1] * (MAX_DIMS + 1)}),
    "a tensor that the tree lacks": ("tensors", 0, {"key": "z"}),
    "a key twice": ("tensors", 0, {"key": "x"}),
    "a value that the tree lacks": ("values", 0, {"key": "z"}),
    "a private key that the tree lacks": ("per_rank", 0, {"key": "z"}),
    "ranks that are no ranks": ("per_rank", 0, {"ranks": "0-"}),
    "private values of a rank that does not exist": ("per_rank", 0, {"ranks": "0-4"}),
    "a file of a rank that does not exist": ("files", 3, {"rank": 4}),
    "a file of a negative rank": ("files", 0, {"rank": -1}),
    "two files of one rank": ("files", 0, {"rank": 1}),
    "a file smaller than its header": ("files", 0, {"size_bytes": 4095}),
    "a header of no bytes": ("files", 0, {"header_bytes": 0}),
    "a header of absurd size": ("files", 0, {"header_bytes": 2**40, "size_bytes": 2**41}),
    "a mesh with too few ranks": ("layouts", 0, {"mesh": {"shape": [2, 2], "ranks": "0-2"}}),
    "a mesh with a rank twice": ("layouts", 0, {"mesh": {"shape": [2, 2], "ranks": "0,0-2"}}),
    "a mesh of a rank that does not exist": ("layouts", 0, {"mesh": {"shape": [2, 2], "ranks": "1-4"}}),
    "a mesh of a billion ranks": ("layouts", 0, {"mesh": {"shape": [2**30], "ranks": f"0-{2**30 - 1}"}}),
    "more cuts than axes": ("layouts", 0, {"cuts": [None, [0, 2], None]}),
    "a cut of stride zero": ("layouts", 0, {"cuts": [None, [0, 0]]}),
    "boxes that overlap": (
        "layouts",
        1,
        {"held": [{"box": [[0], [4]], "ranks": "0"}, {"box": [[3], [1]], "ranks": "1"}]},
    ),
    "boxes that leave a hole": ("layouts", 1, {"held": [{"box": [[0], [3]], "ranks": "0"}]}),
    "a box that nobody holds": ("layouts", 1, {"held": [{"box": [[0], [4]], "ranks": ""}]}),
    "a box of a rank that does not exist": ("layouts", 1, {"held": [{"box": [[0], [4]], "ranks": "4"}]}),
    "a tensor that nobody holds": ("layouts", 2, {"ranks": ""}),
    "a layout of an unknown kind": ("layouts", 2, {"kind": "magic"}),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_manifest_with_a_hostile_line_is_refused(kind):
    table, at, change = HOSTILE[kind]
    record = as_record(small())
    record[table][at].update(change)
    with pytest.raises(ValueError):
        unseal(as_file(record))


TREES = {
    "no nodes": [],
    "a name twice": [
        [0, None, "dict"],
        *([1, "a", "tensor", k] for k in "wxy"),
        [1, "b", "value", "step"],
        [1, "c", "per_rank", "rng"],
    ],
    "a key twice": [[0, None, "dict"], *([1, k, "tensor", "w"] for k in "ab")],
    "a leaf with children": [[0, None, "dict"], [1, "w", "tensor", "w"], [2, "x", "tensor", "x"]],
    "a kind that runs code": [[0, None, "defaultdict:eval"]],
    "a jump in depth": [[0, None, "dict"], [2, "w", "tensor", "w"]],
    "a negative depth": [[0, None, "dict"], [-1, "w", "tensor", "w"]],
    "a hundred thousand levels": [[i, "a", "dict"] for i in range(100_000)],
}


@pytest.mark.parametrize("kind", TREES)
def test_a_manifest_with_a_hostile_tree_is_refused(kind):
    with pytest.raises(ValueError):
        unseal(as_file({**as_record(small()), "tree": TREES[kind]}))


@pytest.mark.parametrize("kind", ["surprise", "dict:more", "defaultdict:eval"])
def test_a_container_of_a_kind_that_this_version_does_not_know_is_refused(kind):
    with pytest.raises(ValueError, match="unknown kind"):
        seal(small(tree=(Node(0, None, kind), *small().tree[1:])))


def test_a_manifest_over_the_limit_is_neither_sealed_nor_read(monkeypatch):
    data = seal(small())
    monkeypatch.setattr("milepost.core.manifest.MAX_MANIFEST_BYTES", len(data))
    assert unseal(data) == small()
    monkeypatch.setattr("milepost.core.manifest.MAX_MANIFEST_BYTES", len(data) - 1)
    for act in (lambda: seal(small()), lambda: unseal(data)):
        with pytest.raises(ValueError, match=f"{len(data)} bytes is over the limit"):
            act()


def test_a_container_with_a_key_is_refused():
    root, *rest = small().tree
    with pytest.raises(ValueError, match="gives a key to a container"):
        seal(small(tree=(Node(root.depth, root.name, root.kind, "w"), *rest)))


def test_tensor_is_checked_beside_one_that_differs_only_in_parts():
    first, _, last = small().tensors
    with pytest.raises(ValueError, match="'x' has more parts than ranks"):
        seal(small(tensors=(first, msgspec.structs.replace(first, key="x", parts=3), last)))


def test_two_leaves_with_one_key_are_refused():
    """Tree and table agree; but what is read for the one would go to the other."""
    known = small()
    tensors = [msgspec.structs.replace(tensor, key="w") if tensor.key == "x" else tensor for tensor in known.tensors]
    tree = [Node(1, "x", "tensor", "w") if node.key == "x" else node for node in known.tree]
    with pytest.raises(ValueError, match="do not hold the same keys"):
        seal(small(tensors=tuple(tensors), tree=tuple(tree)))


@pytest.mark.parametrize("field", ["tensors", "values", "per_rank"])
def test_table_with_more_keys_than_the_tree_is_refused_first(field):
    record = as_record(small())
    record[field] *= 200
    with pytest.raises(ValueError, match="more keys than its tree has places"):
        unseal(as_file(record))


@pytest.mark.parametrize("field", ["metadata", "surprise", "tree"])
def test_deep_nesting_is_refused_with_a_value_error(field):
    record = {key: value for key, value in as_record(small()).items() if key != field}
    body = json.dumps(record).encode().removesuffix(b"}")
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        deep = opening * 200_000 + b"1" + closing * 200_000
        with pytest.raises(ValueError):
            unseal(sealed(body + f', "{field}": '.encode() + deep))


@examples(250)
@given(st.data())
def test_changed_text_is_refused_or_passes_all_checks(data):
    text = bytearray(json.dumps(as_record(small())).encode().removesuffix(b"}"))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        if data.draw(st.booleans()):
            text[at] = data.draw(st.sampled_from(b'0123456789-,"[]{}:ax\xff'))
        else:
            text[at:at] = data.draw(st.sampled_from([b"0", b"-", b'"', b",", b"null,", b"[", b"1e3"]))
    try:
        manifest = unseal(sealed(bytes(text)))
    except ValueError:
        return
    except LookupError as error:
        if type(error) is not LookupError:  # only a version may raise it; a KeyError would be a bug of Milepost
            raise
        return
    check(manifest)


def test_what_no_reader_would_accept_is_not_sealed():
    for changed in ({"world": 0}, {"files": ()}, {"tree": ()}, {"generation": 100_000_000}):
        with pytest.raises(ValueError):
            seal(small(**changed))


# ---- names


@examples(100)
@given(st.integers(0, 99_999_999), st.text("0123456789abcdef", min_size=8, max_size=32))
def test_names_tell_the_generation_that_they_belong_to(generation, token):
    assert generation_of(manifest_name(generation)) == generation
    assert intended_generation(make_save_id(generation, token)) == generation


@pytest.mark.parametrize(
    "name",
    [
        "manifest-1.json",
        "manifest-00000001.json.tmp",
        "manifest-0000000x.json",
        "",
        "manifest-" + "\u0661" * 8 + ".json",
    ],
)
def test_other_names_belong_to_no_generation(name):
    assert generation_of(name) is None


@examples(50)
@given(st.lists(st.integers(0, MAX_RANKS - 1), unique=True))
def test_every_rank_has_a_file_of_its_own(ranks):
    assert len({shard_name("00000001-01234567", rank) for rank in ranks}) == len(ranks)


@pytest.mark.slow
def test_sealing_leaves_no_objects_behind():
    """msgspec did not free the iterators that it made of tuples: six for each save."""
    manifest = small()
    seal(manifest)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(50):
        seal(manifest)
    gc.collect()
    assert len(gc.get_objects()) - before < 50
