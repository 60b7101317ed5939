"""Saved optimizers, in each of the forms that are keyed by the names of parameters.

Ours is described in `state/optimizers.py`. The others are those of torch: `get_optimizer_state_dict` gives a state
keyed by names and a list of groups, or with `flatten_optimizer_state_dict` one flat dict with keys such as
`state.0.weight.exp_avg` and `param_groups.0.weight.lr`. Torch names a parameter by its place in its module.
"""

import reprlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from msgspec.structs import replace

from milepost.core.tree import LEAVES, Branch, Node, Path, is_dict, show_path
from milepost.errors import CheckpointError
from milepost.loading.saved_tree import leaves_of, name_of
from milepost.state.optimizers import Member, options_of
from milepost.state.values import Codec

_SCHEDULED = {"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}
"""The options that schedulers of torch add to groups."""
_STATE, _GROUPS = "state", "param_groups"


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A group of a saved optimizer: the branches of its options, and for each name that it holds a leaf that says so.

    `given`: options that stand in one value with those of all groups.
    """

    options: Mapping[str, Branch]
    members: Mapping[Hashable, Node]
    given: Mapping[str, Any] = field(default_factory=dict)

    def option_names(self) -> set[str]:
        """The names of all its options."""
        return {*self.options, *self.given}


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """A saved optimizer that is keyed by name. `first`: the name under which the state of each name stands.

    `holders`: the groups that hold each name; several, where ranks hold different parts of one group. `short`: whether
    names are those within a module, as torch gives them.
    """

    path: Path
    state: Mapping[Hashable, Branch]
    groups: Mapping[Hashable, SavedGroup]
    first: Mapping[Hashable, Hashable]
    holders: Mapping[Hashable, Sequence[Hashable]]
    others: Mapping[Hashable, Branch]
    short: bool = False

    def names_of(self, member: Member, path: Path) -> tuple[Hashable, ...]:
        """Which names of a parameter of the optimizer at `path` it holds."""
        names: tuple[Hashable, ...] = member.names
        if self.short:
            names = member.short if self.path == path else member.unique
        if not member.names and self.path == path:
            names = (member.id,)
        return tuple(name for name in names if name in self.first)


@dataclass(frozen=True, slots=True)
class Home:
    """Where a parameter was saved: the optimizer, and those of the parameter's names that it holds."""

    saved: SavedOptimizer
    names: tuple[Hashable, ...]

    @property
    def states(self) -> tuple[Hashable, ...]:
        """The names under which its state stands. Several for a tied parameter that was not tied when it was saved."""
        return tuple(dict.fromkeys(self.saved.first[name] for name in self.names))


class SavedOptimizers:
    """The optimizers of a checkpoint that are keyed by name. `values`: the encoded values of its manifest."""

    def __init__(self, root: Branch, codec: Codec, values: Mapping[str, Any]) -> None:
        self._codec, self._values = codec, values
        self.found = list(self._find(root, ()))

    def at(self, path: Path) -> SavedOptimizer | None:
        """The one that was saved at `path`."""
        return next((saved for saved in self.found if saved.path == path), None)

    def _find(self, branch: Branch, path: Path) -> Iterator[SavedOptimizer]:
        saved = self._nested(branch, path) or self._flat(branch, path)
        if saved is not None:
            yield saved
            return
        for i, child in enumerate(branch.children):
            if child.node.kind not in LEAVES and child.children:
                yield from self._find(child, (*path, name_of(branch, i, self._codec)))

    def _nested(self, branch: Branch, path: Path) -> SavedOptimizer | None:
        names = {child.node.name for child in branch.children if isinstance(child.node.name, str)}
        if not is_dict(branch.node.kind) or not {_STATE, _GROUPS} <= names:
            return None
        parts = self._children(branch)
        if not is_dict(parts[_STATE].node.kind):
            return None
        listed = parts[_GROUPS]
        groups = self._own_groups(listed) if is_dict(listed.node.kind) else self._torch_groups(listed)
        others = {name: child for name, child in parts.items() if name not in (_STATE, _GROUPS)}
        return self._made(path, self._children(parts[_STATE]), groups, others, not is_dict(listed.node.kind))

    def _made(
        self,
        path: Path,
        state: Mapping[Hashable, Branch],
        groups: Mapping[Hashable, SavedGroup] | None,
        others: Mapping[Hashable, Branch],
        short: bool,
    ) -> SavedOptimizer | None:
        if groups is None:
            return None
        first: dict[Hashable, Hashable] = {}
        holders: dict[Hashable, list[Hashable]] = {}
        for key, group in groups.items():
            for name, node in group.members.items():
                same = None if short else self._value(node)
                first[name] = same if isinstance(same, str) else name
                holders.setdefault(name, []).append(key)
        if not first and (short or not groups):
            return None
        return SavedOptimizer(path, state, groups, first, holders, others, short)

    def _own_groups(self, branch: Branch) -> dict[Hashable, SavedGroup] | None:
        groups: dict[Hashable, SavedGroup] = {}
        for key, group in self._children(branch).items():
            options = self._children(group) if is_dict(group.node.kind) else {}
            held = options.pop("params", None)
            if held is None or not is_dict(held.node.kind):
                return None
            members = {name: child.node for name, child in self._children(held).items()}
            groups[key] = SavedGroup({str(name): option for name, option in options.items()}, members)
        return groups

    def _torch_groups(self, branch: Branch) -> dict[Hashable, SavedGroup] | None:
        """Groups as torch lists them, if they hold names: in one value, or in a list of dicts."""
        groups: dict[Hashable, SavedGroup] = {}
        if branch.node.kind == "value":
            value = self._value(branch.node)
            for number, group in enumerate(value if isinstance(value, list) else ()):
                held = group.get("params") if isinstance(group, dict) else None
                if not _are_names(held):
                    return None
                groups[number] = SavedGroup({}, dict.fromkeys(held, branch.node), options_of(group))
        for number, listed in enumerate(branch.children if branch.node.kind == "list" else ()):
            options = self._children(listed) if is_dict(listed.node.kind) else {}
            params = options.pop("params", None)
            options.pop("param_names", None)
            held = self._value(params.node) if params is not None else None
            if params is None or not _are_names(held):
                return None
            named = {str(name): option for name, option in options.items()}
            groups[number] = SavedGroup(named, dict.fromkeys(held, params.node))
        return groups

    def _flat(self, branch: Branch, path: Path) -> SavedOptimizer | None:
        """One flat dict as torch makes it: each parameter is a group of its own."""
        found: dict[str, dict[str, dict[str, Branch]]] = {_STATE: {}, _GROUPS: {}}
        for child in branch.children if is_dict(branch.node.kind) else ():
            part, _, rest = str(child.node.name).partition(".")
            name, _, last = rest.rpartition(".")
            if part not in found or not name:
                return None
            found[part].setdefault(name, {})[last] = child
        groups: dict[Hashable, SavedGroup] = {
            name: SavedGroup(options, {name: next(iter(options.values())).node})
            for name, options in found[_GROUPS].items()
        }
        above = Node(branch.node.depth + 1, None, "dict")
        state: dict[Hashable, Branch] = {
            name: Branch(
                above, [Branch(replace(inner.node, name=last), inner.children) for last, inner in kept.items()]
            )
            for name, kept in found[_STATE].items()
        }
        return self._made(path, state, groups, {}, short=True)

    def _children(self, branch: Branch) -> dict[Hashable, Branch]:
        return {name_of(branch, i, self._codec): child for i, child in enumerate(branch.children)}

    def _value(self, node: Node) -> Any:
        """A saved value. None for one that cannot be read: the load may not want it, and says why if it does."""
        try:
            return self._codec.decode(self._values[node.key], node.key) if node.key in self._values else None
        except (ValueError, CheckpointError):
            return None

    def home_of(self, member: Member, path: Path, group: Mapping[str, Any]) -> Home | str:
        """Where a parameter of the optimizer at `path` was saved, or why nowhere. `group`: its group of the target."""
        held = [Home(saved, names) for saved in self.found if (names := saved.names_of(member, path))]
        held = [home for home in held if home.saved.path == path] or held
        if not held:
            return "no saved optimizer holds this parameter"
        if len(held) > 1:
            listed = ", ".join(repr(show_path(home.saved.path)) for home in held)
            return f"several saved optimizers hold it ({listed}); give this one the key of one of them"
        saved = held[0].saved
        for key in saved.holders[held[0].names[0]]:
            odd = saved.groups[key].option_names() - group.keys() - _SCHEDULED
            lacks = group.keys() - saved.groups[key].option_names() - _SCHEDULED
            if odd and lacks:
                return (
                    f"{show_path(saved.path)!r} holds it, an optimizer of another kind: it has the options "
                    f"{', '.join(sorted(odd))} and not {', '.join(sorted(lacks))}"
                )
        return held[0]

    def fingerprint(self, group: SavedGroup, name: str) -> Any:
        """What can be told of a saved option without reading it: its plain values. None where it has no such option."""
        if name in group.given:
            return [group.given[name]]
        if name not in group.options:
            return None
        return [self._values.get(node.key) for node in leaves_of(group.options[name])]

    def shown(self, group: SavedGroup, name: str) -> str:
        """A saved option as people read it."""
        if name in group.given:
            return reprlib.repr(group.given[name])
        node = group.options[name].node
        return reprlib.repr(self._value(node)) if node.key in self._values else "another value"


def _are_names(held: Any) -> TypeGuard[list[str]]:
    return isinstance(held, list) and all(isinstance(name, str) for name in held)
