"""Names that programs look for in a module because torch's module of that name has them.

A module of this package holds what is Milepost's. Of the other names of torch's module, those that it only takes from
one of its neighbours are looked up in Milepost's module of that neighbour's name. The rest is torch's own, and each
module says which: private helpers of torch's implementation, which are right for what they do.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

_THEIRS, _OURS = "torch.distributed.checkpoint.", "milepost.dcp."
_HOMES = {
    "_nested_dict": "FLATTEN_MAPPING",
    "_traverse": "OBJ_PATH",
    "_hf_utils": "CUSTOM_METADATA_KEY DATA_OFFSETS_KEY DCP_VERSION_KEY DEFAULT_EXTRA_METADATA_KEY DTYPE_KEY FORMAT_KEY "
    "FORMAT_VALUE HF_DCP_VERSION SAVED_OFFSETS_KEY SHAPE_KEY SHARDED_DIR_NAME SUFFIX _metadata_fn",
    "logging_handlers": "DCP_LOGGER_NAME",
    "metadata": "STATE_DICT_TYPE STORAGE_TYPES",
    "stateful": "StatefulT",
}
"""Constants do not say where they come from."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def lend(module: str, names: str = "") -> None:
    """Let a module of this package (its `__name__`) give the names of torch's module; those listed are torch's own.

    They are looked up when they are used: torch has other private names in each release, and some of its modules need
    packages that Milepost does not.
    """
    lent, own = frozenset(names.split()), module.removeprefix(_OURS)

    def get(name: str) -> Any:
        if name in lent:
            return getattr(importlib.import_module(_THEIRS + own), name)
        home = None if name.startswith("__") else _HOME_OF.get(name) or _taken_from(own, name)
        if home is None or home == own:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_OURS + home), name)

    vars(sys.modules[module])["__getattr__"] = get


def _taken_from(own: str, name: str) -> str | None:
    """The neighbour from which torch's module takes a class or function."""
    try:
        theirs: ModuleType = importlib.import_module(_THEIRS + own)
    except ImportError:
        return None
    home = getattr(getattr(theirs, name, None), "__module__", None)
    return home.removeprefix(_THEIRS) if isinstance(home, str) and home.startswith(_THEIRS) else None
