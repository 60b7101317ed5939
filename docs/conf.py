"""The configuration of Sphinx. `./scripts/docs` builds the site; docs/decisions/0010-docs-site.md says why this way."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "extensions"), str(HERE.parent / "src")]

import inventory  # noqa: E402

from milepost.version import __version__  # noqa: E402

project = "Milepost"
version = release = __version__
copyright = "the Milepost authors"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "docstrings",
    "code_links",
]
if not tags.has("quick"):  # type: ignore[name-defined]  # noqa: F821  # Sphinx puts it here
    extensions.append("sphinx.ext.viewcode")  # pages with the source; takes as long as all the rest
exclude_patterns = ["inventory", "extensions"]
html_theme = "furo"
html_title = f"Milepost {version}"

# Headings get the anchors that GitHub gives them, so the same links work in both places.
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

# No network: the inventories are made from the text files beside this one.
intersphinx_mapping = {
    name: (site, str(inventory.write(HERE / "inventory" / f"{name}.txt", HERE.parent / "build" / "inventory")))
    for name, site in (("torch", "https://docs.pytorch.org/docs/stable/"), ("python", "https://docs.python.org/3/"))
}
