"""Trees: random nested states taken apart and put together again."""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from milepost.core.limits import MAX_DEPTH
from milepost.core.tree import (
    FACTORIES,
    LEAVES,
    Flat,
    Node,
    Rules,
    TooDeep,
    build,
    check_kinds,
    children,
    flatten,
    grow,
    is_namedtuple,
    merge,
    restore,
    show_path,
)
from milepost.state.values import Codec
from tests.strategies import examples

CODEC = Codec()


class Point(NamedTuple):
    x: Any
    y: Any


class Empty(NamedTuple):
    pass


@dataclass(frozen=True)
class Mark:
    """A leaf that is equal to no other."""

    number: int
    kind: str = "value"


RULES = Rules(
    leaf=lambda value: value.kind if isinstance(value, Mark) else None,
    encode=CODEC.encode,
    open=lambda value, path: None,
)

# Few and much alike, so that paths collide.
DOTTED_KEYS = ["a", "b", "a.b", "", ".", "..", "a/b", "0", 0, "None", None, "True", True, "1.5", 1.5, "-1", -1, b"x"]
DOTTED_KEYS += [(0,), "(0,)", (0, "a"), ("a.b", (1,)), 10**30]
# These read like the exact spelling of others.
ESCAPED_KEYS = ["a\\.b", "\\", "\\.", "<", "<int 0>", "\\<int 0>", "<bool True>"]
KEYS = st.one_of(
    st.sampled_from(DOTTED_KEYS + ESCAPED_KEYS),
    st.text(max_size=4),
    st.integers(),
    st.floats(allow_nan=False),
    st.tuples(st.integers()),
)


def containers(keys: st.SearchStrategy[Any]) -> Any:
    def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        dicts = st.dictionaries(keys, inner, max_size=4)
        return st.one_of(
            dicts,
            dicts.map(OrderedDict),
            st.builds(defaultdict, st.sampled_from(list(FACTORIES.values())), dicts),
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.builds(Point, inner, inner),
            st.just(Empty()),
        )

    return around


def states(keys: st.SearchStrategy[Any] = KEYS) -> st.SearchStrategy[Any]:
    """Nested states; every leaf is a Mark of its own."""
    leaf = st.sampled_from(LEAVES)
    return st.recursive(leaf, containers(keys), max_leaves=12).map(lambda state: number(state, iter(range(1000))))


def number(state: Any, numbers: Any) -> Any:
    if isinstance(state, str) and state in LEAVES:
        return Mark(next(numbers), state)
    if isinstance(state, Mapping):
        fresh = state.copy()
        for key, value in state.items():
            fresh[key] = number(value, numbers)
        return fresh
    items = [number(item, numbers) for item in state]
    return type(state)(*items) if is_namedtuple(state) else type(state)(items)


def marks(state: Any) -> list[Mark]:
    if isinstance(state, Mark):
        return [state]
    return [mark for _, child in children(state) for mark in marks(child)]


def rebuilt(flat: Flat) -> Any:
    return build(grow(flat.nodes), lambda name: CODEC.decode(name, "key"), lambda node, path: flat.leaves[node.key])


def same(one: Any, two: Any) -> bool:
    """Whether types, keys, order and leaves are the same. Namedtuples are compared by name and fields."""
    if isinstance(one, Mark):
        return one == two
    if is_namedtuple(one):
        if not is_namedtuple(two) or (type(one).__name__, one._fields) != (type(two).__name__, two._fields):
            return False
    elif type(one) is not type(two):
        return False
    if isinstance(one, defaultdict) and one.default_factory is not two.default_factory:
        return False
    pairs = list(zip(children(one), children(two), strict=False))
    keys = all(a == b and type(a) is type(b) and repr(a) == repr(b) for (a, _), (b, _) in pairs)
    return len(one) == len(two) and keys and all(same(a, b) for (_, a), (_, b) in pairs)


# ---- taking apart and putting together


