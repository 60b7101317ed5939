"""Inventories for intersphinx from text files that people can read: `name kind page`, one name a line.

    python docs/extensions/inventory.py docs/inventory/torch.txt build/inventory      # writes torch.inv

To link one more name of PyTorch or Python, add a line to docs/inventory. `$` in the page stands for the name.
"""

import os
import sys
import tempfile
import zlib
from pathlib import Path


def entries(file: Path) -> dict[str, tuple[str, str]]:
    """Name to (kind, page) of each line."""
    lines = [line.split() for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return {name: (kind, page.replace("$", name)) for name, kind, page in lines}


def write(file: Path, folder: Path) -> Path:
    """Write the inventory of a text file into a folder, and give its path. Whole or not at all."""
    head = f"# Sphinx inventory version 2\n# Project: {file.stem}\n# Version: \n"
    head += "# The remainder of this file is compressed using zlib.\n"
    body = "".join(f"{name} py:{kind} 1 {page} -\n" for name, (kind, page) in entries(file).items())
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as made:
        made.write(head.encode() + zlib.compress(body.encode()))
    target = folder / f"{file.stem}.inv"
    os.replace(made.name, target)
    return target


if __name__ == "__main__":
    print(write(Path(sys.argv[1]), Path(sys.argv[2])))
