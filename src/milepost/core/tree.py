"""Trees: a nested state as a flat list of nodes and a dict of leaves, and back. Pure.

The nodes stand in preorder, each with its depth, so the list needs no recursion to read and keeps the order of keys.
A leaf's key is its path joined by dots. Where two paths of one state would give the same key, both are written exactly.
"""

from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from milepost.core.hash_flood import differing
from milepost.core.limits import MAX_DEPTH
from milepost.core.versions import Versions, set_versions, versions_of

Path = tuple[Hashable, ...]
Leaf = Literal["tensor", "value", "per_rank"]
LEAVES = ("tensor", "value", "per_rank")
FACTORIES: dict[str, Callable[[], object] | None] = {
    "None": None,
    "dict": dict,
    "list": list,
    "set": set,
    "int": int,
    "float": float,
    "str": str,
    "tuple": tuple,
    "bool": bool,
    "bytes": bytes,
    "complex": complex,
    "frozenset": frozenset,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
}
"""What a defaultdict may make, by name. A factory of any other kind is code, and is neither saved nor run."""
DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
"""The types of dict that come back as what they were; `defaultdict:<factory>` is the fourth."""


COMPOSITES = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "quantized", "jagged", "subclass")
"""The kinds of tensors that are saved as their parts."""


class Parts(dict[str, Any]):
    """The parts of a tensor that is made of other tensors, by name. `like`: such a tensor of a target, or None."""

    def __init__(self, kind: str, parts: Mapping[str, Any] | None = None, like: Any = None) -> None:
        super().__init__(parts or {})
        self.kind, self.like = kind, like


