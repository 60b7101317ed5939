"""Describes the machine that a benchmark ran on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine(*folders: Path) -> str:
    """Versions, CPUs, memory, kernel, the file system of each folder, and how busy the machine is."""
    names = ("milepost", "torch", "safetensors")
    versions = ", ".join(f"{name} {found}" for name in names if (found := _version(name)))
    disks = ", ".join(_disk(folder) for folder in folders)
    return (
        f"{versions}, Python {platform.python_version()}, Linux {platform.release()}\n"
        f"{os.cpu_count()} CPUs, {_memory_gb('MemTotal'):.0f} GB of memory, "
        f"{_memory_gb('MemAvailable'):.0f} available; {disks}; {load_average()}"
    )


def load_average() -> str:
    """How busy the machine is."""
    return "load average " + ", ".join(f"{n:.1f}" for n in os.getloadavg())


def _disk(folder: Path) -> str:
    disk = _kind_of_disk(folder)
    return f"{disk} (memory, not a disk: fsync costs nothing here)" if disk in ("tmpfs", "ramfs") else disk


def _memory_gb(name: str) -> float:
    return int(Path("/proc/meminfo").read_text().split(f"{name}:")[1].split()[0]) * 1024 / 1e9


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _kind_of_disk(folder: Path) -> str:
    """The file system that a folder is on, by its name in the mount table."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    inside = [(len(at), kind) for at, kind in mounts if folder.resolve().is_relative_to(at)]
    return max(inside)[1] if inside else "unknown"