@examples(300)
@given(states())
@example({"a.b": Mark(0), "a": {"b": Mark(1)}})
@example({0: Mark(0), "0": Mark(1)})
@example({"a.b": Mark(0), "a": {"b": Mark(1)}, "a\\.b": Mark(2)})
@example({0: Mark(0), "0": Mark(1), "<int 0>": Mark(2)})
def test_a_state_comes_back_with_its_types_keys_and_order(state):
    assert same(state, rebuilt(flatten(state, RULES)))


@examples(250)
@given(states(st.sampled_from(DOTTED_KEYS + ESCAPED_KEYS)))
@example({"a.b": Mark(0), "a": {"b": Mark(1)}, "a\\.b": Mark(2)})
@example({0: Mark(0), "0": Mark(1), "<int 0>": Mark(2)})
def test_every_leaf_has_a_key_of_its_own_also_where_paths_collide(state):
    flat = flatten(state, RULES)
    assert sorted(mark.number for mark in flat.leaves.values()) == sorted(mark.number for mark in marks(state))
    assert list(flat.leaves) == [node.key for node in flat.nodes if node.kind in LEAVES]


def test_two_keys_that_are_both_not_a_number_are_told_apart_or_refused():
    try:
        flat = flatten({float("nan"): Mark(0), float("nan"): Mark(1)}, RULES)
    except ValueError:
        return
    assert len(flat.leaves) == 2


@examples(100)
@given(states(st.sampled_from(DOTTED_KEYS)))
def test_key_is_the_dotted_path_where_that_is_unique(state):
    flat = flatten(state, RULES)
    texts = [show_path(path) for path in flat.paths.values()]
    for key, path in flat.paths.items():
        assert (key == show_path(path)) >= (texts.count(show_path(path)) == 1)


@examples(100)
@given(states())
def test_a_path_leads_through_the_state_to_its_leaf(state):
    flat = flatten(state, RULES)
    for key, path in flat.paths.items():
        here = state
        for part in path:
            here = getattr(here, part) if is_namedtuple(here) else here[part]
        assert here == flat.leaves[key]
        assert flat.kinds[key] == here.kind


@examples(100)
@given(states())
def test_new_leaves_put_into_a_state_stand_where_the_old_ones_stood(state):
    flat = flatten(state, RULES)
    paths = {path: key for key, path in flat.paths.items()}
    expected = {key: Mark(leaf.number + 5000) for key, leaf in flat.leaves.items()}

    def replace(value: Any, path: Any) -> Any:
        return expected[paths[path]] if isinstance(value, Mark) else NotImplemented

    again = flatten(restore(state, replace), RULES)
    assert again.leaves == expected
    assert list(again.paths.values()) == list(flat.paths.values())


# ---- states and lists of nodes that are refused


@pytest.mark.parametrize("kind", [dict, list])
def test_a_state_that_contains_itself_is_too_deep(kind):
    state: Any = kind()
    state.update({"a": {"b": state}}) if kind is dict else state.append((state,))
    with pytest.raises(TooDeep, match="contain itself"):
        flatten(state, RULES)


@pytest.mark.parametrize("levels", [MAX_DEPTH, MAX_DEPTH + 1])
def test_a_state_may_be_as_deep_as_the_limit_and_no_deeper(levels):
    state: Any = Mark(0)
    for _ in range(levels):
        state = {"a": state}
    if levels > MAX_DEPTH:
        with pytest.raises(TooDeep):
            flatten(state, RULES)
    else:
        assert same(state, rebuilt(flatten(state, RULES)))


class Dict(dict):
    """A container that would not come back the same."""


@pytest.mark.parametrize("odd", [Dict(), defaultdict(lambda: 5), {1, 2}, range(3), object()])
def test_container_that_would_change_is_refused_by_path(odd):
    with pytest.raises(ValueError, match=r"outer\.3"):
        flatten({"outer": {3: odd}}, RULES)


