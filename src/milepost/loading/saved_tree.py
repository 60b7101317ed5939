"""The tree of a saved state, looked at beside the state that a load writes into."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.tensor import DTensor

from milepost.core.tree import LEAVES, Branch, Node, Path, build, exact_path, show_path
from milepost.errors import CheckpointDamaged, CheckpointError
from milepost.state.composite import is_composite, parts_of
from milepost.state.values import Codec


def spellings(root: Branch, codec: Codec) -> tuple[dict[str, str], dict[str, str]]:
    """The saved keys by the exact spelling of their paths, and by the plain one where only one path reads so."""
    exact: dict[str, str] = {}
    plain: dict[str, list[str]] = {}

    def leaf(node: Node, path: Path) -> None:
        exact[exact_path(path)] = node.key
        plain.setdefault(show_path(path), []).append(node.key)

    try:
        build(root, lambda name: codec.decode(name, "a key"), leaf)
    except ValueError as error:
        raise (
            error if isinstance(error, CheckpointError) else CheckpointDamaged(f"the tree is not valid: {error}")
        ) from None
    return exact, {text: keys[0] for text, keys in plain.items() if len(keys) == 1}


def find_branch(root: Branch, path: Path, codec: Codec) -> Branch | None:
    """The branch of a saved tree that stands at `path`."""
    here = root
    for part in path:
        following = None
        for i, child in enumerate(here.children):
            name = name_of(here, i, codec)
            if name == part and type(name) is type(part):
                following = child
                break
        if following is None:
            return None
        here = following
    return here


def name_of(branch: Branch, i: int, codec: Codec) -> Any:
    """The step from a container to its i-th child."""
    name = branch.children[i].node.name
    if branch.node.kind in ("list", "tuple"):
        return i
    return name if branch.node.kind.startswith("namedtuple") else codec.decode(name, "a key")


def leaves_of(branch: Branch) -> Iterator[Node]:
    """All leaves below a branch."""
    if branch.node.kind in LEAVES:
        yield branch.node
    for child in branch.children:
        yield from leaves_of(child)


def named_like(current: Any, built: Any) -> Any:
    """A state dict with the keys of the current one where they read the same: DCP makes text of all keys."""
    if not isinstance(current, Mapping) or not isinstance(built, dict):
        return built
    names = {str(name): name for name in current}
    return {names.get(name, name): named_like(current.get(names.get(name, name)), v) for name, v in built.items()}


def lookup(state: Any, path: Path) -> Any:
    """What stands at `path` in a state dict, or None."""
    for part in path:
        try:
            state = parts_of(state) if isinstance(state, DTensor) and is_composite(state) else state
            state = getattr(state, str(part)) if hasattr(state, "_fields") else state[part]
        except (KeyError, IndexError, TypeError, AttributeError):
            return None
    return state
