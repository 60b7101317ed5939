"""Which objects of a state are leaves."""

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest

from milepost.core.leaves import LeafRule
from milepost.core.tree import TooDeep


class Point(NamedTuple):
    x: Any
    y: Any


RULE = LeafRule(lambda value: "tensor" if isinstance(value, complex) else None, lambda value: isinstance(value, set))
"""Complex numbers stand for tensors, and sets for stateful objects."""


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1j, "tensor"),
        (1, "value"),
        (None, "value"),
        ([], "value"),
        ((1, [2, {"a": 3}]), "value"),
        ({}, None),
        (OrderedDict(a=1), None),
        (set(), None),
        ([1, 1j], None),
        ((1, [{"a": [1j]}]), None),
        ([1, {2}], None),
        (Point(1, 2), "value"),
        (Point(1, 1j), None),
    ],
)
def test_kind_of_leaf(value, kind):
    assert RULE.kind(value) == kind


def test_list_that_contains_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(TooDeep, match="does it contain itself"):
        RULE.kind(value)
