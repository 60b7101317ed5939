"""Puts `milepost.dcp` in the place of `torch.distributed.checkpoint`, in one of two ways.

alias: the name leads to Milepost, for tests and for torch itself. Two worlds of modules live under the same names.
`sys.modules` holds Milepost's, so that patches and unpickling find them. Torch's own are put there for the moment of an
import, if Milepost or torch's own DCP modules do the import.

rewrite: the text of the tests says the other name. Torch's module lives beside, as for a user who changes imports.
"""

import builtins
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
import types

THEIRS, OURS = "torch.distributed.checkpoint", "milepost.dcp"
KIT = ("torch.testing._internal.distributed.checkpoint_utils", "torch.testing._internal.distributed.common_state_dict")
"""The helpers of torch's tests that import DCP."""
real_import, real_import_module = builtins.__import__, importlib.import_module


def install(how):
    if how == "rewrite":
        sys.meta_path.insert(0, RewriteFinder())
    else:
        sys.meta_path.insert(0, AliasFinder())
        builtins.__import__ = alias_import
        importlib.import_module = alias_import_module


def is_theirs(name):
    return name == THEIRS or name.startswith(f"{THEIRS}.")


class Worlds:
    """Which modules stand in `sys.modules` under the names of torch's."""

    def __init__(self):
        self.lock = threading.RLock()
        self.now = "ours"
        self._away = {"ours": {}, "theirs": {}}

    @contextlib.contextmanager
    def enter(self, world):
        with self.lock:
            before = self.now
            self._switch(before, world)
            try:
                yield
            finally:
                self._switch(world, before)

    def _switch(self, old, new):
        if old == new:
            return
        self._away[old] = {name: sys.modules.pop(name) for name in list(sys.modules) if is_theirs(name)}
        sys.modules.update(self._away[new])
        self.now = new
        parent = sys.modules.get("torch.distributed")
        if parent is not None:
            vars(parent).pop("checkpoint", None)
            if THEIRS in self._away[new]:
                parent.checkpoint = self._away[new][THEIRS]


WORLDS = Worlds()


def world_of(importer):
    inside = importer == "milepost" or importer.startswith("milepost.") or is_theirs(importer)
    return "theirs" if inside else "ours"


class AliasFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if WORLDS.now == "ours" and is_theirs(fullname):
            return importlib.machinery.ModuleSpec(fullname, AliasLoader(), origin="alias")
        return None


class AliasLoader(importlib.abc.Loader):
    def create_module(self, spec):
        return None

    def exec_module(self, module):
        name = module.__spec__.name
        sys.modules[name] = real_import_module(OURS + name[len(THEIRS) :])


class View(types.ModuleType):
    """A module with some attributes replaced."""

    def __init__(self, inner, replaced):
        super().__init__(inner.__name__)
        self.__dict__.update(replaced, _inner=inner)

    def __getattr__(self, name):
        return getattr(self.__dict__["_inner"], name)


def absolute(name, variables, level):
    if not level:
        return name
    package = variables.get("__package__")
    if package is None:
        package = variables.get("__name__", "").rpartition(".")[0]
    base = package.rsplit(".", level - 1)[0] if level > 1 else package
    return f"{base}.{name}" if name else base


def alias_import(name, globals=None, locals=None, fromlist=(), level=0):  # noqa: A002
    wanted = name if level == 0 and not name.startswith("torch") else absolute(name, globals or {}, level)
    from_parent = wanted == "torch.distributed" and "checkpoint" in (fromlist or ())
    if not is_theirs(wanted) and not from_parent:
        return real_import(name, globals, locals, fromlist, level)
    # C code, such as the unpickler, passes a list, and then reads sys.modules, which holds ours.
    world = "ours" if type(fromlist) is list else world_of((globals or {}).get("__name__", ""))
    with WORLDS.lock:
        if from_parent:
            rest = [one for one in fromlist if one != "checkpoint"]
            real_import("torch.distributed", globals, locals, rest, 0)
            with WORLDS.enter(world):
                top = real_import_module(THEIRS)
            return View(sys.modules["torch.distributed"], {"checkpoint": top})
        if world == WORLDS.now and not fromlist:
            return real_import(name, globals, locals, fromlist, level)
        with WORLDS.enter(world):
            module = real_import_module(wanted)
            fill(module, wanted, fromlist or ())
            top = sys.modules[THEIRS]
    if fromlist:
        return module
    return View(sys.modules["torch"], {"distributed": View(sys.modules["torch.distributed"], {"checkpoint": top})})


def fill(module, name, fromlist):
    """Import the submodules that a from-list names."""
    for one in fromlist:
        if one != "*" and not hasattr(module, one):
            with contextlib.suppress(ModuleNotFoundError):
                setattr(module, one, real_import_module(f"{name}.{one}"))


def alias_import_module(name, package=None):
    if name.startswith(THEIRS):
        with WORLDS.enter(world_of(sys._getframe(1).f_globals.get("__name__", ""))):
            return real_import_module(name, package)
    return real_import_module(name, package)


class RewriteFinder(importlib.abc.MetaPathFinder):
    """The tests are rewritten copies; the helpers of torch's kit that import DCP are rewritten as they are loaded."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in KIT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None:
            spec.loader = RewriteLoader(fullname, spec.origin)
        return spec


class RewriteLoader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        text = self.get_source(fullname).replace(THEIRS, OURS)
        return compile(text, self.path, "exec", dont_inherit=True)
