"""The house stays in order: imports point down, without cycles; the core is pure; public names are documented."""

import ast
import inspect
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import milepost

ROOT = Path(milepost.__file__).parent
LAYERS = [
    ["errors", "version"],
    ["core"],
    ["events"],
    ["store", "comm"],
    ["state"],
    ["data"],
    ["commit"],
    ["formats.read"],
    ["saving", "loading"],
    ["checkpoint"],
    ["planning"],
    ["background"],
    ["api"],
    ["formats.write"],
    ["steps"],
    ["inspection"],
    ["copying", "doctor"],
    ["bench"],
    ["", "dcp", "testing"],
    ["view", "integrations"],
    ["cli"],
    ["__main__"],
]
"""Folders and modules, bottom to top, as in docs/explanation/design.md. Those on one line do not import each other."""
PURE = {"bisect", "collections", "dataclasses", "functools", "itertools", "math", "re", "struct", "typing", "msgspec"}
PURE |= {"numpy", "operator", "statistics", "types", "xxhash"}


@cache
def modules():
    """(name, tree) for each module."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append((name, ast.parse(path.read_text())))
    return tuple(found)


def imports(tree):
    """(module, names, at the top) for each import of the file."""
    top = {id(node) for node in ast.walk(tree)}
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            top -= {id(node) for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, [], id(node) in top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or "", [alias.name for alias in node.names], id(node) in top


def room(name):
    """The entry of LAYERS that a module belongs to, and the number of its line."""
    for number, names in enumerate(LAYERS):
        for known in names:
            if name == known or (known and name.startswith(known + ".")):
                return number, known
    raise AssertionError(f"{name} has no layer: add it to LAYERS, where it belongs")


def own(module):
    return module.removeprefix("milepost").removeprefix(".") if module.split(".")[0] == "milepost" else None


def test_imports_point_down():
    for name, tree in modules():
        if name == "formats":
            continue
        here, own_room = room(name)
        for module, taken, _ in imports(tree):
            target = own(module)
            if target is not None:
                there, other_room = room(target or next(iter(taken), ""))  # `import milepost` takes the face itself
                assert there < here or own_room == other_room, (
                    f"{name} imports {module}, which stands above or beside it"
                )


def test_there_are_no_import_cycles():
    names = {name for name, _ in modules()}
    graph = {}
    for name, tree in modules():
        found = set()
        for module, taken, at_top in imports(tree):
            target = own(module)
            if target is None or not at_top:
                continue
            inner = {f"{target}.{t}".lstrip(".") for t in taken} & names
            found |= inner or {target}
        graph[name] = found - {name}
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for target in graph.get(name, ()):
            visit(target)
        path.pop()
        done.add(name)

    for name in graph:
        visit(name)


def test_the_core_is_pure():
    for name, tree in modules():
        if name.split(".")[0] != "core":
            continue
        for module, _, _ in imports(tree):
            head = module.split(".")[0]
            assert head in PURE or module.startswith(("milepost.core", "milepost.errors")), f"{name} imports {module}"
        calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        assert not calls & {"open", "print", "input"}, f"{name} does I/O"


def test_no_module_takes_another_ones_private_names():
    for name, tree in modules():
        for module, taken, _ in imports(tree):
            if own(module) is not None:
                private = [t for t in taken if t.startswith("_") and not t.startswith("__")]
                assert not private, f"{name} takes {private} from {module}"


def test_torch_free_modules_do_not_bring_torch_in():
    code = "import sys, milepost, milepost.checkpoint, milepost.state.values, milepost.testing\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_all_is_complete_and_resolves():
    assert sorted(milepost.__all__) == milepost.__all__
    for name in milepost.__all__:
        assert getattr(milepost, name) is not None
    assert set(dir(milepost)) == {*milepost.__all__, "dcp", "events", "planning", "store", "testing"}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        milepost.nothing  # noqa: B018


def test_every_public_name_says_what_it_gives():
    for name in milepost.__all__:
        value = getattr(milepost, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        assert inspect.getdoc(value), name
        if inspect.isclass(value):
            for member, item in vars(value).items():
                if not member.startswith("_") and (inspect.isfunction(item) or isinstance(item, property)):
                    assert inspect.getdoc(item), f"{name}.{member}"


def test_functions_fit_a_screen_and_files_can_be_read_in_one_sitting():
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        assert text.count("\n") <= 500, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.body[0].lineno
                assert length <= 60, f"{path}: {node.name} has {length} lines"


def test_new_tensors_say_their_device_and_dtype():
    """A caller may have set another default: `torch.set_default_device`, `torch.set_default_dtype`."""
    makers = {maker.__name__ for maker in _device_constructors()} | {"Tensor", "FloatTensor", "UntypedStorage"}
    for name, tree in modules():
        for node in ast.walk(tree):
            function = node.func if isinstance(node, ast.Call) else None
            if isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "torch":
                said = {keyword.arg for keyword in node.keywords}
                assert function.attr not in makers or {"device", "dtype"} <= said, f"{name}:{node.lineno}"
        taken = {n for module, names, _ in imports(tree) if module == "torch" for n in names}
        assert not taken & makers, f"{name} takes {taken & makers} from torch, which hides its calls"


def test_class_names_are_unique():
    places = {}
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(name)
    assert {known: found for known, found in places.items() if len(found) > 1} == {}, "one noun for one thing"


def test_few_modules_stand_beside_the_folders():
    beside = {path.stem for path in ROOT.glob("*.py")} - {"__init__"}
    assert beside == {"__main__", "api", "checkpoint", "errors", "version"}


def test_no_module_looks_through_the_stacks_of_all_threads():
    """In Python 3.11 two threads that call `sys._current_frames` at once can wait for each other for ever."""
    for name, tree in modules():
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.Attribute) and node.attr == "_current_frames"), f"{name}:{node.lineno}"
