"""Which objects of a state are leaves, and of which kind. Pure."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from milepost.core.limits import MAX_DEPTH
from milepost.core.tree import Leaf, TooDeep


@dataclass(frozen=True, slots=True)
class LeafRule:
    """Tells leaves from containers. A list, tuple or Counter that holds nothing special is one value.

    The keys of a Counter are what was counted: they come and go, and a load does not compare them.


    `special`: the kind of what is stored apart from plain values (a tensor, a rank-private value), or None.
    `opens`: whether an object gives a state dict, which stands for it.
    """

    special: Callable[[Any], Leaf | None]
    opens: Callable[[Any], bool] = lambda _value: False

    def kind(self, value: Any) -> Leaf | None:
        """What kind of leaf this is, or None for a container. Raises TooDeep for a list that contains itself."""
        kind = self.special(value)
        if kind is not None:
            return kind
        if isinstance(value, (list, tuple, Counter)):
            return None if self._holds_special(value, 0) else "value"
        return None if isinstance(value, Mapping) or self.opens(value) else "value"

    def _holds_special(self, value: Any, depth: int) -> bool:
        if depth > MAX_DEPTH:
            raise TooDeep(f"a list is nested more than {MAX_DEPTH} levels deep; does it contain itself?")
        if self.special(value) is not None or self.opens(value):
            return True
        if isinstance(value, Mapping):
            return any(self._holds_special(item, depth + 1) for item in value.values())
        return isinstance(value, (list, tuple)) and any(self._holds_special(item, depth + 1) for item in value)
