"""Optimizers of a target, matched with saved ones by the names of their parameters.

Each parameter gets the state that was saved under its name, wherever it stood: in another order, in another group, in
another optimizer. Each group gets the options on which the saved groups of its parameters agree.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from milepost.core.tree import Branch, Node, Parts, Path, build, show_path
from milepost.errors import StateMismatch
from milepost.loading.saved_optimizers import Home, SavedGroup, SavedOptimizer, SavedOptimizers
from milepost.loading.saved_tree import lookup
from milepost.state.optimizers import Member, NamedOptimizer, group_key, options_of
from milepost.state.values import Codec

MakeLeaf = Callable[[Node, Any, Any], Any]
"""What a target gets for a saved leaf: `make(node, existing, like)`."""
Compose = Callable[[Parts, Any], Parts]


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """How a filled tree becomes the state dict of an optimizer.

    `states`: the names in the tree of the members that were saved, by id. `sources`: for each group the keys in the
    tree of the groups that give it its options, and `given` what these have beside the tree. `kept`: the members of
    which nothing was saved. `extra`: the keys of state that belongs to no parameter. `changed`: the members whose
    parameter has another type than it was saved with.
    """

    named: NamedOptimizer
    path: Path
    states: Mapping[Hashable, Hashable]
    sources: tuple[tuple[Hashable, ...], ...]
    kept: frozenset[Hashable]
    extra: tuple[Hashable, ...]
    given: Mapping[Hashable, Mapping[str, Any]]
    changed: frozenset[Hashable] = frozenset()

    def with_changed(self, keys: AbstractSet[str]) -> "OptimizerPlan":
        """The plan, with the keys of all tensors whose type has changed."""
        members = (member for group in self.named.groups for member in group)
        return replace(self, changed=frozenset(member.id for member in members if not keys.isdisjoint(member.names)))

    def load(self, tree: Mapping[str, Any]) -> None:
        """Give the optimizer what the tree holds for its parameters. What was not saved stays as it is."""
        own, there = self.named.state_dict, tree["state"]
        state = {key: there[name] for key, name in self.states.items() if name in there}
        state.update((key, own["state"][key]) for key in self.kept if key in own["state"])
        state.update((key, there[key]) for key in self.extra)
        groups = []
        for group, sources in zip(own["param_groups"], self.sources, strict=True):
            found = [{**options_of(tree["param_groups"][key]), **self.given[key]} for key in sources]
            groups.append({**group, **_agreed(found, show_path(self.path))})
        with torch.inference_mode(mode=False):  # what it makes of the state must be fit for training
            self.named.feed({**own, **tree, "state": state, "param_groups": groups}, self.changed)


def _agreed(found: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """The options that have one value in all of these groups. The report told of plain values that differ."""
    options: dict[str, list[Any]] = {}
    for group in found:
        for name, value in group.items():
            options.setdefault(name, []).append(value)
    for name, values in options.items():
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if any(not torch.equal(tensor, tensors[0]) for tensor in tensors[1:]):
            raise StateMismatch(
                f"{where}: the option {name!r} is a tensor that differs between groups which are one here. Make the "
                "groups as they were when it was saved."
            )
    return {name: values[0] for name, values in options.items() if all(_equal(value, values[0]) for value in values)}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(one) is type(other) and torch.equal(one, other)
    return bool(one == other)


@dataclass(slots=True)
class OptimizerMatch:
    """One optimizer of a target, matched: the tree that stands for it, and where its leaves were saved.

    `redirected`: the saved key of each leaf, by its path. `missing`: keys of what was not saved, with the reason.
    `problem`: why it cannot be loaded at all.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    redirected: dict[Path, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    plan: OptimizerPlan | None = None


class OptimizerMatcher:
    """Matches one optimizer of a target, at `path`, with those of a checkpoint."""

    def __init__(
        self, saved: SavedOptimizers, codec: Codec, named: NamedOptimizer, path: Path, make: MakeLeaf, compose: Compose
    ) -> None:
        self._saved, self._codec, self._named, self._path = saved, codec, named, path
        self._make, self._compose = make, compose
        self._current = named.named()
        self._keys: dict[tuple[Path, Hashable], Hashable] = {}
        self._given: dict[Hashable, Mapping[str, Any]] = {}
        self._marked: set[str] = set()
        self._found = OptimizerMatch({"state": {}, "param_groups": {}})

    def match(self) -> OptimizerMatch:
        """The tree of what this optimizer gets, as it was saved, around the tensors that it has."""
        states: dict[Hashable, Hashable] = {}
        kept: set[Hashable] = set()
        sources: list[tuple[Hashable, ...]] = []
        groups = self._named.state_dict["param_groups"]
        for number, (group, members) in enumerate(zip(groups, self._named.groups, strict=True)):
            homes: list[Home] = []
            for member in members:
                home = self._saved.home_of(member, self._path, options_of(group))
                if isinstance(home, str):
                    self._found.missing[self._key("state", member.name)] = home
                    kept.add(member.id)
                else:
                    homes.append(home)
                    states[member.id] = member.name
                    self._open_state(member, home)
            key = group_key(members, number)
            sources.append(
                self._open_groups(homes, options_of(group), key) if members else self._open_empty(key, group)
            )
            self._check_order(homes, members)
        extra = self._open_rest()
        plan = OptimizerPlan(self._named, self._path, states, tuple(sources), frozenset(kept), extra, self._given)
        self._found.plan = plan if states or any(sources) else None
        return self._found

    def _key(self, *steps: Hashable) -> str:
        return show_path((*self._path, *steps))

    def _build(self, branch: Branch, at: tuple[Hashable, ...], like: Any = None, existing: Any = None) -> Any:
        """What the target gets for a saved branch, at this path of its tree."""
        path = (*self._path, *at)

        def leaf(node: Node, inner: Path) -> Any:
            self._found.redirected[inner] = node.key
            return self._make(node, lookup(existing, inner[len(path) :]), like)

        def compose(parts: Parts, inner: Path) -> Parts:
            return self._compose(parts, lookup(existing, inner[len(path) :]))

        return build(branch, lambda name: self._codec.decode(name, show_path(path)), leaf, path, compose)

    def _open_state(self, member: Member, home: Home) -> None:
        """The state of a parameter. Of a tied one each that was saved is read into the same tensors, and compared."""
        existing = self._current["state"].get(member.name)
        for i, first in enumerate(home.states):
            branch = home.saved.state.get(first)
            if branch is None:
                continue
            name = member.name if i == 0 else first
            built = self._build(branch, ("state", name), self._named.like(member.id), existing)
            self._found.tree["state"][name] = built
            existing = built if i == 0 else existing

    def _open_groups(self, homes: Sequence[Home], own: Mapping[str, Any], key: Hashable) -> tuple[Hashable, ...]:
        """The saved groups of a group's parameters. Gives their keys in the tree."""
        sources: dict[Hashable, SavedGroup] = {}
        for home in homes:
            for name in home.names:
                for saved_key in home.saved.holders[name]:
                    at = self._group(home.saved, saved_key, own)
                    sources[at] = home.saved.groups[saved_key]
                    self._mark(at, name, sources[at].members[name])
        self._compare_options(sources, key)
        return tuple(sources)

    def _mark(self, at: Hashable, name: Hashable, node: Node) -> None:
        """Want the leaf that says that a saved group holds a name. Torch has one leaf for all names of a group."""
        if node.key not in self._marked:
            self._marked.add(node.key)
            self._found.tree["param_groups"][at]["params"][name] = self._make(node, None, None)
            self._found.redirected[(*self._path, "param_groups", at, "params", name)] = node.key

    def _open_empty(self, number: Hashable, own: Mapping[str, Any]) -> tuple[Hashable, ...]:
        """The saved group without parameters that has the number of one of the target."""
        for saved in self._saved.found:
            if saved.path == self._path and number in saved.groups and not saved.groups[number].members:
                return (self._group(saved, number, own),)
        return ()

    def _group(self, saved: SavedOptimizer, key: Hashable, own: Mapping[str, Any]) -> Hashable:
        """The key in the tree of a saved group, which is opened when it is first met."""
        groups = self._found.tree["param_groups"]
        if (saved.path, key) not in self._keys:
            at = key if key not in groups else f"{show_path(saved.path)}: {key}"
            self._keys[saved.path, key] = at
            self._given[at] = saved.groups[key].given
            groups[at] = {
                name: self._build(branch, ("param_groups", at, name), like=own.get(name))
                for name, branch in saved.groups[key].options.items()
            }
            groups[at]["params"] = {}
        return self._keys[saved.path, key]

    def _compare_options(self, sources: Mapping[Hashable, SavedGroup], key: Hashable) -> None:
        """Note the options that differ between saved groups which are one group of the target."""
        names = sorted(set().union(*(group.option_names() for group in sources.values())))
        for name in names:
            prints = {at: self._saved.fingerprint(group, name) for at, group in sources.items()}
            having = [at for at, value in prints.items() if value is not None]
            other = next((at for at in having if prints[at] != prints[having[0]]), None)
            if other is not None:
                both = (having[0], other)
                values = [f"{self._saved.shown(sources[at], name)} in the group of {at!r}" for at in both]
                self._found.missing[self._key("param_groups", key, name)] = (
                    f"saved as {' and '.join(values)}, which are one group here"
                )

    def _check_order(self, homes: Sequence[Home], members: Sequence[Member]) -> None:
        """Refuse another order for an optimizer that keeps one vector for all parameters together."""
        if not homes or not isinstance(self._named.optimizer, torch.optim.LBFGS):
            return
        held = [first for group in homes[0].saved.groups.values() for first in group.members]
        firsts = list(dict.fromkeys(homes[0].saved.first[name] for name in held))
        if len(homes) != len(members) or [home.states[0] for home in homes] != firsts:
            self._found.problem = (
                "LBFGS keeps one vector for all its parameters, so it needs the parameters that were saved, in the "
                f"same order: {', '.join(map(str, firsts[:10]))}{' ...' if len(firsts) > 10 else ''}"
            )

    def _open_rest(self) -> tuple[Hashable, ...]:
        """What the saved optimizer of the same key holds beside its parameters. Gives the keys of state without one."""
        saved = self._saved.at(self._path)
        if saved is None:
            return ()
        for name, branch in saved.others.items():
            self._found.tree[str(name)] = self._build(branch, (name,), existing=self._current.get(str(name)))
        for key, group in saved.groups.items():
            if not group.members:  # of a rank whose group was empty: it holds nothing that a target could lack
                self._group(saved, key, {})
        extra = tuple(key for key in saved.state if key not in saved.first)
        for key in extra:
            self._found.tree["state"][key] = self._build(saved.state[key], ("state", key))
        return extra
