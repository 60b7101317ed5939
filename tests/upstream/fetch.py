"""PyTorch's own tests for DCP, of one release. They are fetched, and never part of this project."""

import os
import shutil
import tarfile
import tempfile
import urllib.request
from pathlib import Path

RELEASE = "2.12.1"
"""The release whose tests `baseline.json` names: those that pass for torch 2.13 itself."""
ARCHIVE = f"https://github.com/pytorch/pytorch/archive/refs/tags/v{RELEASE}.tar.gz"
INSIDE = "test/distributed/checkpoint/"


def tests_folder():
    """The folder of the tests: UPSTREAM_DIR, or one in the user's cache, into which they are fetched once."""
    given = os.environ.get("UPSTREAM_DIR")
    if given:
        if not list(Path(given).glob("test_*.py")):
            raise SystemExit(f"UPSTREAM_DIR is {given}, and there are no tests: it is to be PyTorch's {INSIDE}")
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "milepost"
    folder = cache / f"upstream-{RELEASE}"
    if not folder.is_dir():
        fetch(os.environ.get("UPSTREAM_URL") or ARCHIVE, folder)
    return folder


def fetch(url, folder):
    """Put the tests of an archive into a folder. It appears when it is whole."""
    print(f"Fetching PyTorch's tests from {url} ...", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with urllib.request.urlopen(url, timeout=60) as answer, tarfile.open(fileobj=answer, mode="r|gz") as archive:
            for member in archive:
                _, _, name = member.name.partition(INSIDE)
                if member.isfile() and name.endswith(".py"):
                    put(made / name, archive.extractfile(member).read())
        if not list(made.glob("test_*.py")):
            raise SystemExit(f"{url} holds no {INSIDE}test_*.py")
        made.rename(folder)
    except OSError as error:
        raise SystemExit(f"cannot fetch PyTorch's tests: {error}. Set UPSTREAM_DIR to a copy of {INSIDE}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def put(path, data):
    if ".." in path.parts:
        raise SystemExit(f"{path} leads out of its folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