class Node(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One container or leaf. `name`: its encoded key in its parent; `kind`: of container or leaf; `key`: of a leaf.

    `versions`: of the modules whose state dict this is, where it is one.
    """

    depth: int
    name: Any
    kind: str
    key: str = ""
    versions: Versions | None = None


@dataclass(frozen=True, slots=True)
class Flat:
    """A state taken apart: its nodes, and its leaves by key with their paths."""

    nodes: tuple[Node, ...]
    leaves: dict[str, Any]
    paths: dict[str, Path]
    kinds: dict[str, Leaf]


@dataclass(frozen=True, slots=True)
class Rules:
    """What the caller knows and the tree does not.

    `leaf` gives the kind of leaf that an object is, or None for a container; `encode` encodes a dict's key for the
    manifest; `open` gives the tree that stands for an object (a module's state dict), or None.
    """

    leaf: Callable[[Any], Leaf | None]
    encode: Callable[[Any, str], Any]
    open: Callable[[Any, Path], Any]


class TooDeep(ValueError):
    """The state is nested deeper than the limit, or contains itself."""


class UnknownContainer(ValueError):
    """A container of a type that would not come back the same."""


def flatten(state: Any, rules: Rules) -> Flat:
    """Take `state` apart. Raises TooDeep for a state that contains itself, and UnknownContainer."""
    found: list[_Found] = []
    _walk(state, rules, (), None, found)
    keys = iter(_keys([path for path, _, kind, _ in found if kind in LEAVES]))
    nodes, leaves, paths, kinds = [], {}, {}, {}
    for path, name, kind, value in found:
        if kind in LEAVES:
            key = next(keys)
            nodes.append(Node(len(path), name, kind, key))
            leaves[key], paths[key], kinds[key] = value, path, kind
        else:
            nodes.append(Node(len(path), name, kind, "", value))
    return Flat(tuple(nodes), leaves, paths, kinds)  # type: ignore[arg-type]  # kinds holds only LEAVES


_Found = tuple[Path, Any, str, Any]
"""A path, its encoded name, its kind, and a leaf's object or a container's versions of modules."""


def _walk(value: Any, rules: Rules, path: Path, name: Any, found: list[_Found]) -> None:
    if len(path) > MAX_DEPTH:
        raise TooDeep(f"{show_path(path)!r} lies more than {MAX_DEPTH} levels deep; does the state contain itself?")
    kind = rules.leaf(value)
    if kind is not None:
        found.append((path, name, kind, value))
        return
    opened = rules.open(value, path)
    if opened is not None:
        value = opened
    found.append((path, name, container_kind(value, path), _versions(value, path)))
    for key, child in children(value):
        inner = (*path, key)
        _walk(child, rules, inner, _spelled(value, key, inner, rules), found)


def _versions(value: Any, path: Path) -> Versions | None:
    try:
        return versions_of(value)
    except ValueError as error:
        raise UnknownContainer(f"{show_path(path)!r} is a state dict in which {error}") from None


def _spelled(container: Any, key: Any, path: Path, rules: Rules) -> Any:
    """A child's name in the manifest: encoded for a dict, unchanged for a namedtuple, None for the rest."""
    if isinstance(container, Mapping):
        plain = type(key) is str and key.isascii()
        return key if plain else rules.encode(key, show_path(path))
    return key if is_namedtuple(container) else None


def container_kind(value: Any, path: Path = ()) -> str:
    """The manifest's word for a container. Raises UnknownContainer for a type that would not come back the same."""
    kind = type(value)
    if kind in (list, tuple) or kind in DICTS.values():
        return str(kind.__name__)
    if kind is defaultdict:
        factory = factory_name(value)
        if factory is not None:
            return f"defaultdict:{factory}"
        raise UnknownContainer(f"{show_path(path)!r} is a defaultdict with a factory of its own")
    if is_namedtuple(value):
        return f"namedtuple:{kind.__name__}"
    if kind is Parts:
        return f"composite:{value.kind}"
    raise UnknownContainer(f"{show_path(path)!r} is a {kind.__module__}.{kind.__qualname__}")


def is_dict(kind: str) -> bool:
    """Whether a node of this kind has named children: it is a dict of some type."""
    return kind.partition(":")[0] in (*DICTS, "defaultdict", "composite")


def factory_name(value: defaultdict[Any, Any]) -> str | None:
    """The name of a defaultdict's factory, or None for one that is not of `FACTORIES`."""
    return next((name for name, factory in FACTORIES.items() if value.default_factory is factory), None)


def is_namedtuple(value: Any) -> bool:
    """Whether `value` is an instance of a namedtuple class."""
    return isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_make")


def children(value: Any) -> Iterable[tuple[Hashable, Any]]:
    """A container's children with their keys (indices for sequences, field names for namedtuples)."""
    if isinstance(value, Mapping):
        return value.items()
    if is_namedtuple(value):
        return zip(value._fields, value, strict=True)
    return enumerate(value)


def show_path(path: Path) -> str:
    """A path as people read it."""
    return _printable(".".join(map(str, path)))


def _printable(text: str) -> str:
    """The text with lone surrogates, which no file can carry, spelled out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


_ESCAPES = str.maketrans({"\\": "\\\\", ".": "\\.", "<": "\\<"})


def exact_path(path: Path) -> str:
    """A path in a form that no other path has: dots inside a part are escaped, other types are named."""
    parts = []
    for part in path:
        if isinstance(part, str):
            parts.append(part.translate(_ESCAPES))
        else:
            parts.append(f"<{type(part).__name__} {part!r}>")
    return _printable(".".join(parts))


def _keys(paths: list[Path]) -> list[str]:
    """A key for each path, all different: plain where that is unambiguous, else exact."""
    plain = [show_path(path) for path in paths]
    counts = Counter(plain)
    keys = [text if counts[text] == 1 else exact_path(path) for path, text in zip(paths, plain, strict=True)]
    if len(set(keys)) != len(keys):
        keys = [exact_path(path) for path in paths]
    if len(set(keys)) != len(keys):
        twice = next(key for key, count in Counter(keys).items() if count > 1)
        raise UnknownContainer(f"{twice!r} stands for two keys that read the same; one of them")
    return keys


def nodes_of(
    paths: Mapping[str, tuple[str | int, ...]],
    kinds: Mapping[str, Leaf],
    versions: Mapping[Path, Versions] = MappingProxyType({}),
) -> tuple[Node, ...]:
    """The tree whose leaves stand at these paths: a dict below names, a list below numbers that leave none out.

    `versions`: of the state dicts of modules, by path. Where paths contradict each other, all leaves stand side by side
    under their keys.
    """
    root: dict[Any, Any] = {}
    for key, path in paths.items():
        inner: Any = root
        for step in path[:-1]:
            inner = inner.setdefault(step, {})
            if not isinstance(inner, dict):
                break
        if not path or not isinstance(inner, dict) or path[-1] in inner:
            return nodes_of({key: (key,) for key in paths}, kinds)
        inner[path[-1]] = key
    return tuple(_unfold(root, (), None, kinds, versions))


def _unfold(
    inner: Any, path: Path, name: Any, kinds: Mapping[str, Leaf], versions: Mapping[Path, Versions]
) -> Iterator[Node]:
    if not isinstance(inner, dict):
        yield Node(len(path), name, kinds[inner], inner)
        return
    is_list = bool(path) and set(inner) == set(range(len(inner)))
    known = None if is_list else versions.get(path)
    yield Node(len(path), name, "list" if is_list else "OrderedDict" if known else "dict", "", known)
    for step in sorted(inner) if is_list else inner:
        yield from _unfold(inner[step], (*path, step), None if is_list else step, kinds, versions)


class Branch(msgspec.Struct, gc=False):
    """A node with its children, as `grow` builds it from the flat list."""

    node: Node
    children: "list[Branch]"


def grow(nodes: Iterable[Node]) -> Branch:
    """The tree that a list of nodes stands for. Raises ValueError for a list that is no tree, or too deep."""
    stack: list[Branch] = []
    root: Branch | None = None
    for node in nodes:
        depth = node.depth
        if not 0 <= depth <= MAX_DEPTH + 1:
            raise ValueError(f"a tree has depths up to {MAX_DEPTH}, not {depth}")
        if (depth == 0) != (root is None) or depth > len(stack):
            raise ValueError("the list of nodes is not a tree")
        del stack[depth:]
        branch = Branch(node, [])
        if root is None:
            root = branch
        else:
            parent = stack[-1]
            if parent.node.kind in LEAVES:
                raise ValueError("a leaf has no children")
            parent.children.append(branch)
        stack.append(branch)
    if root is None:
        raise ValueError("a tree needs a root")
    return root


def build(
    branch: Branch,
    decode: Callable[[Any], Any],
    leaf: Callable[[Node, Path], Any],
    path: Path = (),
    compose: Callable[[Parts, Path], Any] = lambda parts, _path: dict(parts),
) -> Any:
    """Rebuild the containers of a tree; `decode` reads a dict's keys and `leaf` gives each leaf.

    `compose` gives what stands for a tensor that is made of other tensors; by default a dict of its parts.
    """
    kind, _, detail = branch.node.kind.partition(":")
    if branch.node.kind in LEAVES:
        return leaf(branch.node, path)
    if kind in ("list", "tuple"):
        built = [build(child, decode, leaf, (*path, i), compose) for i, child in enumerate(branch.children)]
        return built if kind == "list" else tuple(built)
    if kind == "namedtuple":
        fields = [str(child.node.name) for child in branch.children]
        values = [build(c, decode, leaf, (*path, f), compose) for c, f in zip(branch.children, fields, strict=True)]
        return make_namedtuple(detail, fields)._make(values)
    result = _empty_dict(kind, detail)
    set_versions(result, branch.node.versions)
    for key, child in zip(_names(branch, decode), branch.children, strict=True):
        result[key] = None  # keeps the order, even if the rest fails
        result[key] = build(child, decode, leaf, (*path, key), compose)
    return compose(result, path) if isinstance(result, Parts) else result


def _empty_dict(kind: str, detail: str) -> dict[Any, Any]:
    if kind == "composite":
        return Parts(detail)
    return defaultdict(FACTORIES[detail]) if kind == "defaultdict" else DICTS[kind]()


def _names(branch: Branch, decode: Callable[[Any], Any]) -> list[Any]:
    keys = [decode(child.node.name) for child in branch.children]
    try:
        return differing(keys)
    except TypeError:
        odd = next(key for key in keys if not _is_hashable(key))
        raise ValueError(f"{str(odd)[:80]} cannot be the key of a dict") from None


def _is_hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def make_namedtuple(name: str, fields: list[str]) -> Any:
    """A namedtuple class of this name; odd names (they come from a file) are replaced by safe ones."""
    return namedtuple(name if name.isidentifier() else "Record", fields, rename=True)  # noqa: PYI024


def check_kinds(nodes: Iterable[Node]) -> None:
    """Refuse kinds of node that this version does not know."""
    for spelled in {node.kind for node in nodes}:
        kind, _, detail = spelled.partition(":")
        plain = kind in (*LEAVES, *DICTS, "list", "tuple") and not detail
        detailed = {"defaultdict": FACTORIES, "composite": COMPOSITES}.get(kind, ())
        if not (plain or kind == "namedtuple" or detail in detailed):
            raise ValueError(f"a node of the unknown kind {spelled[:80]!r}")


def restore(value: Any, replace: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """Put new leaves into an existing state: dicts and lists in place, tuples as new objects. Returns the state.

    `replace` is called with every object and gives its replacement, or NotImplemented to look into the object.
    """
    finished = replace(value, path)
    if finished is not NotImplemented:
        return finished
    if isinstance(value, dict):
        for key in list(value):
            value[key] = restore(value[key], replace, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            value[i] = restore(item, replace, (*path, i))
    elif isinstance(value, tuple):
        keys = getattr(value, "_fields", range(len(value)))
        items = [restore(v, replace, (*path, k)) for k, v in zip(keys, value, strict=True)]
        return type(value)(*items) if is_namedtuple(value) else tuple(items)
    return value


def merge(trees: list[tuple[Node, ...]]) -> tuple[Node, ...]:
    """The union of several ranks' trees, in order of first appearance. Raises ValueError with the path of a clash."""
    if all(tree == trees[0] for tree in trees[1:]):
        return trees[0]
    root = _merge([grow(tree) for tree in trees], ())
    return tuple(_unroll(root))


def _merge(branches: list[Branch], path: Path) -> Branch:
    first = branches[0]
    for other in branches[1:]:
        if (other.node.kind, other.node.key) != (first.node.kind, first.node.key):
            raise ValueError(
                f"{show_path(path)!r} is a {first.node.kind} on one rank and a {other.node.kind} on another"
            )
    if first.node.kind in LEAVES:
        return first
    if first.node.kind in ("list", "tuple") or first.node.kind.startswith("namedtuple"):
        if len({len(b.children) for b in branches}) > 1:
            raise ValueError(f"{show_path(path)!r} has a different length on different ranks")
        columns = zip(*(b.children for b in branches), strict=True)
        return Branch(first.node, [_merge(list(column), (*path, i)) for i, column in enumerate(columns)])
    groups: dict[bytes, list[Branch]] = {}
    for branch in branches:
        for child in branch.children:
            groups.setdefault(msgspec.json.encode(child.node.name), []).append(child)
    return Branch(
        _with_all_versions(branches), [_merge(group, (*path, group[0].node.name)) for group in groups.values()]
    )


def _with_all_versions(branches: list[Branch]) -> Node:
    """The first node, with the versions of the modules of all: pipeline stages hold different modules."""
    node, known = branches[0].node, [b.node.versions for b in branches if b.node.versions]
    if all(versions == node.versions for versions in known):
        return node
    return msgspec.structs.replace(node, versions={k: v for versions in reversed(known) for k, v in versions.items()})


def _unroll(branch: Branch) -> Iterator[Node]:
    yield branch.node
    for child in branch.children:
        yield from _unroll(child)


def check_names(root: Branch) -> None:
    """Refuse a tree in which a dict names a child twice: one would hide the other."""
    pending = [root]
    while pending:
        branch = pending.pop()
        pending.extend([child for child in branch.children if child.children])
        if is_dict(branch.node.kind):
            names = [child.node.name for child in branch.children if isinstance(child.node.name, str)]
            if len(set(names)) != len(names):
                raise ValueError("its tree names a child of a dict twice")


def check_leaves(tree: tuple[Node, ...], tables: dict[str, list[str]]) -> None:
    """Refuse a tree whose leaves of each kind are not the keys of that kind's table, each once."""
    for kind in LEAVES:
        keys, found = tables.get(kind, []), [n.key for n in tree if n.kind == kind]
        if len(set(keys)) != len(keys) or (keys != found and sorted(keys) != sorted(found)):
            raise ValueError(f"its tree and its table of {kind}s do not hold the same keys")
    if any(node.key and node.kind not in LEAVES for node in tree):
        raise ValueError("its tree gives a key to a container")
