"""Versions of modules: what `torch.nn.Module.state_dict` notes in `_metadata`, for code that upgrades states. Pure."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

ModuleVersion = int | float | str
Versions = dict[str, ModuleVersion]
"""The version of each module that has one, by the prefix of its keys ("" for the outermost)."""
_MAX_LETTERS = 100
_MAX_NUMBER = 2**53
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def versions_of(state_dict: Any) -> Versions | None:
    """The versions that a module's state dict carries; None where it carries none.

    Modules that only wrap another one leave no trace in the keys, and none here. Raises ValueError for a version that
    is neither a number nor text.
    """
    metadata = getattr(state_dict, "_metadata", None) if isinstance(state_dict, OrderedDict) else None
    if not isinstance(metadata, Mapping):
        return None
    found: Versions = {}
    for prefix, entry in metadata.items():
        version = entry.get("version") if isinstance(entry, Mapping) else None
        if version is None or not isinstance(prefix, str):
            continue
        if not _is_version(version):
            shown = repr(version)[:80]
            raise ValueError(f"the module {prefix!r} has the version {shown}, neither a short text nor a number")
        found[without_wrappers(prefix)] = version
    return found or None


def plain_versions(metadata: Any) -> Versions:
    """The versions in what a file calls `_metadata`. What is not as torch writes it is left out."""
    entries = metadata.items() if isinstance(metadata, dict) else ()
    return {
        prefix: entry["version"]
        for prefix, entry in entries
        if type(prefix) is str and isinstance(entry, dict) and _is_version(entry.get("version"))
    }


def _is_version(value: Any) -> bool:
    if type(value) is str:
        return len(value) <= _MAX_LETTERS and value.isascii()
    return type(value) in (int, float) and -_MAX_NUMBER < value < _MAX_NUMBER


def without_wrappers(prefix: str) -> str:
    """A module's prefix as it is without the modules that wrap others."""
    if not any(wrapper in prefix for wrapper in _WRAPPERS):
        return prefix
    return ".".join(part for part in prefix.split(".") if part not in _WRAPPERS)


def as_metadata(versions: Mapping[str, ModuleVersion]) -> "OrderedDict[str, dict[str, Any]]":
    """The `_metadata` of a state dict with these versions."""
    return OrderedDict((prefix, {"version": version}) for prefix, version in versions.items())


def set_versions(state_dict: Any, versions: Mapping[str, ModuleVersion] | None) -> None:
    """Note versions in a state dict as torch does."""
    if versions and isinstance(state_dict, OrderedDict):
        state_dict._metadata = as_metadata(versions)  # type: ignore[attr-defined]  # noqa: SLF001


def changed_prefixes(saved: Mapping[str, ModuleVersion], state_dict: Any) -> list[str]:
    """The prefixes of the modules in a state dict that have another version than the saved ones."""
    metadata = getattr(state_dict, "_metadata", None) or {}
    return [prefix for prefix, entry in metadata.items() if saved.get(without_wrappers(prefix)) != entry.get("version")]
