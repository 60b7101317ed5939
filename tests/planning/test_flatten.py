"""Flat and nested states: torch's layout as the oracle, and what we do beyond it."""

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import _nested_dict as torch_nested
from torch.distributed.checkpoint import _traverse as torch_traverse

from milepost.planning.flatten import (
    flatten_state_dict,
    get_element,
    set_element,
    traverse_state_dict,
    unflatten_state_dict,
)
from milepost.state.tensors import Sharded
from tests.strategies import examples


class Pair(NamedTuple):
    left: Any
    right: Any


TENSORS = [torch.full((2,), float(i)) for i in range(5)]
NAMES = st.sampled_from(["a", "b", "c", "layer.0", "x"])
LEAVES = st.sampled_from([*TENSORS, 1, 2.5, "text", None, True, b"raw"])


def states(tuples=False):
    def containers(inner):
        kinds = [
            st.lists(inner, max_size=3),
            st.dictionaries(NAMES, inner, max_size=3),
            st.dictionaries(st.integers(0, 3), inner, max_size=3),
        ]
        return st.one_of(*kinds, *([st.lists(inner, max_size=3).map(tuple)] if tuples else []))

    return st.dictionaries(NAMES, st.recursive(LEAVES, containers, max_leaves=12), max_size=4)


def visits(traverse, state, **options):
    seen = []
    traverse(state, lambda path, value: seen.append((path, value)), **options)
    return [(path, id(value) if isinstance(value, torch.Tensor) else repr(value)) for path, value in seen]


def same(one, other):
    """Equal, of the same types all the way down, with the same tensors."""
    if isinstance(one, torch.Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@examples(300)
@given(states())
def test_states_without_tuples_are_walked_as_torch_does(state):
    assert visits(traverse_state_dict, state) == visits(torch_traverse.traverse_state_dict, state)


@examples(200)
@given(states(tuples=True))
def test_the_layouts_of_older_torch_are_walked_as_it_did(state):
    assert visits(traverse_state_dict, state, era="2.4") == visits(torch_traverse.traverse_state_dict, state)
    assert visits(traverse_state_dict, state, era="2.3") == visits(torch_traverse.traverse_state_dict_v_2_3, state)


@examples(200)
@given(states())
def test_flat_and_nested_again_are_what_torch_makes_of_them(state):
    try:
        expected, paths = torch_nested.flatten_state_dict(state)
    except ValueError:
        with pytest.raises(ValueError, match="duplicated flatten key"):
            flatten_state_dict(state)
        return
    flat, mapping = flatten_state_dict(state)
    assert same(flat, expected)
    assert mapping == paths
    assert same(unflatten_state_dict(flat, mapping), torch_nested.unflatten_state_dict(expected, paths))


@examples(300)
@given(states(tuples=True), st.sampled_from(["now", "2.4", "2.3"]))
def test_values_set_by_path_keep_their_place_and_key_type(state, era):
    try:
        flat, mapping = flatten_state_dict(state, era)
    except ValueError:
        return
    marked = {key: ("new", key) for key in flat}
    filled = _copied(state)
    for key, path in mapping.items():
        set_element(filled, path, marked[key])
        assert get_element(filled, path) == marked[key]
    again = [value for value in _leaves(filled) if isinstance(value, tuple) and value[:1] == ("new",)]
    assert sorted(again) == sorted(marked.values())
    for key, path in mapping.items():
        set_element(filled, path, flat[key])
    assert same(filled, state)


def _copied(value):
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return type(value)(map(_copied, value)) if isinstance(value, (list, tuple)) else value


def _leaves(value):
    if isinstance(value, dict):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, (list, tuple)) and value[:1] != ("new",):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def test_int_keys_keep_their_values_under_int_keys():
    state = {"optim": {"state": {0: {"step": 1}, 10: {"step": 2}}}, -1: "x", (1, 2): "y"}
    flat, mapping = flatten_state_dict(state)
    assert list(flat) == ["optim.state.0.step", "optim.state.10.step", "-1", "(1, 2)"]
    for key, path in mapping.items():
        set_element(state, path, f"new {key}")
    assert state == {
        "optim": {"state": {0: {"step": "new optim.state.0.step"}, 10: {"step": "new optim.state.10.step"}}},
        -1: "new -1",
        (1, 2): "new (1, 2)",
    }


