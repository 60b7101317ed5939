"""Let a virtual environment use the torch of this Python: links to torch and to what it requires, and to nothing else.

.venv/bin/python scripts/wheel/share_torch.py build/wheel/venv
"""

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path


def needed(name: str, found: dict[str, Distribution]) -> None:
    """Put the distribution of this name, and those that it requires, where they are installed, into `found`."""
    try:
        found[name] = distribution(name)
    except PackageNotFoundError:
        return
    for requirement in found[name].requires or []:
        other = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        if "extra ==" not in requirement and other not in found:
            needed(other, found)


def main(venv: Path) -> None:
    """Make the links, and a .pth file that leads to them."""
    links = (venv / "torch-only").absolute()
    links.mkdir()
    found: dict[str, Distribution] = {}
    needed("torch", found)
    for each in found.values():
        for top in {file.parts[0] for file in each.files or []} - {"..", "__pycache__"}:
            (links / top).symlink_to(Path(str(each.locate_file(top))).absolute())
    [site] = venv.glob("lib/python*/site-packages")
    (site / "torch-only.pth").write_text(f"{links}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
