"""How a module of faults starts another one in its own process."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this folder; it needs `environment`."""
    return [sys.executable, "-m", f"faults.{module}", *arguments]


def environment(**more: str) -> dict[str, str]:
    """The environment of this process, with these folders on Python's path, and `more`."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}