def test_tuples_with_tensors_are_opened_today_and_closed_in_torchs_layouts():
    state = {"a": (TENSORS[0], (TENSORS[1], 3)), "b": (1, 2), "c": [({"d": 1},)], "e": Pair(TENSORS[2], 5)}
    flat, _ = flatten_state_dict(state)
    assert list(flat) == ["a.0", "a.1.0", "a.1.1", "b", "c.0.0.d", "e.0", "e.1"]
    for era in ("2.4", "2.3"):
        assert list(flatten_state_dict(state, era)[0]) == ["a", "b", "c", "e"]


def test_arrays_and_sharded_tensors_open_what_they_stand_in():
    state = {"a": [np.zeros(2)], "b": (Sharded((2,), {(0,): TENSORS[0]}),), "c": [1]}
    assert list(flatten_state_dict(state)[0]) == ["a.0", "b.0", "c"]
    assert list(flatten_state_dict(state, "2.4")[0]) == ["a", "b", "c"]


def test_tuples_on_the_way_are_replaced_by_tuples_of_their_kind():
    state = {"a": (1, [2, (3, 4)]), "p": Pair(1, {"x": 2})}
    inner = state["a"][1]
    set_element(state, ("a", 1, 1, 0), "new")
    set_element(state, ("p", 1, "x"), "new")
    assert state == {"a": (1, [2, ("new", 4)]), "p": Pair(1, {"x": "new"})}
    assert type(state["p"]) is Pair
    assert state["a"][1] is inner


def test_equal_spellings_are_refused_with_both_paths():
    with pytest.raises(ValueError, match=r"duplicated flatten key a\.b: \('a', 'b'\) and \('a\.b',\)"):
        flatten_state_dict({"a": {"b": 1}, "a.b": 2})
    with pytest.raises(ValueError, match="duplicated flatten key 0"):
        flatten_state_dict({0: 1, "0": 2})


def test_other_mappings_are_entered_and_filled():
    state = OrderedDict(a=OrderedDict(b=1))
    flat, mapping = flatten_state_dict(state)
    set_element(state, mapping["a.b"], 2)
    assert flat == {"a.b": 1}
    assert state == OrderedDict(a=OrderedDict(b=2))


@pytest.mark.parametrize("path", [("a", "b"), ("a", 0), ("l", "b"), ("l", -1), ("l", 2**40), ("t", "b"), ("w", "b")])
def test_path_through_a_leaf_is_refused_and_changes_nothing(path):
    state = {"a": 5, "l": [1], "t": (1,), "w": TENSORS[0]}
    with pytest.raises(KeyError):
        set_element(state, path, "new")
    assert state == {"a": 5, "l": [1], "t": (1,), "w": TENSORS[0]}


def test_what_is_not_there_is_the_default():
    state = {"a": [1, {"b": (2,)}], 3: "three"}
    assert get_element(state, ("a", 1, "b", 0)) == 2
    assert get_element(state, ("3",)) == "three"
    for path in [("a", 2), ("a", -1), ("a", "x"), ("b",), ("a", 0, "x"), ("a", 1, "b", 1)]:
        assert get_element(state, path, "default") == "default"


def test_setting_the_values_of_many_int_keys_takes_linear_time():
    looked = 0

    class Number(int):
        def __str__(self):
            nonlocal looked
            looked += 1
            return int.__repr__(self)

    state = {"state": {Number(i): i for i in range(2000)}}
    _, mapping = flatten_state_dict(state)
    looked = 0
    for path in mapping.values():
        set_element(state, path, -1)
    assert looked < 10_000
    assert set(state["state"].values()) == {-1}