KINDS = ["dict", "list", "tuple", "OrderedDict", "defaultdict:int", "defaultdict:eval"]
KINDS += ["namedtuple:P", "namedtuple:class", "namedtuple:", *LEAVES]
NAMES = [
    None,
    True,
    1,
    1.5,
    "",
    "a",
    "class",
    {"tuple": [1]},
    {"list": []},
    {"dict": [[1, 2]]},
    {"x": 1},
    [],
    {"int": "z"},
]
NODES = st.builds(
    Node,
    st.sampled_from([-1, 0, 1, 1, 1, 2, 2, 3, 4, MAX_DEPTH + 2]),
    st.sampled_from(NAMES),
    st.sampled_from([*KINDS, "", ":", "dict:x", "set"]),
    st.sampled_from(["", "k", "k.l"]),
)


@examples(250)
@given(st.lists(NODES, max_size=8) | st.lists(NODES, max_size=8).map(lambda nodes: [Node(0, None, "dict"), *nodes]))
def test_any_list_of_nodes_is_a_tree_or_refused_with_a_value_error(nodes):
    try:
        check_kinds(nodes)
        root = grow(nodes)
    except ValueError:
        return
    assert nodes[0].depth == 0
    assert sum(1 for _ in walk(root)) == len(nodes)


@examples(250)
@given(st.sampled_from(KINDS), st.lists(NODES, max_size=4))
@example("dict", [Node(1, {"list": []}, "value")])
def test_a_tree_of_hostile_names_is_built_or_refused_with_a_value_error(kind, nodes):
    nodes = [Node(0, None, kind), *(Node(1, n.name, n.kind, n.key) for n in nodes)]
    try:
        check_kinds(nodes)
        build(grow(nodes), lambda name: CODEC.decode(name, "key"), lambda node, path: node.key)
    except ValueError:
        pass


def walk(branch: Any) -> Any:
    yield branch
    for child in branch.children:
        yield from walk(child)


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [Node(1, None, "dict")],
        [Node(0, None, "dict"), Node(0, None, "dict")],
        [Node(0, None, "dict"), Node(2, "a", "value", "a")],
        [Node(0, None, "value", "a"), Node(1, "b", "value", "b")],
        [Node(0, None, "dict"), Node(-1, "a", "value", "a")],
        [Node(i, "a", "dict") for i in range(MAX_DEPTH + 3)],
    ],
)
def test_a_list_of_nodes_that_is_no_tree_is_refused(nodes):
    with pytest.raises(ValueError):
        grow(nodes)


# ---- merging


@examples(100)
@given(st.dictionaries(KEYS, states(), max_size=4), st.data())
def test_the_trees_of_ranks_that_hold_parts_of_a_state_merge_to_the_whole(state, data):
    flat = flatten(state, RULES)
    assume(len({show_path(path) for path in flat.paths.values()}) == len(marks(state)))
    owners = {key: data.draw(st.sets(st.integers(0, 2), min_size=1)) for key in state}
    parts = [{key: state[key] for key in state if rank in owners[key]} for rank in range(3)]
    merged = merge([flatten(part, RULES).nodes for part in parts])
    whole = build(grow(merged), lambda name: CODEC.decode(name, "key"), lambda node, path: flat.leaves[node.key])
    assert same({key: whole[key] for key in state}, state)
    assert len(whole) == len(state)


@examples(50)
@given(states())
def test_equal_trees_merge_to_themselves(state):
    nodes = flatten(state, RULES).nodes
    assert merge([nodes, nodes, nodes]) == nodes


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"a": {"b": Mark(0)}}, {"a": {"b": {}}}),
        ({"a": {"b": Mark(0)}}, {"a": {"b": Mark(0, "tensor")}}),
        ({"a": {"b": []}}, {"a": {"b": ()}}),
        ({"a": {"b": [Mark(0)]}}, {"a": {"b": [Mark(0), Mark(1)]}}),
        ({"a": {"b": {}}}, {"a": {"b": OrderedDict()}}),
    ],
)
def test_trees_of_different_kind_or_length_do_not_merge(one, two):
    with pytest.raises(ValueError, match=r"a\.b"):
        merge([flatten(one, RULES).nodes, flatten(two, RULES).nodes])
