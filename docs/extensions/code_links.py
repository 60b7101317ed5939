"""Code in the text of a page that is a full name, such as `milepost.save` or `torch.load`, becomes a link.

So the Markdown stays plain, and reads well elsewhere. A name of milepost that does not exist, or a name of torch that
is not in docs/inventory/torch.txt, is a warning: the build fails.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import inventory
from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

NAME = re.compile(r"((?:milepost|torch)(?:\.\w+)+|[A-Z]\w+Error|os\.PathLike|pickle)(\(.*\))?")
INVENTORIES = Path(__file__).parent.parent / "inventory"
SOURCE = Path(__file__).parents[2] / "src" / "milepost"


def exists(name: str) -> bool:
    """Whether a name of milepost can be imported."""
    if name.startswith("milepost.integrations."):
        return _is_in_source(name.split(".")[2:])
    module, _, attribute = name.rpartition(".")
    try:
        found = importlib.import_module(module)
    except ImportError:
        return exists(module) if "." in module else False  # a method: its class is enough
    try:
        return hasattr(found, attribute) or bool(importlib.import_module(name))
    except ImportError:
        return False


def _is_in_source(parts: list[str]) -> bool:
    """Whether an integration has a name. It is not imported: its framework may not be there."""
    place = SOURCE / "integrations" / parts[0]
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.exists():
        return False
    return len(parts) == 1 or parts[1] in set(_names(ast.parse(file.read_text())))


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


class CodeLinks(SphinxTransform):
    """Makes the links."""

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        """Look at each piece of inline code of this page."""
        del kwargs
        known = {name for file in INVENTORIES.glob("*.txt") for name in inventory.entries(file)}
        for literal in list(self.document.findall(nodes.literal)):
            match = NAME.fullmatch(literal.astext())
            if match is None or _is_linked(literal):
                continue
            name = match[1]
            if name in known or (name.startswith("milepost.") and exists(name)):
                literal.replace_self(self._reference(literal, name))
            elif name.startswith(("milepost.", "torch.")):
                where = "the package" if name.startswith("milepost.") else "docs/inventory/torch.txt"
                logging.getLogger(__name__).warning("%s is not in %s", name, where, location=literal)

    def _reference(self, literal: nodes.literal, name: str) -> addnodes.pending_xref:
        target = "milepost.store.Store" if name == "milepost.Store" else name
        xref = addnodes.pending_xref(
            "", refdomain="py", reftype="obj", reftarget=target, refexplicit=True, refdoc=self.env.docname
        )
        xref += literal.deepcopy()
        return xref


def _is_linked(node: nodes.Node) -> bool:
    while node.parent is not None:
        node = node.parent
        if isinstance(node, (nodes.reference, addnodes.pending_xref, nodes.title)):
            return True
    return False


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_transform(CodeLinks)
    return {"parallel_read_safe": True}
